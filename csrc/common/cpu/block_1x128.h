// Casts of tiles in FP8 blocks of 1 x 128 on the CPU, for ops that read or compute the tiles.
#pragma once

#include <algorithm>

#include "common/cpu/blocks.h"
#include "common/cpu/parallel.h"
#include "common/cpu/scratch.h"
#include "common/numerics/block_cast.h"

namespace apex_te {

constexpr int64_t kBlockRowsAhead = 8;  // that are prefetched
constexpr int64_t kBlockTileCols = 2 * kBlock;
static_assert(kPanel == kBlock, "encode_transposed takes one block of columns");

// Part of the matrix that is cast at a time; it begins at a block.
struct BlockTile {
  int64_t row0, col0, rows, cols;
  static BlockTile of(int64_t num_rows, int64_t num_cols, int64_t row_tile, int64_t col_tile) {
    const int64_t row0 = row_tile * kBlock, col0 = col_tile * kBlockTileCols;
    return {row0, col0, std::min(kBlock, num_rows - row0),
            std::min(kBlockTileCols, num_cols - col0)};
  }
};

inline int64_t block_col_tiles(int64_t cols) {
  return (cols + kBlockTileCols - 1) / kBlockTileCols;
}

// Elements of a tile in memory: the first, the distance of rows, and how many rows follow the first
// one, of which those beyond the tile may be prefetched. `next`: the tile that is due next in rows
// of the same distance, or null.
template <typename T>
struct BlockSource {
  const T* first;
  int64_t ld, rows;
  const T* next;
  const T* row(int64_t r) const { return first + r * ld; }
};

// Destinations of the FP8 data of the tile's columns from c0 on.
inline PanelCodes block_codes(const BlockCast& p, const BlockTile& t, int64_t c0) {
  return {p.rowwise ? p.rowwise + t.row0 * p.cols + t.col0 + c0 : nullptr, p.cols,
          p.columnwise ? p.columnwise + (t.col0 + c0) * p.columnwise_ld + t.row0 : nullptr,
          p.columnwise_ld, p.rows * p.cols >= kStreamedBytes};
}

// scales[i] of amaxes[i] and scale_inv[i].
template <bool kDivides>
APEX_TE_INLINE void block_scales_by(const BlockRule& given, const uint32_t* amaxes, int64_t n,
                                    float* scales, float* scale_inv) {
  const BlockRule rule = given;
  for (int64_t i = 0; i < n; ++i) {
    scales[i] = rule.scale_of<kDivides>(amaxes[i]);
    scale_inv[i] = rule.inverse_of<kDivides>(amaxes[i], scales[i]);
  }
}
APEX_TE_INLINE void block_scales_loop(const BlockRule& rule, const uint32_t* amaxes, int64_t n,
                                      float* scales, float* scale_inv) {
  rule.divides ? block_scales_by<true>(rule, amaxes, n, scales, scale_inv)
               : block_scales_by<false>(rule, amaxes, n, scales, scale_inv);
}
APEX_TE_ONCE APEX_TE_TARGET_PORTABLE void block_scales_portable(const BlockRule& rule,
                                                                const uint32_t* amaxes, int64_t n,
                                                                float* scales, float* scale_inv) {
  block_scales_loop(rule, amaxes, n, scales, scale_inv);
}
APEX_TE_ONCE APEX_TE_TARGET_AVX2 void block_scales_avx2(const BlockRule& rule,
                                                        const uint32_t* amaxes, int64_t n,
                                                        float* scales, float* scale_inv) {
  block_scales_loop(rule, amaxes, n, scales, scale_inv);
}
inline void block_scales(const BlockRule& rule, const uint32_t* amaxes, int64_t n, float* scales,
                         float* scale_inv) {
  (use_avx2() ? block_scales_avx2 : block_scales_portable)(rule, amaxes, n, scales, scale_inv);
}

inline ScaleTraits traits_of(const BlockRule& rule, bool is_bounded, bool is_regular = false) {
  const auto kind = rule.divides ? ScaleKind::kDivisors
                    : rule.pow2  ? ScaleKind::kPowersOfTwo
                                 : ScaleKind::kFactors;
  return {is_bounded, kind, is_regular};
}

// Functions of one FP8 format; the loops around them are compiled once for both formats.
template <typename T>
struct BlockEncoder {
  decltype(&encode_panel<E4M3, kBlock, T>) panel = encode_panel<E4M3, kBlock, T>;
  decltype(&encode_blocks<E4M3, kBlock, T>) blocks = encode_blocks<E4M3, kBlock, T>;
  explicit BlockEncoder(DType fp8) {
    if (fp8 != DType::kE5M2) return;
    panel = encode_panel<E5M2, kBlock, T>;
    blocks = encode_blocks<E5M2, kBlock, T>;
  }
};

// Returns the tile's amax. All rows are scanned before the first scale is computed: a scale is long
// in coming, and computed for many rows at once.
template <typename T>
APEX_TE_INLINE uint32_t cast_1x128(const BlockCast& p, const BlockEncoder<T>& encoder,
                                   const BlockTile& t, const BlockSource<T>& from) {
  using Magnitude = RawMagnitude<T>;
  struct Scratch {
    alignas(kLineBytes) T panels[kBlock * kBlockTileCols];
  };
  T* const panels = thread_scratch<Scratch>().panels;
  alignas(kLineBytes) typename Magnitude::Type columns[kBlockTileCols] = {};
  uint32_t row_amaxes[kBlockTileCols / kBlock][kBlock];
  for (int64_t r = 0; r < t.rows; ++r) {
    const T* x = from.row(r);
    if (r + kBlockRowsAhead < from.rows) prefetch_row(x + kBlockRowsAhead * from.ld, t.cols);
    uint32_t amaxes[kBlockTileCols / kBlock];
    scan_row<kBlock>(x, t.cols, r, kBlock, amaxes, p.columnwise ? columns : nullptr, panels);
    for (int64_t b = 0; b < num_blocks(t.cols); ++b) row_amaxes[b][r] = amaxes[b];
  }
  uint32_t amax = 0;
  for (int64_t c0 = 0; c0 < t.cols; c0 += kPanel) {
    const int64_t cols = std::min(kPanel, t.cols - c0), block = (t.col0 + c0) / kBlock;
    const uint32_t* amaxes = row_amaxes[c0 / kBlock];
    alignas(kLineBytes) float column_scales[kPanel] = {};
    float scales[kBlock], unused[kBlock];
    block_scales(p.rule, amaxes, t.rows, scales,
                 p.rowwise ? p.rowwise_scale_inv + block * padded_to_4(p.rows) + t.row0 : unused);
    AmaxRange range;
    range.add(amaxes, t.rows);
    amax = std::max(amax, range.largest);
    if (p.columnwise) {
      uint32_t column_amaxes[kPanel];
      for (int64_t c = 0; c < cols; ++c) column_amaxes[c] = Magnitude::bits(columns[c0 + c]);
      if (p.columnwise_block_rows == 1) {
        range.add(column_amaxes, cols);
        block_scales(p.rule, column_amaxes, cols, column_scales,
                     p.columnwise_scale_inv + t.row0 / kBlock * padded_to_4(p.cols) + t.col0 + c0);
      } else {
        const uint32_t largest = *std::max_element(column_amaxes, column_amaxes + cols);
        range.add(&largest, 1);
        float scale;
        block_scales(
            p.rule, &largest, 1, &scale,
            p.columnwise_scale_inv + block * padded_to_4(num_blocks(p.rows)) + t.row0 / kBlock);
        std::fill_n(column_scales, cols, scale);
      }
    }
    encoder.panel(panels + c0 * kBlock, t.rows, cols, scales, 1, column_scales, kBlock,
                  traits_of(p.rule, range.is_bounded(), range.is_regular()), block_codes(p, t, c0),
                  from.next ? from.next + c0 : nullptr, from.ld);
  }
  finish_stream();
  return amax;
}

// The ends of the lines of scales, which no block of the matrix fills.
inline void fill_scale_ends(float* scales, int64_t lines, int64_t used) {
  if (!scales) return;
  for (int64_t i = 0; i < lines; ++i)
    std::fill(scales + i * padded_to_4(used) + used, scales + (i + 1) * padded_to_4(used), 1.0f);
}

// What no tile writes: padding of the copies and the scales, and the amax. amax: of all tiles.
inline void finish_block_cast(const BlockCast& p, uint32_t amax) {
  const int64_t row_blocks = num_blocks(p.rows), col_blocks = num_blocks(p.cols);
  if (p.columnwise) zero_padding(p.columnwise, p.cols, p.rows, p.columnwise_ld);
  if (p.rowwise) std::fill_n(p.rowwise + p.rows * p.cols, (p.rowwise_rows - p.rows) * p.cols, 0);
  if (p.block_rows == 1)
    fill_scale_ends(p.rowwise_scale_inv, col_blocks, p.rows);
  else
    fill_scale_ends(p.rowwise_scale_inv, row_blocks, col_blocks);
  if (p.columnwise_block_rows == 1)
    fill_scale_ends(p.columnwise_scale_inv, row_blocks, p.cols);
  else
    fill_scale_ends(p.columnwise_scale_inv, col_blocks, row_blocks);
  if (p.amax) *p.amax = bits_float(std::max(amax, float_bits(*p.amax)));
}

}  // namespace apex_te
