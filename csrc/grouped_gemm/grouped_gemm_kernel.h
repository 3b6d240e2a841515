// The kernel of grouped_gemm, for sm_90: a persistent kernel of clusters of two blocks. In each
// block one warp copies tiles of both operands into a ring in shared memory, and two warpgroups
// multiply them, each half of the tile's rows.
#pragma once

#include <algorithm>

#include "common/gpu/cluster.h"
#include "grouped_gemm/grouped_gemm_sums.h"

namespace apex_te {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where a warp's rows of a tile go: from `row` on, those before `last`. In a result [groups, M, N]
// the rows of all groups lie one after the other.
struct Target {
  int64_t row, last;
  int column;
};

__device__ __forceinline__ Target target_of(const GroupedGemm& g, const Plan& planned, int tile_n,
                                            int warp) {
  const int64_t first = g.contract ? planned.group * g.m : planned.begin;
  return {first + planned.m * kTileM + warp * kBoxRows, g.contract ? first + g.m : planned.end,
          planned.n * tile_n};
}

// By the two warpgroups of consumers.
template <typename A, typename B, Scaling kScaling>
__device__ __forceinline__ void multiply_tiles(const Params& p, const Ring<kScaling>& ring,
                                               uint32_t staged) {
  const GroupedGemm& g = p.g;
  const int warp = same_in_warp(static_cast<int>(threadIdx.x / 32));
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warpgroup = warp / 4;
  staged += warp * kStagedBytes<kScaling>;
  Place<kStages<kScaling>> place;
  Place<kPlans> plan;
  Sums<A, B, kScaling> sums;
  for (;; plan.next()) {
    barrier_wait(&ring.control->planned[plan.at], plan.phase);
    const Plan& planned = ring.control->plans[plan.at];
    const int group = planned.group, begin = planned.begin;
    if (group < 0) break;
    const int length = length_of(g, begin, planned.end);
    const int blocks = tiles_of(length, kTileK);
    if (!g.contract && begin + planned.m * kTileM + warpgroup * (kTileM / 2) >= planned.end) {
      // No row of the warpgroup's exists: the other one multiplies alone.
      barrier_arrive(&ring.control->read[plan.at]);
      for (int i = 0; i < blocks; ++i, place.next()) {
        ring.wait(place);
        ring.release(place.at);
      }
      continue;
    }
    Target to;
    float factor = 1.0f, factor_8 = 1.0f;
    if constexpr (!kHasBlockScales<kScaling>) {
      to = target_of(g, planned, kTileN<kScaling>, warp);
      barrier_arrive(&ring.control->read[plan.at]);
      const int64_t own = to.row + lane / 4;
      const float of_group = g.b_scale_inv[group];
      if (g.contract) {
        factor = factor_8 = g.a_scale_inv[group] * of_group;
      } else {
        factor = own < to.last ? g.a_scale_inv[own] * of_group : 0.0f;
        factor_8 = own + 8 < to.last ? g.a_scale_inv[own + 8] * of_group : 0.0f;
      }
    }
    // The copies filled the rest of a product's K with zeros.
    const int rest = g.contract ? length % kTileK : 0;
    sums.run(ring, &place, warpgroup, blocks, rest, planned.n);
    if constexpr (kHasBlockScales<kScaling>) {  // read late: registers are short in the loop
      to = target_of(g, planned, kTileN<kScaling>, warp);
      barrier_arrive(&ring.control->read[plan.at]);
    }
    if (g.accumulate && length == 0) continue;
    if (g.wide_out)
      sums.store_wide(p, staged, static_cast<int>(to.row - group * g.m), to.column, group, factor);
    else
      sums.store(p, staged, to.row, to.last, to.column, factor, factor_8);
  }
  if (lane == 0) stores_wait();
}

#endif

template <typename A, typename B, Scaling kScaling>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel([[maybe_unused]] const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];  // an atom of the swizzle
  uint8_t* const staged = shared + kStages<kScaling> * kStageBytes<kScaling>;
  auto* const control = reinterpret_cast<Control<kScaling>*>(shared + kControlBegin<kScaling>);
  // Opaque, or the compiler computes it anew from a special register for each stage.
  uint32_t begin = shared_address(shared);
  asm volatile("" : "+r"(begin));
  const Ring<kScaling> ring{begin, begin + kScalesBegin<kScaling>, begin + kControlBegin<kScaling>,
                            control};
  if (threadIdx.x == 0) start(ring);
  cluster_sync();
  if (threadIdx.x >= kConsumers) {
    give_registers<56>();
    const int warp = static_cast<int>(threadIdx.x / 32) - kConsumers / 32;
    if (warp == 0) copy_tiles(p, ring);
    if constexpr (kScaling == Scaling::kRowsAndBlocks)
      if (warp == 1) copy_scales(p, ring);
  } else {
    take_registers<224>();
    multiply_tiles<A, B, kScaling>(p, ring, shared_address(staged));
  }
  cluster_sync();  // the other block still arrives at this one's barriers
#endif
}

template <typename A, typename B, Scaling kScaling>
void launch(const Params& p, int64_t clusters, cudaStream_t stream) {
  const auto kernel = grouped_gemm_kernel<A, B, kScaling>;
  allow_shared(reinterpret_cast<const void*>(kernel));
  launch_cluster(kernel, clusters * 2, kThreads, 2, kSharedBytes<kScaling>, stream, p);
}

int64_t ceil_of(int64_t extent, int tile) { return (extent + tile - 1) / tile; }

// kOne and kOther: the two scalings that a function chooses from, the first unless g.split or
// g.b_in_blocks.
template <Scaling kOne, Scaling kOther>
void run_grouped_gemm(Args& args, bool contract) {
  Params p;
  p.g = check_grouped_gemm(args, contract, kHasBlockScales<kOne>);
  const GroupedGemm& g = p.g;
  const DeviceGuard guard(args.device_id());
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9)
    fail(kApexTeUnsupported, "%s: the GPU must be of arch 9.0", args.name());
  if (g.m == 0 || g.n == 0) return;
  // Places in a matrix are 32 bits to a tensor copy, turns to the kernel.
  const int64_t n_tiles = ceil_of(g.n, kTileN<kOne>), m_tiles = ceil_of(g.m, kTileM);
  const int64_t most = (contract ? g.groups * m_tiles : m_tiles + g.groups) * (n_tiles + 1);
  constexpr int64_t kLimit = int64_t{1} << 30;
  const int64_t out_rows = contract ? g.groups * g.m : g.m;
  if (out_rows > kLimit || g.b_rows > kLimit || g.n > kLimit || g.k > kLimit || most > kLimit)
    fail(kApexTeUnsupported, "%s: operands must have at most 2^30 rows, columns and tiles",
         args.name());
  if (g.k == 0) {
    if (g.accumulate) return;
    void* out = g.wide_out ? static_cast<void*>(g.wide_out) : g.out;
    check_cuda(cudaMemsetAsync(out, 0, static_cast<size_t>(out_rows * g.n) * (g.wide_out ? 4 : 2),
                               static_cast<cudaStream_t>(args.stream())),
               "cudaMemsetAsync");
    return;
  }
  describe(&p.a, kBytes, g.a, g.a_rows, g.k, kTileM / 2, kTileK);
  describe(&p.b, kBytes, g.b, g.b_rows, g.k, kTileN<kOne> / 2, kTileK);
  if (g.out)
    describe(&p.out, kBFloat16s, g.out, out_rows, g.n, kBoxRows, kBoxN);
  else
    describe_boxes<3>(&p.out, kFloats, g.wide_out, {g.n, g.m, g.groups}, {g.n, g.m * g.n},
                      {kWideBoxN, kBoxRows, 1});
  const int64_t clusters =
      std::min<int64_t>(most, device_attribute(cudaDevAttrMultiProcessorCount) / 2);
  const auto stream = static_cast<cudaStream_t>(args.stream());
  const bool other = g.split || g.b_in_blocks;
  with_fp8_format(g.a_type, [&](auto a) {
    with_fp8_format(g.b_type, [&](auto b) {
      using A = decltype(a);
      using B = decltype(b);
      other ? launch<A, B, kOther>(p, clusters, stream) : launch<A, B, kOne>(p, clusters, stream);
    });
  });
}

}  // namespace
}  // namespace apex_te
