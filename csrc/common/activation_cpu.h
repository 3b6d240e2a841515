// CPU kernels of the ops activation and bias_gelu: tiles of rows, one thread each, through rows of
// floats in the first-level cache.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/activation_op.h"
#include "common/column_sums.h"
#include "common/cpu_vec.h"
#include "common/parallel.h"

namespace apex_te {

// The functions an op is compiled for.
template <Activation... kKinds>
struct ActivationKinds {};

// out[i] = f(x[i]), or dy[i] f'(x[i]); out may be x or dy.
using ActivationRow = void (*)(const float* x, const float* dy, float* out, int64_t n);

template <Activation kKind, bool kBwd>
APEX_TE_INLINE void activation_row(const float* x, const float* dy, float* out, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i)
    out[i] = kBwd ? activation_gradient<kKind>(x[i], dy[i]) : activate<kKind>(x[i]);
}
template <Activation kKind, bool kBwd>
void activation_row_portable(const float* x, const float* dy, float* out, int64_t n) {
  activation_row<kKind, kBwd>(x, dy, out, n);
}
template <Activation kKind, bool kBwd>
APEX_TE_TARGET_AVX2 void activation_row_avx2(const float* x, const float* dy, float* out,
                                             int64_t n) {
  activation_row<kKind, kBwd>(x, dy, out, n);
}
template <Activation kKind, bool kBwd>
APEX_TE_TARGET_AVX512 void activation_row_avx512(const float* x, const float* dy, float* out,
                                                 int64_t n) {
  activation_row<kKind, kBwd>(x, dy, out, n);
}

template <Activation kKind, bool kBwd>
ActivationRow activation_row_of() {
  return use_avx512() ? activation_row_avx512<kKind, kBwd>
         : use_avx2() ? activation_row_avx2<kKind, kBwd>
                      : activation_row_portable<kKind, kBwd>;
}
template <bool kBwd, Activation... kKinds>
ActivationRow activation_row_of(Activation kind, ActivationKinds<kKinds...>) {
  ActivationRow row = nullptr;
  ((kind == kKinds ? void(row = activation_row_of<kKinds, kBwd>()) : void()), ...);
  return row;
}

// Extents of a tile: 128 columns where they are transposed, else a long piece of a row, and as many
// rows as one line of dbias or one store of transposed codes has.
constexpr int64_t kActivationSegment = 1024;
struct ActivationCpuTile {
  int64_t rows, cols;
  explicit ActivationCpuTile(const ActivationOp& p)
      : rows(p.transposed || p.dbias ? kActivationTileRows : 16),
        cols(p.transposed ? 128 : kActivationSegment) {}
};

// One tile; returns its amax as bits.
template <typename T>
APEX_TE_INLINE uint32_t activation_tile(const ActivationOp& p, ActivationRow row,
                                        const ActivationCpuTile& tile, int64_t row0, int64_t col0) {
  const int64_t rows = std::min(tile.rows, p.rows - row0);
  const int64_t cols = std::min(tile.cols, p.cols - col0);
  float values[kActivationSegment], dy[kActivationSegment], bias[kActivationSegment];
  float sums[2][kActivationSegment];  // of the tile, and of 8 rows
  uint8_t codes[kActivationTileRows * 128];
  if (p.bias) widen(static_cast<const T*>(p.bias) + col0, cols, bias);
  if (p.dbias) std::fill_n(sums[0], cols, 0.0f);
  const float scale = p.scale ? *p.scale : 1.0f;
  uint32_t amax = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t i = (row0 + r) * p.cols + col0;
    const float *x = values, *grad = dy;
    float* result = values;
    if constexpr (std::is_same_v<T, float>) {  // needs no copies
      x = static_cast<const float*>(p.x) + i;
      if (p.dy) grad = static_cast<const float*>(p.dy) + i;
      if (p.out) result = static_cast<float*>(p.out) + i;
    } else {
      widen(static_cast<const T*>(p.x) + i, cols, values);
      if (p.dy) widen(static_cast<const T*>(p.dy) + i, cols, dy);
    }
    if (p.bias) {
      for (int64_t c = 0; c < cols; ++c) values[c] = x[c] + bias[c];
      x = values;
    }
    row(x, grad, result, cols);
    if (p.dbias) {
      for (int64_t c = 0; c < cols; ++c) sums[1][c] = r % 8 ? sums[1][c] + result[c] : result[c];
      if (r % 8 == 7 || r + 1 == rows)
        for (int64_t c = 0; c < cols; ++c) sums[0][c] += sums[1][c];
    }
    if (p.out) {
      if (!std::is_same_v<T, float>) narrow(values, cols, static_cast<T*>(p.out) + i);
      continue;
    }
    uint8_t* to = p.transposed ? codes + r * 128 : p.rowwise + i;
    if (!p.transposed && !p.rowwise)
      amax = std::max(amax, amax_of(values, cols));
    else if (p.fp8 == DType::kE5M2)
      amax = std::max(amax, encode_row<E5M2>(values, cols, scale, to));
    else
      amax = std::max(amax, encode_row<E4M3>(values, cols, scale, to));
    if (p.transposed && p.rowwise) std::copy_n(to, cols, p.rowwise + i);
  }
  if (p.transposed)
    transpose_bytes(codes, 128, rows, cols, p.transposed + col0 * p.rows + row0, p.rows);
  if (p.dbias) std::copy_n(sums[0], cols, p.workspace + row0 / kActivationTileRows * p.cols + col0);
  return amax;
}
template <typename T>
uint32_t activation_tile_portable(const ActivationOp& p, ActivationRow row,
                                  const ActivationCpuTile& tile, int64_t row0, int64_t col0) {
  return activation_tile<T>(p, row, tile, row0, col0);
}
template <typename T>
APEX_TE_TARGET_AVX2 uint32_t activation_tile_avx2(const ActivationOp& p, ActivationRow row,
                                                  const ActivationCpuTile& tile, int64_t row0,
                                                  int64_t col0) {
  return activation_tile<T>(p, row, tile, row0, col0);
}
template <typename T>
APEX_TE_TARGET_AVX512 uint32_t activation_tile_avx512(const ActivationOp& p, ActivationRow row,
                                                      const ActivationCpuTile& tile, int64_t row0,
                                                      int64_t col0) {
  return activation_tile<T>(p, row, tile, row0, col0);
}

// All tiles; returns the amax as bits.
template <typename T>
uint32_t activation_tiles(const ActivationOp& p, ActivationRow row) {
  const auto run_tile = use_avx512() ? activation_tile_avx512<T>
                        : use_avx2() ? activation_tile_avx2<T>
                                     : activation_tile_portable<T>;
  const ActivationCpuTile tile(p);
  const int64_t row_tiles = (p.rows + tile.rows - 1) / tile.rows;
  const int64_t col_tiles = (p.cols + tile.cols - 1) / tile.cols;
  std::atomic<uint32_t> amax{0};
  parallel_for(row_tiles * col_tiles, [&](int64_t i) {
    const int64_t row_tile = i / col_tiles;
    fold_amax(amax,
              run_tile(p, row, tile, row_tile * tile.rows, (i - row_tile * col_tiles) * tile.cols));
  });
  return amax.load();
}

template <typename T>
void run_activation_dtype(ActivationOp p, ActivationRow row) {
  uint32_t amax = 0;
  if (!p.bias && !p.dbias && !p.transposed) {
    // Rows mean nothing here: whole segments, then the elements that fill none.
    const int64_t numel = p.rows * p.cols;
    p.rows = numel / kActivationSegment;
    p.cols = kActivationSegment;
    amax = activation_tiles<T>(p, row);
    const int64_t done = p.rows * p.cols;
    p.x = static_cast<const T*>(p.x) + done;
    if (p.dy) p.dy = static_cast<const T*>(p.dy) + done;
    if (p.out) p.out = static_cast<T*>(p.out) + done;
    if (p.rowwise) p.rowwise += done;
    p.rows = 1;
    p.cols = numel - done;
  }
  amax = std::max(amax, activation_tiles<T>(p, row));
  if (p.amax) *p.amax = bits_float(std::max(amax, float_bits(*p.amax)));
  if (p.scale_inv) *p.scale_inv = 1.0f / *p.scale;
  if (p.dbias)
    add_lines<T>(p.workspace, (p.rows + kActivationTileRows - 1) / kActivationTileRows, p.cols,
                 p.dbias);
}

template <bool kBwd, typename Kinds>
void run_activation(const ActivationOp& p) {
  const ActivationRow row = activation_row_of<kBwd>(p.kind, Kinds{});
  switch (p.dtype) {
    case DType::kFloat32:
      return run_activation_dtype<float>(p, row);
    case DType::kFloat16:
      return run_activation_dtype<Half>(p, row);
    default:
      return run_activation_dtype<BFloat16>(p, row);
  }
}

}  // namespace apex_te
