// CPU kernels of mx_quantize: tiles of 128 x 256, one thread each.
#include <algorithm>

#include "common/cpu/blocks.h"
#include "common/cpu/parallel.h"
#include "common/cpu/scratch.h"
#include "common/numerics/with_dtype.h"
#include "mx_quantize/mx_quantize.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kTileRows = 128, kTileCols = 256;
constexpr int64_t kAhead = 8;       // rows
constexpr int64_t kStripTiles = 4;  // a thread's turn

// Functions of one FP8 format; the loops around them are compiled once for both formats.
template <typename T>
struct Encoder {
  uint32_t largest_exponent = (E4M3::kMaxBits >> 23) - 127u;
  float inv_max = 1.0f / E4M3::kMax;
  decltype(&encode_panel<E4M3, kMxBlock, T>) panel = encode_panel<E4M3, kMxBlock, T>;
  explicit Encoder(DType fp8) {
    if (fp8 != DType::kE5M2) return;
    largest_exponent = (E5M2::kMaxBits >> 23) - 127u;
    inv_max = 1.0f / E5M2::kMax;
    panel = encode_panel<E5M2, kMxBlock, T>;
  }
};

// mx_scale_code without a branch, so that the compiler vectorizes it.
APEX_TE_INLINE uint32_t scale_code(uint32_t amax, uint32_t largest_exponent, float inv_max,
                                   bool use_floor) {
  constexpr uint32_t kInfinity = 0x7F800000u;
  const uint32_t exponent = amax >> 23;
  const uint32_t floor = exponent > largest_exponent ? exponent - largest_exponent : 0u;
  const uint32_t ratio = float_bits(bits_float(amax) * inv_max);
  const uint32_t up = ratio <= 0x00400000u ? 0u : (ratio + 0x007FFFFFu) >> 23;
  const uint32_t finite = use_floor ? floor : up;
  const uint32_t special = amax == kInfinity ? 0xFEu : 0xFFu;
  return amax >= kInfinity ? special : finite;
}

// The scale codes of n amaxes, and what elements are multiplied by.
APEX_TE_INLINE void scales_loop(uint32_t largest_exponent, float inv_max, const uint32_t* amaxes,
                                int64_t n, bool use_floor, uint8_t* codes, float* multipliers) {
  // One loop each: together they are full of branches.
  uint32_t all[kTileRows * kTileCols / kMxBlock];
  for (int64_t i = 0; i < n; ++i)
    all[i] = scale_code(amaxes[i], largest_exponent, inv_max, use_floor);
  for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(all[i]);
  for (int64_t i = 0; i < n; ++i) multipliers[i] = mx_multiplier(all[i]);
}
APEX_TE_ONCE APEX_TE_TARGET_PORTABLE void scales_portable(uint32_t largest_exponent, float inv_max,
                                                          const uint32_t* amaxes, int64_t n,
                                                          bool use_floor, uint8_t* codes,
                                                          float* multipliers) {
  scales_loop(largest_exponent, inv_max, amaxes, n, use_floor, codes, multipliers);
}
APEX_TE_ONCE APEX_TE_TARGET_AVX2 void scales_avx2(uint32_t largest_exponent, float inv_max,
                                                  const uint32_t* amaxes, int64_t n, bool use_floor,
                                                  uint8_t* codes, float* multipliers) {
  scales_loop(largest_exponent, inv_max, amaxes, n, use_floor, codes, multipliers);
}
template <typename T>
void scales_of(const Encoder<T>& encoder, const uint32_t* amaxes, int64_t n, bool use_floor,
               uint8_t* codes, float* multipliers) {
  (use_avx2() ? scales_avx2 : scales_portable)(encoder.largest_exponent, encoder.inv_max, amaxes, n,
                                               use_floor, codes, multipliers);
}

// kTileRows x kTileCols elements from (row0, col0) on. All rows are scanned before the first scale
// is computed: a scale is long in coming, and computed for many rows at once.
template <typename T>
APEX_TE_INLINE void quantize_tile(const MxQuantize& p, const Encoder<T>& encoder, int64_t row0,
                                  int64_t col0, bool is_last) {
  using Magnitude = RawMagnitude<T>;
  constexpr int64_t kRowBlocks = kTileRows / kMxBlock, kColBlocks = kTileCols / kMxBlock;
  const int64_t rows = std::min(kTileRows, p.rows - row0);
  const int64_t cols = std::min(kTileCols, p.cols - col0);
  const bool streamed = p.rows * p.cols >= kStreamedBytes;
  const T* x = p.x.data<const T>() + row0 * p.cols + col0;
  struct Scratch {
    alignas(kLineBytes) typename Magnitude::Type columns[kRowBlocks][kTileCols];
    alignas(kLineBytes) T panels[kTileRows * kTileCols];
    uint32_t amaxes[kTileRows * kColBlocks];
    float multipliers[kTileRows * kColBlocks];
  };
  Scratch& scratch = thread_scratch<Scratch>();
  auto& columns = scratch.columns;
  T* const panels = scratch.panels;
  uint32_t* const amaxes = scratch.amaxes;
  float* const multipliers = scratch.multipliers;
  if (p.columnwise) memset(columns, 0, sizeof(columns));
  if (cols < kTileCols) std::fill_n(amaxes, rows * kColBlocks, 0u);
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * p.cols;
    if (row0 + r + kAhead < p.rows) prefetch_row(row + kAhead * p.cols, cols);
    scan_row<kMxBlock>(row, cols, r, kTileRows, p.rowwise ? amaxes + r * kColBlocks : nullptr,
                       p.columnwise ? columns[r / kMxBlock] : nullptr, panels);
  }
  AmaxRange row_range;
  if (p.rowwise) {
    uint8_t codes[kTileRows * kColBlocks];
    scales_of(encoder, amaxes, rows * kColBlocks, p.use_floor, codes, multipliers);
    row_range.add(amaxes, rows * kColBlocks);
    for (int64_t r = 0; r < rows; ++r)
      memcpy(p.rowwise_scale + (row0 + r) * mx_blocks(p.cols) + col0 / kMxBlock,
             codes + r * kColBlocks, mx_blocks(cols));
  }
  for (int64_t c0 = 0; c0 < cols; c0 += kPanel) {
    const int64_t panel = std::min(kPanel, cols - c0), ld = mx_blocks(p.rows);
    alignas(kLineBytes) float column_multipliers[kRowBlocks * kPanel];
    AmaxRange range = row_range;
    if (p.columnwise) {
      uint8_t codes[kRowBlocks][kPanel] = {}, lines[kPanel][kRowBlocks];
      for (int64_t b = 0; b < mx_blocks(rows); ++b) {
        uint32_t column_amaxes[kPanel];
        for (int64_t c = 0; c < kPanel; ++c) column_amaxes[c] = Magnitude::bits(columns[b][c0 + c]);
        scales_of(encoder, column_amaxes, kPanel, p.use_floor, codes[b],
                  column_multipliers + b * kPanel);
        range.add(column_amaxes, kPanel);
      }
      uint8_t* scale = p.columnwise_scale + (col0 + c0) * ld + row0 / kMxBlock;
      for (int64_t c = 0; c < kPanel; ++c)
        for (int64_t b = 0; b < kRowBlocks; ++b) lines[c][b] = codes[b][c];
      if (rows == kTileRows)
        for (int64_t c = 0; c < panel; ++c) memcpy(scale + c * ld, lines[c], kRowBlocks);
      else
        for (int64_t c = 0; c < panel; ++c) memcpy(scale + c * ld, lines[c], mx_blocks(rows));
    }
    const PanelCodes out = {
        p.rowwise ? p.rowwise + row0 * p.cols + col0 + c0 : nullptr, p.cols,
        p.columnwise ? p.columnwise + (col0 + c0) * p.columnwise_ld + row0 : nullptr,
        p.columnwise_ld, streamed};
    encoder.panel(panels + c0 * kTileRows, rows, panel, multipliers + c0 / kMxBlock, kColBlocks,
                  column_multipliers, kMxBlock,
                  {range.is_bounded(), ScaleKind::kPowersOfTwo, range.is_regular()}, out,
                  is_last ? nullptr : x + kTileCols + c0, p.cols);
  }
  finish_stream();
}

// kStripTiles tiles.
template <typename T>
APEX_TE_INLINE void quantize_strip(const MxQuantize& p, const Encoder<T>& encoder, int64_t row0,
                                   int64_t col0) {
  const int64_t end = std::min(p.cols, col0 + kStripTiles * kTileCols);
  for (; col0 < end; col0 += kTileCols)
    quantize_tile<T>(p, encoder, row0, col0, col0 + 2 * kTileCols > end);
}
template <typename T>
APEX_TE_TARGET_PORTABLE void quantize_strip_portable(const MxQuantize& p, const Encoder<T>& encoder,
                                                     int64_t row0, int64_t col0) {
  quantize_strip<T>(p, encoder, row0, col0);
}
template <typename T>
APEX_TE_TARGET_AVX2 void quantize_strip_avx2(const MxQuantize& p, const Encoder<T>& encoder,
                                             int64_t row0, int64_t col0) {
  quantize_strip<T>(p, encoder, row0, col0);
}

template <typename T>
void quantize_all(const MxQuantize& p) {
  const auto quantize = use_avx2() ? quantize_strip_avx2<T> : quantize_strip_portable<T>;
  const Encoder<T> encoder(p.fp8);
  constexpr int64_t kStripCols = kStripTiles * kTileCols;
  const int64_t strips = (p.cols + kStripCols - 1) / kStripCols;
  parallel_for((p.rows + kTileRows - 1) / kTileRows * strips, [&](int64_t i) {
    quantize(p, encoder, i / strips * kTileRows, i % strips * kStripCols);
  });
  if (p.columnwise) zero_padding(p.columnwise, p.cols, p.rows, p.columnwise_ld);
}

template <typename T>
void dequantize_all(const MxDequantize& p) {
  constexpr int64_t kRows = 16;
  const auto decode = p.codes.dtype() == DType::kE5M2 ? decode_blocks<E5M2, kMxBlock, T>
                                                      : decode_blocks<E4M3, kMxBlock, T>;
  parallel_for((p.rows + kRows - 1) / kRows, [&](int64_t i) {
    for (int64_t r = i * kRows; r < std::min(p.rows, (i + 1) * kRows); ++r)
      for (int64_t c = 0; c < p.cols; c += kTileCols) {
        const int64_t n = std::min(kTileCols, p.cols - c);
        const uint8_t* scale = p.scale + r * mx_blocks(p.cols) + c / kMxBlock;
        float scales[kTileCols / kMxBlock];
        for (int64_t b = 0; b < mx_blocks(n); ++b) scales[b] = mx_scale_value(scale[b]);
        decode(p.codes.data<uint8_t>() + r * p.cols + c, n, scales,
               p.out.data<T>() + r * p.cols + c);
      }
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(mx_quantize) {
  using namespace apex_te;
  const MxQuantize p = check_mx_quantize(args);
  with_dtype(p.x.dtype(), [&](auto zero) { quantize_all<decltype(zero)>(p); });
}

APEX_TE_DEFINE(mx_dequantize) {
  using namespace apex_te;
  const MxDequantize p = check_mx_dequantize(args);
  with_dtype(p.out.dtype(), [&](auto zero) { dequantize_all<decltype(zero)>(p); });
}
