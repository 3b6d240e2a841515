// Tiles of 16-bit elements for the ops activation and bias_gelu at any alignment: FP8 results and
// gradients with dbias of rows that do not begin at whole vectors (common/gpu/staged_rows.h). The
// sums are added in the order of tile_cuda.h.
//
// One kernel for each direction: the function is a branch once for 8 elements.
#pragma once

#include "common/activation/tile_cuda.h"
#include "common/gpu/staged_rows.h"

namespace apex_te {

using StagedTile = FP8Tile<kActivationTileRows>;
template <bool kBwd>
constexpr int kStagedBlocks = kBwd ? 5 : 8;  // of a multiprocessor

template <typename Kinds, bool kBwd>
__global__ void __launch_bounds__(StagedTile::kThreads, kStagedBlocks<kBwd>)
    activation_staged_kernel(const ActivationOp p) {
  using Tile = StagedTile;
  constexpr int kWarps = Tile::kThreads / 32, kLanes = Tile::kLanes, kRows = Tile::kRows;
  __shared__ uint32_t warp_amaxes[kWarps];
  __shared__ StagedRows<kRows> staged_x[Tile::kThreads / kLanes];
  __shared__ StagedRows<kRows> staged_dy[kBwd ? Tile::kThreads / kLanes : 1];
  __shared__ __align__(16) float sums[kBwd && Kinds::kBias ? kWarps : 1][Tile::kTileCols];
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const Tile::Place at(p.rows, p.cols, lane, group);
  const StagedPlace place(at.row, at.col0, at.rows - at.row, at.cols - at.col0);
  const auto x = place.of_16_bits(p.x, p.cols), dy = place.of_16_bits(p.dy, p.cols);
  place.fetch(x, p.x, staged_x[group]);
  if (kBwd) place.fetch(dy, p.dy, staged_dy[group]);
  const auto out = place.of(static_cast<uint16_t*>(p.out), p.cols);
  const auto rowwise = place.of(p.rowwise, p.cols);
  const bool is_half = p.dtype == DType::kFloat16, is_e5m2 = p.fp8 == DType::kE5M2;
  float bias[kVec], column_sums[kVec] = {};
  if (Kinds::kBias) {
    const BFloat16* from = static_cast<const BFloat16*>(p.bias);
    unpack16(from ? load_shifted(from + at.col, p.cols - at.col, from, from + p.cols) : Words4{},
             is_half, bias);
  }
  const float scale = p.scale ? *p.scale : 1.0f;
  const uint32_t seen = amax_so_far(p.amax);
  uint32_t amax = 0;
  finish_fetches();
#pragma unroll 1
  for (int r = 0; r < kRows; ++r) {
    float values[kVec], grads[kVec] = {};
    unpack16(place.read(x, staged_x[group], r), is_half, values);
    if (kBwd) unpack16(place.read(dy, staged_dy[group], r), is_half, grads);
    Kinds::choose(p.kind, [&](auto kind) {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        values[i] = activation_result<decltype(kind)::value, kBwd, false>(
            Kinds::kBias ? values[i] + bias[i] : values[i], grads[i]);
    });
    if (r < place.rows) {
      fold_amax(values, amax);
      if (kBwd && Kinds::kBias) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) column_sums[i] += values[i];
      }
    }
    if (p.out) {
      store_staged(out.row(r), pack16(values, is_half).words, place.length(r), lane);
      continue;
    }
    const uint2 codes =
        is_e5m2 ? encode_values<E5M2>(values, scale) : encode_values<E4M3>(values, scale);
    if (p.rowwise) store_staged(rowwise.row(r), {codes.x, codes.y}, place.length(r), lane);
    __syncwarp();
    staged_x[group].codes(r, lane) = codes;
  }
  if (p.columnwise) {
    uint2 codes[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) codes[r] = staged_x[group].codes(r, lane);
    Tile::stage_columns(codes, tile);
  }
  if constexpr (kBwd && Kinds::kBias) {
    let_next_kernel_start();
    stage_column_sums<Tile>(column_sums, sums[threadIdx.x / 32]);
  }
  stage_amax(amax, warp_amaxes);
  __syncthreads();
  if (p.columnwise) Tile::store_columns_most(p.columnwise, p.columnwise_ld, at, tile);
  if constexpr (kBwd && Kinds::kBias)
    if (p.dbias && at.row0 < p.rows) store_column_sums<Tile>(p, at, sums);
  finish_amax<Tile::kThreads>(p.amax, seen, warp_amaxes);
  if (at.row0 == 0 && at.col0 == 0 && threadIdx.x == 0 && p.scale_inv) *p.scale_inv = 1.0f / scale;
}

template <typename Kinds, bool kBwd>
void launch_activation_staged(const ActivationOp& p, cudaStream_t stream) {
  activation_staged_kernel<Kinds, kBwd>
      <<<StagedTile::grid(p.rows, p.cols, "activation"), StagedTile::kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "activation");
}

}  // namespace apex_te
