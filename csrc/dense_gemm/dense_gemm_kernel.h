// The kernel of dense_gemm: a persistent one of clusters of two blocks. In each block one warp
// copies tiles of both operands into a ring in shared memory, and two warpgroups multiply them,
// each half of the tile's rows, and hand the sums to an epilogue.
#pragma once

#include <algorithm>

#include "dense_gemm/dense_gemm_sums.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// By the two warpgroups of consumers.
template <typename V, typename A, typename B, typename Epilogue>
__device__ __forceinline__ void multiply_tiles(const Params& p, const Ring<V>& ring,
                                               uint32_t staged) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int warpgroup = same_in_warp(warp / 4), rank = static_cast<int>(cluster_rank());
  const int turns = p.order.turns, blocks = stages_of(p.g);
  const float factor = *p.g.a_scale_inv * *p.g.b_scale_inv;
  Place<V::kStages> place;
  Epilogue epilogue(p, staged);
  float d[kSums<V>];
  clear<V>(d);
  for (int turn = static_cast<int>(blockIdx.x / 2); turn < turns;
       turn += static_cast<int>(gridDim.x / 2)) {
    const Tile tile = tile_of(p.order, turn, rank, V::kColumns);
    if constexpr (Epilogue::kSteps > 0) {
      if (blocks > 0) {
        Products<V, A, B>{d, ring, &place, warpgroup, 0}.all(blocks, epilogue);
      } else {
        all_steps(epilogue, std::make_integer_sequence<int, Epilogue::kSteps>{});
      }
      epilogue.take(d, tile, factor);
    } else {
      multiply_tile<V, A, B>(d, ring, blocks, warpgroup, &place);
      epilogue.store(d, tile, factor);
    }
  }
  epilogue.finish();
}

#endif

template <typename V, typename A, typename B, template <typename> class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    dense_gemm_kernel([[maybe_unused]] const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];  // an atom of the swizzle
  uint8_t* const staged = shared + V::kStages * V::kStageBytes;
  const Ring<V> ring{shared_address(shared), reinterpret_cast<Control<V::kStages>*>(
                                                 staged + kConsumers / 32 * V::kStagedBytes)};
  if (threadIdx.x == 0) ring.start();
  cluster_sync();
  if (threadIdx.x >= kConsumers) {
    give_registers<40>();
    if (threadIdx.x < kConsumers + 32) {
      if (threadIdx.x == kConsumers) copy_tiles<V, Epilogue<V>>(p, ring);
      __syncwarp();
    }
  } else {
    take_registers<232>();
    multiply_tiles<V, A, B, Epilogue<V>>(p, ring, shared_address(staged));
  }
  cluster_sync();  // the other block still arrives at this one's barriers
#endif
}

struct Launch {
  int device;
  int64_t multiprocessors;
  cudaStream_t stream;
};

// Sets the order of tiles and the maps of the operands of params whose `g` is set.
template <typename V>
void prepare(Params* p) {
  constexpr int kDefaultStrip = 2048 / V::kColumns;
  const DenseGemm& g = p->g;
  Order& order = p->order;
  order.m_tiles = static_cast<int>(tiles_of(g.m, kTileM));
  order.n_tiles = static_cast<int>(tiles_of(g.n, V::kColumns));
  order.strip = std::min(g.strip ? static_cast<int>(g.strip) : kDefaultStrip, order.n_tiles);
  order.turns = static_cast<int>(turns_of(g, V::kColumns));
  p->keep_a = g.cache & kKeepA ? kKeepLonger : kKeepNormally;
  p->keep_b = g.cache & kKeepB ? kKeepLonger : kKeepNormally;
  p->keep_out = g.cache & kStreamResults ? kKeepLess : kKeepNormally;
  p->keep_hidden = g.cache & kStreamHidden ? kKeepLess : kKeepNormally;
  if (g.k == 0) return;
  describe(&p->a, kBytes, g.a, g.m, g.k, kTileM / 2, kTileK);
  if constexpr (V::kGated)
    describe_boxes<3>(&p->b, kBytes, g.b, {g.k, g.n / 2, 2}, {g.k, g.n / 2 * g.k},
                      {kTileK, V::kColumns / 2, 1});
  else
    describe(&p->b, kBytes, g.b, g.n, g.k, V::kColumns / 2, kTileK);
}

// Launches a kernel for prepared params.
template <typename V, typename Kernel>
void launch_tiles(const Launch& at, Kernel kernel, int threads, size_t bytes, const Params& p) {
  allow_shared(reinterpret_cast<const void*>(kernel));
  launch_cluster(kernel, std::min<int64_t>(p.order.turns, at.multiprocessors / 2) * 2, threads, 2,
                 bytes, at.stream, p);
}

// Launches the kernel for params whose `g` is set, and the maps that only the epilogue uses.
template <typename V, typename A, typename B, template <typename> class Epilogue>
void launch_product(const Launch& at, Params p) {
  static_assert(kSharedBytes<V> <= kSharedLimit, "what a block may have on sm_90");
  prepare<V>(&p);
  launch_tiles<V>(at, dense_gemm_kernel<V, A, B, Epilogue>, kThreads, kSharedBytes<V>, p);
}

// Where a product of these extents is launched; fails unless there is a kernel for it.
inline Launch launch_of(const Args& args, const DenseGemm& g) {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9)
    fail(kApexTeUnsupported, "%s: the GPU must be of arch 9.0", args.name());
  // Places in a matrix are 32 bits to a tensor copy, turns to the kernel.
  constexpr int64_t kLimit = int64_t{1} << 30;
  if (g.m > kLimit || g.n > kLimit || g.k > kLimit || turns_of(g, 128) > kLimit)
    fail(kApexTeUnsupported, "%s: operands must have at most 2^30 rows, columns and tiles",
         args.name());
  return {args.device_id(), device_attribute(cudaDevAttrMultiProcessorCount),
          static_cast<cudaStream_t>(args.stream())};
}

}  // namespace apex_te
