// Casts in FP8 blocks of 128 x 128 on the CPU.
#pragma once

#include <algorithm>

#include "common/cpu/block_1x128.h"

namespace apex_te {

constexpr int64_t kStripTiles = 4;  // tiles of a thread's turn

// Calls cast(row_tile, first) for each strip of a matrix, from any thread; returns the largest
// result.
template <typename Cast>
uint32_t amax_of_strips(const BlockCast& p, const Cast& cast) {
  const int64_t strips = (block_col_tiles(p.cols) + kStripTiles - 1) / kStripTiles;
  std::atomic<uint32_t> amax{0};
  parallel_for(num_blocks(p.rows) * strips,
               [&](int64_t i) { fold_amax(amax, cast(i / strips, i % strips * kStripTiles)); });
  return amax.load();
}

// One tile of the dense matrix that begins at `first`. Returns its amax.
template <typename T>
APEX_TE_INLINE uint32_t cast_tile_128x128(const BlockCast& p, const T* first,
                                          const BlockEncoder<T>& encoder, const BlockTile& t) {
  const int64_t blocks = num_blocks(t.cols);
  uint32_t amaxes[kBlockTileCols / kBlock] = {}, amax = 0;
  for (int64_t r = 0; r < t.rows; ++r) {
    const T* x = first + (t.row0 + r) * p.cols + t.col0;
    if (r + kBlockRowsAhead < t.rows) prefetch_row(x + kBlockRowsAhead * p.cols, t.cols);
    uint32_t row_amaxes[kBlockTileCols / kBlock];
    block_amaxes<kBlock>(x, t.cols, row_amaxes);
    for (int64_t b = 0; b < blocks; ++b) amaxes[b] = std::max(amaxes[b], row_amaxes[b]);
  }
  float scales[kBlockTileCols / kBlock], inverses[kBlockTileCols / kBlock];
  block_scales(p.rule, amaxes, blocks, scales, inverses);
  const int64_t row_block = t.row0 / kBlock, col_block = t.col0 / kBlock;
  for (int64_t b = 0; b < blocks; ++b) {
    amax = std::max(amax, amaxes[b]);
    if (p.rowwise)
      p.rowwise_scale_inv[row_block * padded_to_4(num_blocks(p.cols)) + col_block + b] =
          inverses[b];
    if (p.columnwise)
      p.columnwise_scale_inv[(col_block + b) * padded_to_4(num_blocks(p.rows)) + row_block] =
          inverses[b];
  }
  if (!p.rowwise && !p.columnwise) return amax;
  struct Scratch {
    alignas(kLineBytes) uint8_t codes[kBlock * kBlockTileCols];
  };
  uint8_t* const codes = thread_scratch<Scratch>().codes;
  const bool streamed = p.rows * p.cols >= kStreamedBytes;
  for (int64_t r = 0; r < t.rows; ++r) {
    if (p.columnwise && !streamed)
      for (int64_t c = r; c < t.cols; c += kBlock)
        prefetch_row(p.columnwise + (t.col0 + c) * p.columnwise_ld + t.row0, t.rows);
    uint8_t* row = codes + r * kBlockTileCols;
    encoder.blocks(first + (t.row0 + r) * p.cols + t.col0, t.cols, scales,
                   traits_of(p.rule, amax < kBoundBits), row);
    if (!p.rowwise) continue;
    uint8_t* out = p.rowwise + (t.row0 + r) * p.cols + t.col0;
    if (streamed)
      stream_bytes(out, row, t.cols);
    else
      std::copy_n(row, t.cols, out);
  }
  if (p.columnwise)
    transpose_bytes(codes, kBlockTileCols, t.rows, t.cols,
                    p.columnwise + t.col0 * p.columnwise_ld + t.row0, p.columnwise_ld, streamed);
  if (streamed) finish_stream();
  return amax;
}

template <typename T>
APEX_TE_INLINE uint32_t cast_strip_128x128(const BlockCast& p, const T* x,
                                           const BlockEncoder<T>& encoder, int64_t row_tile,
                                           int64_t first) {
  const int64_t end = std::min(block_col_tiles(p.cols), first + kStripTiles);
  uint32_t amax = 0;
  for (int64_t i = first; i < end; ++i)
    amax = std::max(
        amax, cast_tile_128x128<T>(p, x, encoder, BlockTile::of(p.rows, p.cols, row_tile, i)));
  return amax;
}
template <typename T>
APEX_TE_TARGET_PORTABLE uint32_t cast_strip_128x128_portable(const BlockCast& p, const T* x,
                                                             const BlockEncoder<T>& encoder,
                                                             int64_t row_tile, int64_t first) {
  return cast_strip_128x128<T>(p, x, encoder, row_tile, first);
}
template <typename T>
APEX_TE_TARGET_AVX2 uint32_t cast_strip_128x128_avx2(const BlockCast& p, const T* x,
                                                     const BlockEncoder<T>& encoder,
                                                     int64_t row_tile, int64_t first) {
  return cast_strip_128x128<T>(p, x, encoder, row_tile, first);
}

// All of the dense matrix x.
template <typename T>
void cast_128x128(const BlockCast& p, const T* x) {
  const auto cast = use_avx2() ? cast_strip_128x128_avx2<T> : cast_strip_128x128_portable<T>;
  const BlockEncoder<T> encoder(p.fp8);
  finish_block_cast(p, amax_of_strips(p, [&](int64_t row_tile, int64_t first) {
                      return cast(p, x, encoder, row_tile, first);
                    }));
}

}  // namespace apex_te
