// CPU kernels of block_quantize: tiles of 128 x 256, one thread each.
#include <algorithm>

#include "block_quantize/block_quantize.h"
#include "common/cpu/block_128x128.h"
#include "common/numerics/with_dtype.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

template <typename T>
const T* row_of(const BlockQuantize& p, const BlockTile& t, int64_t r) {
  return p.x.data<const T>() + (t.row0 + r) * p.cols + t.col0;
}

// A thread's turn: kStripTiles tiles of a row of tiles from the first on. Returns their amax.
template <typename T>
APEX_TE_INLINE uint32_t quantize_strip(const BlockQuantize& p, const BlockEncoder<T>& encoder,
                                       int64_t row_tile, int64_t first) {
  const int64_t last = std::min(block_col_tiles(p.cols), first + kStripTiles) - 1;
  uint32_t amax = 0;
  for (int64_t i = first; i <= last; ++i) {
    const auto t = BlockTile::of(p.rows, p.cols, row_tile, i);
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
  if (p.block_rows != 1) return cast_128x128(p, p.x.data<const T>());
  const auto quantize = use_avx2() ? quantize_strip_avx2<T> : quantize_strip_portable<T>;
  const BlockEncoder<T> encoder(p.fp8);
  finish_block_cast(p, amax_of_strips(p, [&](int64_t row_tile, int64_t first) {
                      return quantize(p, encoder, row_tile, first);
                    }));
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
