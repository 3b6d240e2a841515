// Tiles of 16-bit elements for the ops activation and bias_gelu: FP8 results rowwise, columnwise or
// both in one pass, and gradients with dbias. A thread has 8 rows of 8 columns.
#pragma once

#include "common/activation/cuda.h"
#include "common/gpu/column_sums.h"
#include "common/gpu/dependent_launch.h"
#include "common/gpu/fp8_tile.h"

namespace apex_te {

template <bool kBwd>
using ActivationTile = FP8Tile<kBwd ? kActivationTileRows : 128>;
template <bool kBwd>
constexpr int kActivationTileBlocks = kBwd ? 5 : 4;  // of a multiprocessor, wanted

// Leaves a warp's sums of its columns in shared memory.
template <typename Tile>
__device__ __forceinline__ void stage_column_sums(float (&column_sums)[kVec], float* warp_sums) {
#pragma unroll
  for (int c = 0; c < kVec; ++c)
    // The upper half of a warp holds the next rows of the same columns.
    column_sums[c] += __shfl_down_sync(0xFFFFFFFFu, column_sums[c], Tile::kLanes);
  if (threadIdx.x % 32 >= Tile::kLanes) return;
  float4* to = reinterpret_cast<float4*>(warp_sums);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    to[threadIdx.x % Tile::kLanes * 2 + i] = make_float4(
        column_sums[4 * i], column_sums[4 * i + 1], column_sums[4 * i + 2], column_sums[4 * i + 3]);
}

// Adds the warps' sums of the tile's columns and writes them to the tile's line of the workspace.
template <typename Tile, int kWarps, int kCols>
__device__ __forceinline__ void store_column_sums(const ActivationOp& p,
                                                  const typename Tile::Place& at,
                                                  const float (&sums)[kWarps][kCols]) {
  for (int c = threadIdx.x; c < Tile::kTileCols; c += Tile::kThreads) {
    if (at.col0 + c >= p.cols) break;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][c];
    p.workspace[at.row0 / kActivationTileRows * p.cols + at.col0 + c] = sum;
  }
}

// All loads of a thread are in flight before it computes. kDbias: the sums of a tile's columns are
// wanted too; without kFP8 the results go out in x's dtype.
template <Activation kKind, bool kBwd, bool kBias, bool kFP8, bool kDbias>
__global__ void __launch_bounds__(ActivationTile<kBwd>::kThreads, kActivationTileBlocks<kBwd>)
    activation_tile_kernel(const ActivationOp p) {
  using Tile = ActivationTile<kBwd>;
  constexpr int kWarps = Tile::kThreads / 32, kLanes = Tile::kLanes, kRows = Tile::kRows;
  __shared__ uint32_t warp_amaxes[kWarps];
  __shared__ __align__(16) uint2 tile[kFP8 ? Tile::kSharedWords : 1];
  __shared__ __align__(16) float sums[kDbias ? kWarps : 1][kDbias ? Tile::kTileCols : 1];
  const typename Tile::Place at(p.rows, p.cols, threadIdx.x % kLanes, threadIdx.x / kLanes);
  const int rows = at.rows_present();
  const bool is_half = p.dtype == DType::kFloat16, is_e5m2 = p.fp8 == DType::kE5M2;
  const int64_t first = at.row * p.cols + at.col;
  const BFloat16* x = static_cast<const BFloat16*>(p.x) + first;
  const BFloat16* dy = static_cast<const BFloat16*>(p.dy) + first;
  Words4 bias_words = {};
  if (kBias && p.bias && rows > 0)
    bias_words = load_vec(static_cast<const BFloat16*>(p.bias) + at.col);
  const float scale = kFP8 ? *p.scale : 1.0f;
  const uint32_t seen = kFP8 ? amax_so_far(p.amax) : 0u;
  uint32_t amax = 0;
  Words4 in[kRows], grad[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    in[r] = r < rows ? load_vec(x + r * p.cols) : Words4{};
    if (kBwd) grad[r] = r < rows ? load_vec(dy + r * p.cols) : Words4{};
  }
  uint2 codes[kFP8 ? kRows : 1];
  float bias[kVec], column_sums[kVec] = {};
  if (kBias) unpack16(bias_words, is_half, bias);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float values[kVec], grads[kVec];
    unpack16(in[r], is_half, values);
    if (kBwd) unpack16(grad[r], is_half, grads);
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      values[i] = activation_result<kKind, kBwd, false>(kBias ? values[i] + bias[i] : values[i],
                                                        kBwd ? grads[i] : 0.0f);
    if (r < rows) {
      if (kDbias) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) column_sums[i] += values[i];
      }
      if (kFP8)
        fold_amax(values, amax);
      else
        store_vec_whole(static_cast<BFloat16*>(p.out) + first + r * p.cols,
                        pack16(values, is_half));
    }
    if (kFP8)
      codes[r] = is_e5m2 ? encode_values<E5M2>(values, scale) : encode_values<E4M3>(values, scale);
  }
  if (kFP8 && p.rowwise) Tile::template store_rows<true>(p.rowwise, p.cols, at, codes);
  if (kFP8 && p.columnwise) Tile::stage_columns(codes, tile);
  if (kDbias) {
    let_next_kernel_start();
    stage_column_sums<Tile>(column_sums, sums[threadIdx.x / 32]);
  }
  if (kFP8) stage_amax(amax, warp_amaxes);
  __syncthreads();
  if (kFP8 && p.columnwise) Tile::store_columns_most(p.columnwise, p.columnwise_ld, at, tile);
  if (kDbias && at.row0 < p.rows) store_column_sums<Tile>(p, at, sums);
  if (!kFP8) return;
  finish_amax<Tile::kThreads>(p.amax, seen, warp_amaxes);
  if (at.row0 == 0 && at.col0 == 0 && threadIdx.x == 0 && p.scale_inv) *p.scale_inv = 1.0f / scale;
}

inline bool activation_tile_fits(const ActivationOp& p) {
  return p.dtype != DType::kFloat32 && p.rows && p.cols && p.cols % kVec == 0 &&
         is_aligned(p.x, 16) && is_aligned(p.dy, 16) && is_aligned(p.bias, 16) &&
         is_aligned(p.out, 16) && is_aligned(p.rowwise, 8);
}

template <typename Kinds, bool kBwd>
void launch_activation_tile(const ActivationOp& p, cudaStream_t stream) {
  using Tile = ActivationTile<kBwd>;
  const dim3 grid = Tile::grid(p.rows, p.cols, "activation");
  Kinds::choose(p.kind, [&](auto kind) {
    constexpr Activation kKind = decltype(kind)::value;
    auto kernel = activation_tile_kernel<kKind, kBwd, Kinds::kBias, true, false>;
    if constexpr (kBwd && Kinds::kBias) {
      if (p.out)
        kernel = activation_tile_kernel<kKind, true, true, false, true>;
      else if (p.dbias)
        kernel = activation_tile_kernel<kKind, true, true, true, true>;
    }
    kernel<<<grid, Tile::kThreads, 0, stream>>>(p);
  });
  check_cuda(cudaGetLastError(), "activation");
}

}  // namespace apex_te
