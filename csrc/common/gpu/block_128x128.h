// Cast of a tile of 128 x 128 elements as one block, rowwise and columnwise.
#pragma once

#include "common/gpu/block_1x128.h"

namespace apex_te {

struct Block128x128Shared {
  __align__(16) uint2 tile[BlockTile::kSharedWords];
  uint32_t warp_amaxes[kBlockWarps];
};

// As cast_1x128; once a block of threads.
template <typename T, typename Format, bool kShifts = false>
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
  if (p.rowwise) store_block_rows<kShifts>(p, at, aligned, is_whole, codes);
  if (p.columnwise) {
    BlockTile::stage_columns(codes, shared.tile);
    __syncthreads();
    store_block_columns(p, at, aligned, is_whole, shared.tile);
  }
  if (threadIdx.x < 4) {
    const int i = threadIdx.x;
    const float value = p.rule.template inverse_of<Format::kDivides>(amax, scale);
    if (p.rowwise_scale_inv)
      store_block_scale(p.rowwise_scale_inv, at.row0, at.col0, p.cols, i, value);
    if (p.columnwise_scale_inv)
      store_block_scale(p.columnwise_scale_inv, at.col0, at.row0, p.rows, i, value);
  }
  finish_amax<BlockTile::kThreads>(p.amax, seen, shared.warp_amaxes);
}

}  // namespace apex_te
