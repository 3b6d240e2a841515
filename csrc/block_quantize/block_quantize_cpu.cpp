// CPU kernels of block_quantize: tiles of 128 x 256, one thread each.
#include <algorithm>

#include "block_quantize/block_quantize.h"
#include "common/cpu_blocks.h"
#include "common/parallel.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kAhead = 8;  // rows
constexpr int64_t kTileCols = 2 * kBlock;
static_assert(kPanel == kBlock, "encode_transposed takes one block of columns");

struct Tile {
  int64_t row0, col0, rows, cols;
  Tile(int64_t num_rows, int64_t num_cols, int64_t row_tile, int64_t col_tile)
      : row0(row_tile * kBlock),
        col0(col_tile * kTileCols),
        rows(std::min(kBlock, num_rows - row0)),
        cols(std::min(kTileCols, num_cols - col0)) {}
  template <typename T>
  const T* row(const BlockQuantize& p, int64_t r) const {
    return p.x.data<const T>() + (row0 + r) * p.cols + col0;
  }
};

// Returns the tile's amax.
template <typename T, typename Format>
APEX_TE_INLINE uint32_t quantize_1x128(const BlockQuantize& p, const Tile& t) {
  using Magnitude = RawMagnitude<T>;
  typename Magnitude::Type columns[kTileCols] = {};
  T panels[kBlock * kTileCols];
  const int64_t blocks = num_blocks(t.cols);
  uint32_t amax = 0;
  for (int64_t r = 0; r < t.rows; ++r) {
    const T* x = t.row<T>(p, r);
    if (r + kAhead < t.rows) {
      prefetch_row(x + kAhead * p.cols, t.cols);
      if (p.rowwise) prefetch_row(p.rowwise + (t.row0 + r + kAhead) * p.cols + t.col0, t.cols);
    }
    if (p.transposed) {
      fold_columns(x, t.cols, columns);
      copy_to_panels(x, t.cols, r, kBlock, panels);
    }
    if (p.transposed && !p.rowwise) continue;
    uint32_t amaxes[kTileCols / kBlock], row_amax = 0;
    block_amaxes<kBlock>(x, t.cols, amaxes);
    for (int64_t b = 0; b < blocks; ++b) row_amax = std::max(row_amax, amaxes[b]);
    amax = std::max(amax, row_amax);
    if (!p.rowwise) continue;
    float scales[kTileCols / kBlock];
    float* scale_inv = p.rowwise_scale_inv + t.col0 / kBlock * padded_to_4(p.rows) + t.row0 + r;
    for (int64_t b = 0; b < blocks; ++b) {
      scales[b] = p.rule.scale_of(amaxes[b]);
      scale_inv[b * padded_to_4(p.rows)] = 1.0f / scales[b];
    }
    encode_blocks<Format, kBlock>(x, t.cols, scales, {row_amax < kBoundBits, p.rule.pow2},
                                  p.rowwise + (t.row0 + r) * p.cols + t.col0);
  }
  if (!p.transposed) return amax;
  float* scale_inv = p.transposed_scale_inv + t.row0 / kBlock * padded_to_4(p.cols) + t.col0;
  for (int64_t c0 = 0; c0 < t.cols; c0 += kPanel) {
    const int64_t cols = std::min(kPanel, t.cols - c0);
    float scales[kPanel] = {};
    uint32_t panel_amax = 0;
    for (int64_t c = 0; c < cols; ++c) {
      const uint32_t column = Magnitude::bits(columns[c0 + c]);
      panel_amax = column > panel_amax ? column : panel_amax;
      scales[c] = p.rule.scale_of(column);
      scale_inv[c0 + c] = 1.0f / scales[c];
    }
    amax = std::max(amax, panel_amax);
    encode_transposed<Format>(panels + c0 * kBlock, t.rows, cols, kBlock, scales,
                              {panel_amax < kBoundBits, p.rule.pow2},
                              p.transposed + (t.col0 + c0) * p.rows + t.row0, p.rows);
  }
  return amax;
}

template <typename T, typename Format>
APEX_TE_INLINE uint32_t quantize_128x128(const BlockQuantize& p, const Tile& t) {
  const int64_t blocks = num_blocks(t.cols);
  uint32_t amaxes[kTileCols / kBlock] = {}, amax = 0;
  for (int64_t r = 0; r < t.rows; ++r) {
    const T* x = t.row<T>(p, r);
    if (r + kAhead < t.rows) prefetch_row(x + kAhead * p.cols, t.cols);
    uint32_t row_amaxes[kTileCols / kBlock];
    block_amaxes<kBlock>(x, t.cols, row_amaxes);
    for (int64_t b = 0; b < blocks; ++b) amaxes[b] = std::max(amaxes[b], row_amaxes[b]);
  }
  float scales[kTileCols / kBlock];
  const int64_t row_block = t.row0 / kBlock, col_block = t.col0 / kBlock;
  for (int64_t b = 0; b < blocks; ++b) {
    amax = std::max(amax, amaxes[b]);
    scales[b] = p.rule.scale_of(amaxes[b]);
    if (p.rowwise)
      p.rowwise_scale_inv[row_block * padded_to_4(num_blocks(p.cols)) + col_block + b] =
          1.0f / scales[b];
    if (p.transposed)
      p.transposed_scale_inv[(col_block + b) * padded_to_4(num_blocks(p.rows)) + row_block] =
          1.0f / scales[b];
  }
  if (!p.rowwise && !p.transposed) return amax;
  uint8_t own[kBlock * kTileCols];
  uint8_t* codes = p.rowwise ? p.rowwise + t.row0 * p.cols + t.col0 : own;
  const int64_t ld = p.rowwise ? p.cols : kTileCols;
  for (int64_t r = 0; r < t.rows; ++r) {
    if (p.transposed)
      for (int64_t c = r; c < t.cols; c += kBlock)
        prefetch_row(p.transposed + (t.col0 + c) * p.rows + t.row0, t.rows);
    encode_blocks<Format, kBlock>(t.row<T>(p, r), t.cols, scales, {amax < kBoundBits, p.rule.pow2},
                                  codes + r * ld);
  }
  if (p.transposed)
    transpose_bytes(codes, ld, t.rows, t.cols, p.transposed + t.col0 * p.rows + t.row0, p.rows);
  return amax;
}

template <typename T, typename Format>
APEX_TE_INLINE uint32_t quantize_tile(const BlockQuantize& p, const Tile& t) {
  return p.block_rows == 1 ? quantize_1x128<T, Format>(p, t) : quantize_128x128<T, Format>(p, t);
}
template <typename T, typename Format>
uint32_t quantize_tile_portable(const BlockQuantize& p, const Tile& t) {
  return quantize_tile<T, Format>(p, t);
}
template <typename T, typename Format>
APEX_TE_TARGET_AVX2 uint32_t quantize_tile_avx2(const BlockQuantize& p, const Tile& t) {
  return quantize_tile<T, Format>(p, t);
}

// The ends of the lines of scales, which no block of the matrix fills.
void fill_padding(float* scales, int64_t lines, int64_t used) {
  if (!scales) return;
  for (int64_t i = 0; i < lines; ++i)
    std::fill(scales + i * padded_to_4(used) + used, scales + (i + 1) * padded_to_4(used), 1.0f);
}

template <typename T, typename Format>
void quantize_all(const BlockQuantize& p) {
  const auto quantize =
      use_avx2() ? quantize_tile_avx2<T, Format> : quantize_tile_portable<T, Format>;
  const int64_t row_blocks = num_blocks(p.rows), col_blocks = num_blocks(p.cols);
  std::atomic<uint32_t> amax{0};
  const int64_t col_tiles = (p.cols + kTileCols - 1) / kTileCols;
  parallel_for(row_blocks * col_tiles, [&](int64_t i) {
    fold_amax(amax, quantize(p, Tile(p.rows, p.cols, i / col_tiles, i % col_tiles)));
  });
  if (p.block_rows == 1) {
    fill_padding(p.rowwise_scale_inv, col_blocks, p.rows);
    fill_padding(p.transposed_scale_inv, row_blocks, p.cols);
  } else {
    fill_padding(p.rowwise_scale_inv, row_blocks, col_blocks);
    fill_padding(p.transposed_scale_inv, col_blocks, row_blocks);
  }
  if (p.amax) *p.amax = bits_float(std::max(amax.load(), float_bits(*p.amax)));
}

template <typename T>
void quantize_format(const BlockQuantize& p) {
  p.fp8 == DType::kE5M2 ? quantize_all<T, E5M2>(p) : quantize_all<T, E4M3>(p);
}

// Whole rows, so that memory is read and written in order.
template <typename T, typename Format>
APEX_TE_INLINE void dequantize_rows(const BlockDequantize& p, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r)
    for (int64_t c = 0; c < p.cols; c += kTileCols) {
      const int64_t n = std::min(kTileCols, p.cols - c), first = c / kBlock;
      float scales[kTileCols / kBlock];
      for (int64_t b = 0; b < num_blocks(n); ++b)
        scales[b] = p.block_rows == 1
                        ? p.scale_inv[(first + b) * padded_to_4(p.rows) + r]
                        : p.scale_inv[r / kBlock * padded_to_4(num_blocks(p.cols)) + first + b];
      decode_blocks<Format, kBlock>(p.codes.data<uint8_t>() + r * p.cols + c, n, scales,
                                    p.out.data<T>() + r * p.cols + c);
    }
}
template <typename T, typename Format>
void dequantize_rows_portable(const BlockDequantize& p, int64_t begin, int64_t end) {
  dequantize_rows<T, Format>(p, begin, end);
}
template <typename T, typename Format>
APEX_TE_TARGET_AVX2 void dequantize_rows_avx2(const BlockDequantize& p, int64_t begin,
                                              int64_t end) {
  dequantize_rows<T, Format>(p, begin, end);
}

template <typename T, typename Format>
void dequantize_all(const BlockDequantize& p) {
  constexpr int64_t kRows = 16;
  const auto dequantize =
      use_avx2() ? dequantize_rows_avx2<T, Format> : dequantize_rows_portable<T, Format>;
  parallel_for((p.rows + kRows - 1) / kRows,
               [&](int64_t i) { dequantize(p, i * kRows, std::min(p.rows, (i + 1) * kRows)); });
}

template <typename T>
void dequantize_format(const BlockDequantize& p) {
  p.codes.dtype() == DType::kE5M2 ? dequantize_all<T, E5M2>(p) : dequantize_all<T, E4M3>(p);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(block_quantize) {
  using namespace apex_te;
  const BlockQuantize p = check_block_quantize(args);
  switch (p.x.dtype()) {
    case DType::kFloat32:
      return quantize_format<float>(p);
    case DType::kFloat16:
      return quantize_format<Half>(p);
    default:
      return quantize_format<BFloat16>(p);
  }
}

APEX_TE_DEFINE(block_dequantize) {
  using namespace apex_te;
  const BlockDequantize p = check_block_dequantize(args);
  switch (p.out.dtype()) {
    case DType::kFloat32:
      return dequantize_format<float>(p);
    case DType::kFloat16:
      return dequantize_format<Half>(p);
    default:
      return dequantize_format<BFloat16>(p);
  }
}
