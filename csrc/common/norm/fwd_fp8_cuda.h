// Forward of the norms to FP8 with the columnwise copy, where neither fwd_ring_cuda.h nor
// fwd_patch_cuda.h applies (very long rows, few rows): the statistics come from a
// kernel of their own, and tiles read x again.
#pragma once

#include "common/gpu/fp8_tile.h"
#include "common/norm/fwd_launch_cuda.h"
#include "common/norm/fwd_patch_cuda.h"
#include "common/numerics/with_dtype.h"

namespace apex_te {

// The codes of a tile from statistics that are there; x is the sum already.
template <typename T, bool kLayerNorm, bool kAligned>
__global__ void __launch_bounds__(FP8Tile<128>::kThreads) norm_fp8_tile_kernel(const NormFwd p) {
  using Tile = FP8Tile<128>;
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  const Tile::Place at(p.rows, p.cols, blockIdx.x);
  Vec8<T> in[Tile::kRows];
  const T* x = static_cast<const T*>(p.x);
  kAligned ? Tile::load<T, true>(x, p.cols, at, in) : Tile::load_any(x, at, in);
  const uint32_t seen = amax_so_far(p.amax);
  const float scale = *p.scale;
  float gamma[kVec], bias[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const bool has = at.col + i < p.cols;
    gamma[i] =
        has && p.params.weight
            ? load_param<T>(p.params.weight, p.params.is_fp32, at.col + i) + p.params.gamma_offset
            : 1.0f;
    bias[i] =
        has && p.params.bias ? load_param<T>(p.params.bias, p.params.is_fp32, at.col + i) : 0.0f;
  }
  uint32_t amax = 0;
  uint2 codes[Tile::kRows];
#pragma unroll
  for (int r = 0; r < Tile::kRows; ++r) {
    codes[r] = make_uint2(0, 0);
    if (at.row + r >= p.rows) continue;
    float values[kVec];
    unpack(in[r], values);
    normalize<kLayerNorm>(values, gamma, bias, kLayerNorm ? p.mean[at.row + r] : 0.0f,
                          p.rstd[at.row + r]);
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (at.col + i < p.cols) amax = max(amax, magnitude_bits(values[i]));
    codes[r] = encode_as(p.fp8, values, scale);
  }
  if (p.rowwise)
    kAligned ? Tile::store_rows<true>(p.rowwise, p.cols, at, codes)
             : Tile::store_rows_any(p.rowwise, at, codes);
  if (p.columnwise) {
    Tile::stage_columns(codes, tile);
    __syncthreads();
    kAligned ? Tile::store_columns<true>(p.columnwise, p.ld, at, tile)
             : Tile::store_columns_any(p.columnwise, p.ld, at, tile);
  }
  finish_fp8(p, amax, seen);
}

// The tiles of p.x, to FP8.
template <typename T, bool kLayerNorm>
void launch_norm_tiles(const NormFwd& p, const char* op, cudaStream_t stream) {
  const int64_t blocks = FP8Tile<128>::num_tiles(p.rows, p.cols);
  check_grid(blocks, op);
  const bool aligned =
      is_aligned(p.x, 16) && fp8_tile_aligned(p.ld, p.cols, p.rowwise, p.columnwise);
  const auto kernel = aligned ? norm_fp8_tile_kernel<T, kLayerNorm, true>
                              : norm_fp8_tile_kernel<T, kLayerNorm, false>;
  kernel<<<static_cast<unsigned>(blocks), FP8Tile<128>::kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), op);
}

template <typename T, bool kLayerNorm>
void launch_norm_fp8(const NormFwd& p, const char* op, int device, cudaStream_t stream) {
  const bool aligned =
      norm_fwd_aligned(p) && fp8_tile_aligned(p.ld, p.cols, p.rowwise, p.columnwise);
  if (!p.rows || !p.cols) return launch_norm_fwd_rows<T, kLayerNorm>(p, op, device, stream);
  if constexpr (kHasCountedBarriers) {
    if (aligned && wants_norm_patches<T, kLayerNorm>(p, device))
      return p.residual ? launch_norm_patches<T, kLayerNorm, true>(p, device, stream)
                        : launch_norm_patches<T, kLayerNorm, false>(p, device, stream);
    // Tiles for less than half of the multiprocessors take longer than two kernels with more
    // blocks.
    const int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount, device);
    RingPlan ring;
    if (plan_norm_ring<T, kLayerNorm>(p, !aligned, device, &ring) &&
        2 * p.rows * ring.ranks > processors * ring.shape.tile_rows)
      return launch_norm_ring<T, kLayerNorm>(p, ring, device, stream);
  }
  NormFwd statistics = p;
  statistics.scale = nullptr;
  statistics.rowwise = statistics.columnwise = nullptr;
  statistics.amax = statistics.scale_inv = nullptr;
  launch_norm_fwd_rows<T, kLayerNorm>(statistics, op, device, stream);
  NormFwd tiles = p;
  if (p.residual) tiles.x = p.residual_sum;
  launch_norm_tiles<T, kLayerNorm>(tiles, op, stream);
}

template <bool kLayerNorm>
void launch_norm_fwd(const NormFwd& p, const char* op, int device, void* stream) {
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto s = static_cast<cudaStream_t>(stream);
    if (p.columnwise)
      launch_norm_fp8<T, kLayerNorm>(p, op, device, s);
    else
      launch_norm_fwd_rows<T, kLayerNorm>(p, op, device, s);
  });
}

// y of a row, in x's dtype, from statistics that are there.
template <typename T, bool kLayerNorm>
__global__ void __launch_bounds__(kMaxNormThreads)
    norm_again_kernel(const NormFwd p, const bool aligned) {
  const RowSpan span{p.cols, aligned};
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.cols;
  const float mean = kLayerNorm ? p.mean[row] : 0.0f, rstd = p.rstd[row];
  for (int64_t s = 0; s < span.steps(); ++s) {
    float values[kVec], gamma[kVec], bias[kVec];
    span.load(x, s, values);
    span.load_gamma<T>(p.params, s, gamma);
    if (kLayerNorm) span.load_bias<T>(p.params, s, bias);
    normalize<kLayerNorm>(values, gamma, bias, mean, rstd);
    span.store(static_cast<T*>(p.y) + row * p.cols, s, values);
  }
}

// The same y as launch_norm_fwd, from its statistics.
template <bool kLayerNorm>
void launch_norm_again(NormFwd p, const char* op, int device, void* stream) {
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto s = static_cast<cudaStream_t>(stream);
    if (!p.cols) p.rows = 0;
    if (!p.rows) return launch_norm_fwd_rows<T, kLayerNorm>(p, op, device, s);
    if (p.scale) return launch_norm_tiles<T, kLayerNorm>(p, op, s);
    check_grid(p.rows, op);
    const int64_t threads = row_threads(std::max<int64_t>((p.cols + kVec - 1) / kVec, 32));
    norm_again_kernel<T, kLayerNorm>
        <<<static_cast<unsigned>(p.rows),
           static_cast<unsigned>(std::min<int64_t>(threads, kMaxNormThreads)), 0, s>>>(
            p, norm_fwd_aligned(p));
    check_cuda(cudaGetLastError(), op);
  });
}

}  // namespace apex_te
