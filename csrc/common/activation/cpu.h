// CPU kernels of the ops activation and bias_gelu: tiles of rows, one thread each, through rows of
// floats in the first-level cache.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/activation/arguments.h"
#include "common/cpu/column_sums.h"
#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"

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
APEX_TE_TARGET_PORTABLE void activation_row_portable(const float* x, const float* dy, float* out,
                                                     int64_t n) {
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

// The values, or the derivatives, of all 16-bit elements: to look one up takes less than to compute
// it. The entries that one tensor needs are few, most in the first-level cache.
constexpr int64_t kTableEntries = 1 << 16;
constexpr int64_t kTabledElements = 1 << 18;  // from so many on it is worth making

template <typename T>
std::unique_ptr<float[]> make_table(ActivationRow row) {
  constexpr int64_t kStep = 256;
  auto table = make_scratch<float>(kTableEntries);
  float x[kStep], dy[kStep];
  std::fill_n(dy, kStep, 1.0f);
  for (int64_t i = 0; i < kTableEntries; i += kStep) {
    for (int64_t k = 0; k < kStep; ++k) x[k] = to_float(T{static_cast<uint16_t>(i + k)});
    row(x, dy, table.get() + i, kStep);
  }
  return table;
}
// Null where there is no table: where a gradient is no product with the derivative.
template <typename T, Activation kKind, bool kBwd>
const float* activation_table() {
  constexpr bool kIsRelu = kKind == Activation::kRelu || kKind == Activation::kSquaredRelu;
  if constexpr (kIsRelu) {
    return nullptr;
  } else {
    static const std::unique_ptr<float[]> table = make_table<T>(activation_row_of<kKind, kBwd>());
    return table.get();
  }
}
template <typename T, bool kBwd, Activation... kKinds>
const float* activation_table_of(Activation kind, ActivationKinds<kKinds...>) {
  const float* table = nullptr;
  ((kind == kKinds ? void(table = activation_table<T, kKinds, kBwd>()) : void()), ...);
  return table;
}

#if defined(__x86_64__)
APEX_TE_AVX512 void look_up_avx512(const float* table, const uint16_t* x, int64_t n,
                                   float* values) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = avx512::lanes_at(i, n);
    const __m512i at = _mm512_maskz_cvtepu16_epi32(lanes, _mm256_maskz_loadu_epi16(lanes, x + i));
    _mm512_mask_storeu_ps(
        values + i, lanes,
        _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, at, table, sizeof(float)));
  }
}
#endif
// values[i] = table[x[i]], where x are 16-bit elements.
APEX_TE_INLINE void look_up(const float* table, const uint16_t* x, int64_t n, float* values) {
#if defined(__x86_64__)
  if (use_avx512()) return look_up_avx512(table, x, n, values);
#endif
  for (int64_t i = 0; i < n; ++i) values[i] = table[x[i]];
}

// dy where x is above 0, else 0; NaN where x is NaN. In 16-bit words, as rounding would leave them.
APEX_TE_INLINE void relu_gradient(const uint16_t* x, const uint16_t* dy, uint16_t* dx, int64_t n,
                                  bool is_half) {
  const int16_t infinity = is_half ? 0x7C00 : 0x7F80;
  constexpr int16_t kNaN = 0x7FFF;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const auto a = static_cast<int16_t>(x[i]), g = static_cast<int16_t>(dy[i]);
    const auto magnitude = static_cast<int16_t>(a & 0x7FFF);
    const int16_t kept = static_cast<int16_t>(g & 0x7FFF) > infinity ? kNaN : g;
    const int16_t slope = a > 0 ? kept : int16_t{0};
    dx[i] = static_cast<uint16_t>(magnitude > infinity ? kNaN : slope);
  }
}

// Extents of a tile: 128 columns where they are transposed, else a long piece of a row, and as many
// rows as one line of dbias or one store of columnwise codes has.
constexpr int64_t kActivationSegment = 1024;
struct ActivationCpuTile {
  int64_t rows, cols;
  explicit ActivationCpuTile(const ActivationOp& p)
      : rows(p.columnwise || p.dbias ? kActivationTileRows : 16),
        cols(p.columnwise ? 128 : kActivationSegment) {}
};

struct ActivationScratch {
  float values[kActivationSegment], dy[kActivationSegment], bias[kActivationSegment];
  float sums[2][kActivationSegment];  // of the tile, and of 8 rows
  uint8_t codes[kActivationTileRows * 128];
};

// One tile; returns its amax as bits.
APEX_TE_INLINE uint32_t activation_tile(const ActivationOp& p, ActivationRow row,
                                        const float* table, const ActivationCpuTile& tile,
                                        int64_t row0, int64_t col0) {
  const int64_t rows = std::min(tile.rows, p.rows - row0);
  const int64_t cols = std::min(tile.cols, p.cols - col0);
  const RowDType dtype(p.dtype);
  const bool is_float = dtype.is_float();
  const bool is_words = p.kind == Activation::kRelu && !is_float && p.dy && p.out && !p.bias &&
                        !p.dbias;  // relu_gradient's
  ActivationScratch& scratch = thread_scratch<ActivationScratch>();
  float *values = scratch.values, *dy = scratch.dy, *bias = scratch.bias;
  auto& sums = scratch.sums;
  uint8_t* codes = scratch.codes;
  if (p.bias) dtype.widen(p.bias, col0, cols, bias);
  if (p.dbias) std::fill_n(sums[0], cols, 0.0f);
  const float scale = p.scale ? *p.scale : 1.0f;
  uint32_t amax = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t i = (row0 + r) * p.cols + col0;
    const float *x = values, *grad = dy;
    float* result = values;
    if (is_float) {  // needs no copies
      x = static_cast<const float*>(p.x) + i;
      if (p.dy) grad = static_cast<const float*>(p.dy) + i;
      if (p.out) result = static_cast<float*>(p.out) + i;
    } else {
      const auto* words = static_cast<const uint16_t*>(p.x) + i;
      if (is_words) {
        relu_gradient(words, static_cast<const uint16_t*>(p.dy) + i,
                      static_cast<uint16_t*>(p.out) + i, cols, p.dtype == DType::kFloat16);
        continue;
      }
      if (table)
        look_up(table, words, cols, values);
      else
        dtype.widen(p.x, i, cols, values);
      if (p.dy) dtype.widen(p.dy, i, cols, dy);
    }
    if (p.bias) {
      for (int64_t c = 0; c < cols; ++c) values[c] = x[c] + bias[c];
      x = values;
    }
    if (!table)
      row(x, grad, result, cols);
    else if (p.dy)
      for (int64_t c = 0; c < cols; ++c) values[c] *= dy[c];
    if (p.dbias) {
      for (int64_t c = 0; c < cols; ++c) sums[1][c] = r % 8 ? sums[1][c] + result[c] : result[c];
      if (r % 8 == 7 || r + 1 == rows)
        for (int64_t c = 0; c < cols; ++c) sums[0][c] += sums[1][c];
    }
    if (p.out) {
      if (!is_float) dtype.narrow(values, cols, p.out, i);
      continue;
    }
    uint8_t* to = p.columnwise ? codes + r * 128 : p.rowwise + i;
    if (!p.columnwise && !p.rowwise)
      amax = std::max(amax, amax_of(values, cols));
    else if (p.fp8 == DType::kE5M2)
      amax = std::max(amax, encode_row<E5M2>(values, cols, scale, to));
    else
      amax = std::max(amax, encode_row<E4M3>(values, cols, scale, to));
    if (p.columnwise && p.rowwise) std::copy_n(to, cols, p.rowwise + i);
  }
  if (p.columnwise) {
    uint8_t* columns = p.columnwise + col0 * p.columnwise_ld;
    transpose_bytes(codes, 128, rows, cols, columns + row0, p.columnwise_ld);
    if (row0 + rows == p.rows) zero_padding(columns, cols, p.rows, p.columnwise_ld);
  }
  if (p.dbias) std::copy_n(sums[0], cols, p.workspace + row0 / kActivationTileRows * p.cols + col0);
  return amax;
}
APEX_TE_TARGET_PORTABLE inline uint32_t activation_tile_portable(const ActivationOp& p,
                                                                 ActivationRow row,
                                                                 const float* table,
                                                                 const ActivationCpuTile& tile,
                                                                 int64_t row0, int64_t col0) {
  return activation_tile(p, row, table, tile, row0, col0);
}
APEX_TE_TARGET_AVX2 inline uint32_t activation_tile_avx2(const ActivationOp& p, ActivationRow row,
                                                         const float* table,
                                                         const ActivationCpuTile& tile,
                                                         int64_t row0, int64_t col0) {
  return activation_tile(p, row, table, tile, row0, col0);
}
APEX_TE_TARGET_AVX512 inline uint32_t activation_tile_avx512(const ActivationOp& p,
                                                             ActivationRow row, const float* table,
                                                             const ActivationCpuTile& tile,
                                                             int64_t row0, int64_t col0) {
  return activation_tile(p, row, table, tile, row0, col0);
}

// All tiles; returns the amax as bits.
inline uint32_t activation_tiles(const ActivationOp& p, ActivationRow row, const float* table) {
  const auto run_tile = use_avx512() ? activation_tile_avx512
                        : use_avx2() ? activation_tile_avx2
                                     : activation_tile_portable;
  const ActivationCpuTile tile(p);
  const int64_t row_tiles = (p.rows + tile.rows - 1) / tile.rows;
  const int64_t col_tiles = (p.cols + tile.cols - 1) / tile.cols;
  std::atomic<uint32_t> amax{0};
  parallel_for(row_tiles * col_tiles, [&](int64_t i) {
    const int64_t row_tile = i / col_tiles;
    fold_amax(amax, run_tile(p, row, table, tile, row_tile * tile.rows,
                             (i - row_tile * col_tiles) * tile.cols));
  });
  return amax.load();
}

template <bool kBwd, typename Kinds>
void run_activation(ActivationOp p) {
  const ActivationRow row = activation_row_of<kBwd>(p.kind, Kinds{});
  const float* table = nullptr;
  if (!p.bias && p.rows * p.cols >= kTabledElements) {
    if (p.dtype == DType::kFloat16) table = activation_table_of<Half, kBwd>(p.kind, Kinds{});
    if (p.dtype == DType::kBFloat16) table = activation_table_of<BFloat16, kBwd>(p.kind, Kinds{});
  }
  uint32_t amax = 0;
  if (!p.bias && !p.dbias && !p.columnwise) {
    // Rows mean nothing here: whole segments, then the elements that fill none.
    const int64_t numel = p.rows * p.cols;
    p.rows = numel / kActivationSegment;
    p.cols = kActivationSegment;
    amax = activation_tiles(p, row, table);
    const int64_t done = p.rows * p.cols;
    const RowDType dtype(p.dtype);
    p.x = dtype.at(p.x, done);
    if (p.dy) p.dy = dtype.at(p.dy, done);
    if (p.out) p.out = dtype.at(p.out, done);
    if (p.rowwise) p.rowwise += done;
    p.rows = 1;
    p.cols = numel - done;
  }
  amax = std::max(amax, activation_tiles(p, row, table));
  if (p.amax) *p.amax = bits_float(std::max(amax, float_bits(*p.amax)));
  if (p.scale_inv) *p.scale_inv = 1.0f / *p.scale;
  if (p.dbias)
    add_lines(p.workspace, (p.rows + kActivationTileRows - 1) / kActivationTileRows, p.cols,
              p.dtype, p.dbias);
}

}  // namespace apex_te
