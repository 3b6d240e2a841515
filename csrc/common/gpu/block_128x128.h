// Cast of a tile of 128 x 128 elements as one block, rowwise and columnwise.
#pragma once

#include "common/gpu/block_1x128.h"

namespace apex_te {

struct Block128x128Shared {
  __align__(16) uint2 tile[BlockTile::kSharedWords];
  uint32_t warp_amaxes[kBlockWarps];
};

// As cast_1x128; once a block of threads.
template <typename T, typename Format>
__device__ __forceinline__ void cast_128x128(const BlockCast& p, const BlockTile::Place& at,
                                             bool aligned, bool is_whole, const Format& format,
                                             const Vec8<T>* in, Block128x128Shared& shared) {
  const uint32_t seen = amax_so_far(p.amax);
  uint32_t amax = 0;
#pragma unroll
  for (int r = 0; r < kVec; ++r) fold_amax(in[r], amax);
  stage_amax(amax_bits(T{}, amax), shared.warp_amaxes);
  __syncthreads();
  amax = 0;
#pragma unroll
  for (int w = 0; w < kBlockWarps; ++w) amax = max(amax, shared.warp_amaxes[w]);
  const float scale = p.rule.template scale_of<Format::kDivides>(amax);

  uint2 codes[kVec];
#pragma unroll
  for (int r = 0; r < kVec; ++r) {
    float values[kVec];
    unpack(in[r], values);
    codes[r] = encode_row<T>(format, values, scale);
  }
  if (p.rowwise) store_block_rows(p, at, aligned, is_whole, codes);
  if (p.columnwise) {
    BlockTile::stage_columns(codes, shared.tile);
    __syncthreads();
    store_block_columns(p, at, aligned, is_whole, shared.tile);
  }
  if (threadIdx.x < 4) {
    // The last block of a line of scales also fills the line up to a multiple of 4.
    const int64_t row = at.row0 / kBlock, col = at.col0 / kBlock;
    const int64_t rows = (p.rows + kBlock - 1) / kBlock, cols = (p.cols + kBlock - 1) / kBlock;
    const int64_t row_end = (rows + 3) / 4 * 4, col_end = (cols + 3) / 4 * 4;
    const int i = threadIdx.x;
    const float value = i == 0 ? p.rule.template inverse_of<Format::kDivides>(amax, scale) : 1.0f;
    if (p.rowwise_scale_inv && (i == 0 || (col == cols - 1 && col + i < col_end)))
      p.rowwise_scale_inv[row * col_end + col + i] = value;
    if (p.columnwise_scale_inv && (i == 0 || (row == rows - 1 && row + i < row_end)))
      p.columnwise_scale_inv[col * row_end + row + i] = value;
  }
  finish_amax<BlockTile::kThreads>(p.amax, seen, shared.warp_amaxes);
}

}  // namespace apex_te
