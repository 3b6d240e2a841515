// CPU kernels of block_quantize: tiles of 128 x 256, one thread each.
#include <algorithm>

#include "block_quantize/block_quantize.h"
#include "common/cpu/blocks.h"
#include "common/cpu/parallel.h"
#include "common/cpu/scratch.h"
#include "common/numerics/with_dtype.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kAhead = 8;  // rows
constexpr int64_t kTileCols = 2 * kBlock;
constexpr int64_t kStripTiles = 4;
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

int64_t col_tiles_of(const BlockQuantize& p) { return (p.cols + kTileCols - 1) / kTileCols; }

// Destinations of the FP8 data of the tile's columns from c0 on.
PanelCodes codes_of(const BlockQuantize& p, const Tile& t, int64_t c0) {
  return {p.rowwise ? p.rowwise + t.row0 * p.cols + t.col0 + c0 : nullptr, p.cols,
          p.columnwise ? p.columnwise + (t.col0 + c0) * p.columnwise_ld + t.row0 : nullptr,
          p.columnwise_ld, p.rows * p.cols >= kStreamedBytes};
}

// scales[i] of amaxes[i] and scale_inv[i].
APEX_TE_INLINE void scales_loop(const ScaleRule& given, const uint32_t* amaxes, int64_t n,
                                float* scales, float* scale_inv) {
  const ScaleRule rule = given;
  for (int64_t i = 0; i < n; ++i) {
    scales[i] = rule.scale_of(amaxes[i]);
    scale_inv[i] = rule.inverse_of(amaxes[i], scales[i]);
  }
}
APEX_TE_ONCE APEX_TE_TARGET_PORTABLE void scales_portable(const ScaleRule& rule,
                                                          const uint32_t* amaxes, int64_t n,
                                                          float* scales, float* scale_inv) {
  scales_loop(rule, amaxes, n, scales, scale_inv);
}
APEX_TE_ONCE APEX_TE_TARGET_AVX2 void scales_avx2(const ScaleRule& rule, const uint32_t* amaxes,
                                                  int64_t n, float* scales, float* scale_inv) {
  scales_loop(rule, amaxes, n, scales, scale_inv);
}
void scales_of(const ScaleRule& rule, const uint32_t* amaxes, int64_t n, float* scales,
               float* scale_inv) {
  (use_avx2() ? scales_avx2 : scales_portable)(rule, amaxes, n, scales, scale_inv);
}

// Functions of one FP8 format; the loops around them are compiled once for both formats.
template <typename T>
struct Encoder {
  decltype(&encode_panel<E4M3, kBlock, T>) panel = encode_panel<E4M3, kBlock, T>;
  decltype(&encode_blocks<E4M3, kBlock, T>) blocks = encode_blocks<E4M3, kBlock, T>;
  explicit Encoder(DType fp8) {
    if (fp8 != DType::kE5M2) return;
    panel = encode_panel<E5M2, kBlock, T>;
    blocks = encode_blocks<E5M2, kBlock, T>;
  }
};

// Returns the tile's amax. All rows are scanned before the first scale is computed: a scale is long
// in coming, and computed for many rows at once.
template <typename T>
APEX_TE_INLINE uint32_t quantize_1x128(const BlockQuantize& p, const Encoder<T>& encoder,
                                       const Tile& t, const T* next) {
  using Magnitude = RawMagnitude<T>;
  struct Scratch {
    alignas(kLineBytes) T panels[kBlock * kTileCols];
  };
  T* const panels = thread_scratch<Scratch>().panels;
  alignas(kLineBytes) typename Magnitude::Type columns[kTileCols] = {};
  uint32_t row_amaxes[kTileCols / kBlock][kBlock];
  for (int64_t r = 0; r < t.rows; ++r) {
    const T* x = t.row<T>(p, r);
    if (t.row0 + r + kAhead < p.rows) prefetch_row(x + kAhead * p.cols, t.cols);
    uint32_t amaxes[kTileCols / kBlock];
    scan_row<kBlock>(x, t.cols, r, kBlock, amaxes, p.columnwise ? columns : nullptr, panels);
    for (int64_t b = 0; b < num_blocks(t.cols); ++b) row_amaxes[b][r] = amaxes[b];
  }
  uint32_t amax = 0;
  for (int64_t c0 = 0; c0 < t.cols; c0 += kPanel) {
    const int64_t cols = std::min(kPanel, t.cols - c0), block = (t.col0 + c0) / kBlock;
    const uint32_t* amaxes = row_amaxes[c0 / kBlock];
    alignas(kLineBytes) float column_scales[kPanel] = {};
    float scales[kBlock], unused[kBlock];
    scales_of(p.rule, amaxes, t.rows, scales,
              p.rowwise ? p.rowwise_scale_inv + block * padded_to_4(p.rows) + t.row0 : unused);
    AmaxRange range;
    range.add(amaxes, t.rows);
    amax = std::max(amax, range.largest);
    if (p.columnwise) {
      uint32_t column_amaxes[kPanel];
      for (int64_t c = 0; c < cols; ++c) column_amaxes[c] = Magnitude::bits(columns[c0 + c]);
      range.add(column_amaxes, cols);
      scales_of(p.rule, column_amaxes, cols, column_scales,
                p.columnwise_scale_inv + t.row0 / kBlock * padded_to_4(p.cols) + t.col0 + c0);
    }
    encoder.panel(panels + c0 * kBlock, t.rows, cols, scales, 1, column_scales, kBlock,
                  {range.is_bounded(), p.rule.pow2, range.is_regular()}, codes_of(p, t, c0),
                  next ? next + c0 : nullptr, p.cols);
  }
  finish_stream();
  return amax;
}

template <typename T>
APEX_TE_INLINE uint32_t quantize_128x128(const BlockQuantize& p, const Encoder<T>& encoder,
                                         const Tile& t) {
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
    const float inverse = p.rule.inverse_of(amaxes[b], scales[b]);
    if (p.rowwise)
      p.rowwise_scale_inv[row_block * padded_to_4(num_blocks(p.cols)) + col_block + b] = inverse;
    if (p.columnwise)
      p.columnwise_scale_inv[(col_block + b) * padded_to_4(num_blocks(p.rows)) + row_block] =
          inverse;
  }
  if (!p.rowwise && !p.columnwise) return amax;
  struct Scratch {
    alignas(kLineBytes) uint8_t codes[kBlock * kTileCols];
  };
  uint8_t* const codes = thread_scratch<Scratch>().codes;
  const bool streamed = p.rows * p.cols >= kStreamedBytes;
  for (int64_t r = 0; r < t.rows; ++r) {
    if (p.columnwise && !streamed)
      for (int64_t c = r; c < t.cols; c += kBlock)
        prefetch_row(p.columnwise + (t.col0 + c) * p.columnwise_ld + t.row0, t.rows);
    uint8_t* row = codes + r * kTileCols;
    encoder.blocks(t.row<T>(p, r), t.cols, scales, {amax < kBoundBits, p.rule.pow2}, row);
    if (!p.rowwise) continue;
    uint8_t* out = p.rowwise + (t.row0 + r) * p.cols + t.col0;
    if (streamed)
      stream_bytes(out, row, t.cols);
    else
      std::copy_n(row, t.cols, out);
  }
  if (p.columnwise)
    transpose_bytes(codes, kTileCols, t.rows, t.cols,
                    p.columnwise + t.col0 * p.columnwise_ld + t.row0, p.columnwise_ld, streamed);
  if (streamed) finish_stream();
  return amax;
}

// A thread's turn: kStripTiles tiles of a row of tiles from the first on. Returns their amax.
template <typename T>
APEX_TE_INLINE uint32_t quantize_strip(const BlockQuantize& p, const Encoder<T>& encoder,
                                       int64_t row_tile, int64_t first) {
  const int64_t last = std::min(col_tiles_of(p), first + kStripTiles) - 1;
  uint32_t amax = 0;
  for (int64_t i = first; i <= last; ++i) {
    const Tile t(p.rows, p.cols, row_tile, i), next(p.rows, p.cols, row_tile, i + 1);
    // A panel is asked for as a whole.
    const bool has_next = i < last && next.cols == kTileCols;
    const T* next_row = has_next ? next.template row<T>(p, 0) : nullptr;
    amax = std::max(amax, p.block_rows == 1 ? quantize_1x128<T>(p, encoder, t, next_row)
                                            : quantize_128x128<T>(p, encoder, t));
  }
  return amax;
}
template <typename T>
APEX_TE_TARGET_PORTABLE uint32_t quantize_strip_portable(const BlockQuantize& p,
                                                         const Encoder<T>& encoder,
                                                         int64_t row_tile, int64_t first) {
  return quantize_strip<T>(p, encoder, row_tile, first);
}
template <typename T>
APEX_TE_TARGET_AVX2 uint32_t quantize_strip_avx2(const BlockQuantize& p, const Encoder<T>& encoder,
                                                 int64_t row_tile, int64_t first) {
  return quantize_strip<T>(p, encoder, row_tile, first);
}

// The ends of the lines of scales, which no block of the matrix fills.
void fill_padding(float* scales, int64_t lines, int64_t used) {
  if (!scales) return;
  for (int64_t i = 0; i < lines; ++i)
    std::fill(scales + i * padded_to_4(used) + used, scales + (i + 1) * padded_to_4(used), 1.0f);
}

template <typename T>
void quantize_all(const BlockQuantize& p) {
  const auto quantize = use_avx2() ? quantize_strip_avx2<T> : quantize_strip_portable<T>;
  const Encoder<T> encoder(p.fp8);
  const int64_t row_blocks = num_blocks(p.rows), col_blocks = num_blocks(p.cols);
  std::atomic<uint32_t> amax{0};
  const int64_t strips = (col_tiles_of(p) + kStripTiles - 1) / kStripTiles;
  parallel_for(row_blocks * strips, [&](int64_t i) {
    fold_amax(amax, quantize(p, encoder, i / strips, i % strips * kStripTiles));
  });
  if (p.columnwise) zero_padding(p.columnwise, p.cols, p.rows, p.columnwise_ld);
  if (p.rowwise) std::fill_n(p.rowwise + p.rows * p.cols, (p.rowwise_rows - p.rows) * p.cols, 0);
  if (p.block_rows == 1) {
    fill_padding(p.rowwise_scale_inv, col_blocks, p.rows);
    fill_padding(p.columnwise_scale_inv, row_blocks, p.cols);
  } else {
    fill_padding(p.rowwise_scale_inv, row_blocks, col_blocks);
    fill_padding(p.columnwise_scale_inv, col_blocks, row_blocks);
  }
  if (p.amax) *p.amax = bits_float(std::max(amax.load(), float_bits(*p.amax)));
}

// Whole rows, so that memory is read and written in order.
template <typename T>
void dequantize_all(const BlockDequantize& p) {
  constexpr int64_t kRows = 16;
  const auto decode = p.codes.dtype() == DType::kE5M2 ? decode_blocks<E5M2, kBlock, T>
                                                      : decode_blocks<E4M3, kBlock, T>;
  parallel_for((p.rows + kRows - 1) / kRows, [&](int64_t i) {
    for (int64_t r = i * kRows; r < std::min(p.rows, (i + 1) * kRows); ++r)
      for (int64_t c = 0; c < p.cols; c += kTileCols) {
        const int64_t n = std::min(kTileCols, p.cols - c), first = c / kBlock;
        float scales[kTileCols / kBlock];
        for (int64_t b = 0; b < num_blocks(n); ++b)
          scales[b] = p.block_rows == 1
                          ? p.scale_inv[(first + b) * padded_to_4(p.rows) + r]
                          : p.scale_inv[r / kBlock * padded_to_4(num_blocks(p.cols)) + first + b];
        decode(p.codes.data<uint8_t>() + r * p.cols + c, n, scales,
               p.out.data<T>() + r * p.cols + c);
      }
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(block_quantize) {
  using namespace apex_te;
  const BlockQuantize p = check_block_quantize(args);
  with_dtype(p.x.dtype(), [&](auto zero) { quantize_all<decltype(zero)>(p); });
}

APEX_TE_DEFINE(block_dequantize) {
  using namespace apex_te;
  const BlockDequantize p = check_block_dequantize(args);
  with_dtype(p.out.dtype(), [&](auto zero) { dequantize_all<decltype(zero)>(p); });
}
