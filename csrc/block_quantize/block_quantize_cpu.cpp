// CPU kernels of block_quantize: tiles of 128 x 256, one thread each.
#include <algorithm>

#include "block_quantize/block_quantize.h"
#include "common/cpu/block_1x128.h"
#include "common/numerics/with_dtype.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kStripTiles = 4;

template <typename T>
const T* row_of(const BlockQuantize& p, const BlockTile& t, int64_t r) {
  return p.x.data<const T>() + (t.row0 + r) * p.cols + t.col0;
}

template <typename T>
APEX_TE_INLINE uint32_t quantize_128x128(const BlockQuantize& p, const BlockEncoder<T>& encoder,
                                         const BlockTile& t) {
  const int64_t blocks = num_blocks(t.cols);
  uint32_t amaxes[kBlockTileCols / kBlock] = {}, amax = 0;
  for (int64_t r = 0; r < t.rows; ++r) {
    const T* x = row_of<T>(p, t, r);
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
    encoder.blocks(row_of<T>(p, t, r), t.cols, scales, traits_of(p.rule, amax < kBoundBits), row);
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

// A thread's turn: kStripTiles tiles of a row of tiles from the first on. Returns their amax.
template <typename T>
APEX_TE_INLINE uint32_t quantize_strip(const BlockQuantize& p, const BlockEncoder<T>& encoder,
                                       int64_t row_tile, int64_t first) {
  const int64_t last = std::min(block_col_tiles(p.cols), first + kStripTiles) - 1;
  uint32_t amax = 0;
  for (int64_t i = first; i <= last; ++i) {
    const auto t = BlockTile::of(p.rows, p.cols, row_tile, i);
    if (p.block_rows != 1) {
      amax = std::max(amax, quantize_128x128<T>(p, encoder, t));
      continue;
    }
    const auto next = BlockTile::of(p.rows, p.cols, row_tile, i + 1);
    // A panel is asked for as a whole.
    const bool has_next = i < last && next.cols == kBlockTileCols;
    const BlockSource<T> from{row_of<T>(p, t, 0), p.cols, p.rows - t.row0,
                              has_next ? row_of<T>(p, next, 0) : nullptr};
    amax = std::max(amax, cast_1x128<T>(p, encoder, t, from));
  }
  return amax;
}
template <typename T>
APEX_TE_TARGET_PORTABLE uint32_t quantize_strip_portable(const BlockQuantize& p,
                                                         const BlockEncoder<T>& encoder,
                                                         int64_t row_tile, int64_t first) {
  return quantize_strip<T>(p, encoder, row_tile, first);
}
template <typename T>
APEX_TE_TARGET_AVX2 uint32_t quantize_strip_avx2(const BlockQuantize& p,
                                                 const BlockEncoder<T>& encoder, int64_t row_tile,
                                                 int64_t first) {
  return quantize_strip<T>(p, encoder, row_tile, first);
}

template <typename T>
void quantize_all(const BlockQuantize& p) {
  const auto quantize = use_avx2() ? quantize_strip_avx2<T> : quantize_strip_portable<T>;
  const BlockEncoder<T> encoder(p.fp8);
  const int64_t row_blocks = num_blocks(p.rows);
  std::atomic<uint32_t> amax{0};
  const int64_t strips = (block_col_tiles(p.cols) + kStripTiles - 1) / kStripTiles;
  parallel_for(row_blocks * strips, [&](int64_t i) {
    fold_amax(amax, quantize(p, encoder, i / strips, i % strips * kStripTiles));
  });
  finish_block_cast(p, amax.load());
}

// Whole rows, so that memory is read and written in order.
template <typename T>
void dequantize_all(const BlockDequantize& p) {
  constexpr int64_t kRows = 16;
  const auto decode = p.codes.dtype() == DType::kE5M2 ? decode_blocks<E5M2, kBlock, T>
                                                      : decode_blocks<E4M3, kBlock, T>;
  parallel_for((p.rows + kRows - 1) / kRows, [&](int64_t i) {
    for (int64_t r = i * kRows; r < std::min(p.rows, (i + 1) * kRows); ++r)
      for (int64_t c = 0; c < p.cols; c += kBlockTileCols) {
        const int64_t n = std::min(kBlockTileCols, p.cols - c), first = c / kBlock;
        float scales[kBlockTileCols / kBlock];
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
