// CPU kernels of mx_quantize: tiles of 128 x 256, one thread each.
#include <algorithm>

#include "common/cpu_blocks.h"
#include "common/parallel.h"
#include "mx_quantize/mx_quantize.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kTileRows = 128, kTileCols = 256;
constexpr int64_t kAhead = 8;  // rows

// The scale codes of n amaxes, and what elements are multiplied by. Returns whether all are
// bounded.
template <typename Format>
APEX_TE_INLINE bool scales_of(const uint32_t* amaxes, int64_t n, bool use_floor, uint8_t* codes,
                              float* multipliers) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t code = mx_scale_code<Format>(amaxes[i], use_floor);
    codes[i] = static_cast<uint8_t>(code);
    multipliers[i] = mx_multiplier(code);
    largest = amaxes[i] > largest ? amaxes[i] : largest;
  }
  return largest < kBoundBits;
}

// kTileRows x kTileCols elements from (row0, col0) on.
template <typename T, typename Format>
APEX_TE_INLINE void quantize_tile(const MxQuantize& p, int64_t row0, int64_t col0) {
  using Magnitude = RawMagnitude<T>;
  constexpr int64_t kRowBlocks = kTileRows / kMxBlock;
  const int64_t rows = std::min(kTileRows, p.rows - row0);
  const int64_t cols = std::min(kTileCols, p.cols - col0);
  const T* x = p.x.data<const T>() + row0 * p.cols + col0;
  typename Magnitude::Type columns[kRowBlocks][kTileCols] = {};
  T panels[kTileRows * kTileCols];
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * p.cols;
    if (r + kAhead < rows) {
      prefetch_row(row + kAhead * p.cols, cols);
      if (p.rowwise) prefetch_row(p.rowwise + (row0 + r + kAhead) * p.cols + col0, cols);
    }
    if (p.transposed) {
      fold_columns(row, cols, columns[r / kMxBlock]);
      copy_to_panels(row, cols, r, kTileRows, panels);
    }
    if (!p.rowwise) continue;
    uint32_t amaxes[kTileCols / kMxBlock];
    float multipliers[kTileCols / kMxBlock];
    block_amaxes<kMxBlock>(row, cols, amaxes);
    const bool is_bounded = scales_of<Format>(
        amaxes, mx_blocks(cols), p.use_floor,
        p.rowwise_scale + (row0 + r) * mx_blocks(p.cols) + col0 / kMxBlock, multipliers);
    encode_blocks<Format, kMxBlock>(row, cols, multipliers, {is_bounded, true},
                                    p.rowwise + (row0 + r) * p.cols + col0);
  }
  if (!p.transposed) return;
  for (int64_t c0 = 0; c0 < cols; c0 += kPanel) {
    const int64_t panel = std::min(kPanel, cols - c0), ld = mx_blocks(p.rows);
    float multipliers[kRowBlocks * kPanel];
    uint8_t codes[kRowBlocks][kPanel];
    bool is_bounded = true;
    for (int64_t b = 0; b < mx_blocks(rows); ++b) {
      uint32_t amaxes[kPanel];
      for (int64_t c = 0; c < kPanel; ++c) amaxes[c] = Magnitude::bits(columns[b][c0 + c]);
      is_bounded &=
          scales_of<Format>(amaxes, kPanel, p.use_floor, codes[b], multipliers + b * kPanel);
    }
    uint8_t* scale = p.transposed_scale + (col0 + c0) * ld + row0 / kMxBlock;
    for (int64_t c = 0; c < panel; ++c)
      for (int64_t b = 0; b < mx_blocks(rows); ++b) scale[c * ld + b] = codes[b][c];
    encode_transposed<Format>(panels + c0 * kTileRows, rows, panel, kMxBlock, multipliers,
                              {is_bounded, true}, p.transposed + (col0 + c0) * p.rows + row0,
                              p.rows);
  }
}
template <typename T, typename Format>
void quantize_tile_portable(const MxQuantize& p, int64_t row0, int64_t col0) {
  quantize_tile<T, Format>(p, row0, col0);
}
template <typename T, typename Format>
APEX_TE_TARGET_AVX2 void quantize_tile_avx2(const MxQuantize& p, int64_t row0, int64_t col0) {
  quantize_tile<T, Format>(p, row0, col0);
}

template <typename T, typename Format>
void quantize_all(const MxQuantize& p) {
  const auto quantize =
      use_avx2() ? quantize_tile_avx2<T, Format> : quantize_tile_portable<T, Format>;
  const int64_t col_tiles = (p.cols + kTileCols - 1) / kTileCols;
  parallel_for((p.rows + kTileRows - 1) / kTileRows * col_tiles, [&](int64_t i) {
    quantize(p, i / col_tiles * kTileRows, i % col_tiles * kTileCols);
  });
}

template <typename T>
void quantize_format(const MxQuantize& p) {
  p.fp8 == DType::kE5M2 ? quantize_all<T, E5M2>(p) : quantize_all<T, E4M3>(p);
}

template <typename T, typename Format>
APEX_TE_INLINE void dequantize_row(const MxDequantize& p, int64_t row) {
  const uint8_t* scale = p.scale + row * mx_blocks(p.cols);
  for (int64_t c = 0; c < p.cols; c += kTileCols) {
    const int64_t n = std::min(kTileCols, p.cols - c);
    float scales[kTileCols / kMxBlock];
    for (int64_t b = 0; b < mx_blocks(n); ++b) scales[b] = mx_scale_value(scale[c / kMxBlock + b]);
    decode_blocks<Format, kMxBlock>(p.codes.data<uint8_t>() + row * p.cols + c, n, scales,
                                    p.out.data<T>() + row * p.cols + c);
  }
}
template <typename T, typename Format>
void dequantize_row_portable(const MxDequantize& p, int64_t row) {
  dequantize_row<T, Format>(p, row);
}
template <typename T, typename Format>
APEX_TE_TARGET_AVX2 void dequantize_row_avx2(const MxDequantize& p, int64_t row) {
  dequantize_row<T, Format>(p, row);
}

template <typename T, typename Format>
void dequantize_all(const MxDequantize& p) {
  constexpr int64_t kRows = 16;
  const auto dequantize =
      use_avx2() ? dequantize_row_avx2<T, Format> : dequantize_row_portable<T, Format>;
  parallel_for((p.rows + kRows - 1) / kRows, [&](int64_t i) {
    for (int64_t r = i * kRows; r < std::min(p.rows, (i + 1) * kRows); ++r) dequantize(p, r);
  });
}

template <typename T>
void dequantize_format(const MxDequantize& p) {
  p.codes.dtype() == DType::kE5M2 ? dequantize_all<T, E5M2>(p) : dequantize_all<T, E4M3>(p);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(mx_quantize) {
  using namespace apex_te;
  const MxQuantize p = check_mx_quantize(args);
  switch (p.x.dtype()) {
    case DType::kFloat32:
      return quantize_format<float>(p);
    case DType::kFloat16:
      return quantize_format<Half>(p);
    default:
      return quantize_format<BFloat16>(p);
  }
}

APEX_TE_DEFINE(mx_dequantize) {
  using namespace apex_te;
  const MxDequantize p = check_mx_dequantize(args);
  switch (p.out.dtype()) {
    case DType::kFloat32:
      return dequantize_format<float>(p);
    case DType::kFloat16:
      return dequantize_format<Half>(p);
    default:
      return dequantize_format<BFloat16>(p);
  }
}
