// The kernel of dense_gemm: a persistent one of clusters of two blocks. In each block one warp
// copies tiles of both operands into a ring in shared memory, and two warpgroups multiply them,
// each half of the tile's rows, and hand the sums to an epilogue.
#pragma once

#include <algorithm>
#include <atomic>

#include "dense_gemm/dense_gemm_sums.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Keeps a thread busy for some clocks.
__device__ __forceinline__ void stand_back(int clocks) {
  const int64_t begin = clock64();
  while (clock64() - begin < clocks) {
  }
}

// By the two warpgroups of consumers. The second may stand back at the start: it then stays some
// stages behind, and multiplies while the first one is in its epilogue.
template <typename V, typename A, typename B, typename Epilogue>
__device__ __forceinline__ void multiply_tiles(const Params& p, const Ring<V>& ring,
                                               uint32_t staged) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int warpgroup = same_in_warp(warp / 4), rank = static_cast<int>(cluster_rank());
  const Order order = order_of(p.g.m, p.g.n, V::kColumns, p.strip);
  const int turns = static_cast<int>(order.turns()), blocks = stages_of(p.g);
  const float factor = *p.g.a_scale_inv * *p.g.b_scale_inv;
  Place<V::kStages> place;
  Epilogue epilogue(p, staged);
  float d[kSums<V>];
  if (p.lag && warpgroup && blocks) {
    barrier_wait(&ring.control->full[0], 0);
    stand_back(p.lag);
  }
  for (int turn = static_cast<int>(blockIdx.x / 2); turn < turns;
       turn += static_cast<int>(gridDim.x / 2)) {
    multiply_tile<V, A, B>(d, ring, blocks, warpgroup, &place);
    epilogue.store(d, tile_of(order, turn, rank, V::kColumns), factor);
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

// Allows the kernel its shared memory, once for each device.
template <typename Kernel>
void allow_shared(Kernel kernel, size_t bytes, int device, std::atomic<uint64_t>* allowed) {
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed->load(std::memory_order_relaxed) & bit) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             "cudaFuncSetAttribute");
  allowed->fetch_or(bit, std::memory_order_relaxed);
}

struct Launch {
  int device;
  int64_t multiprocessors;
  cudaStream_t stream;
};

// Launches the kernel for params whose `g` is set, and the maps that only the epilogue uses.
template <typename V, typename A, typename B, template <typename> class Epilogue>
void launch_product(const Launch& at, Params p) {
  static_assert(kSharedBytes<V> <= kSharedLimit, "what a block may have on sm_90");
  static std::atomic<uint64_t> allowed{0};
  constexpr int kDefaultStrip = 2048 / V::kColumns;
  const DenseGemm& g = p.g;
  const int n_tiles = order_of(g.m, g.n, V::kColumns, 1).n_tiles;
  p.strip = std::min(g.strip ? static_cast<int>(g.strip) : kDefaultStrip, n_tiles);
  p.lag = static_cast<int>(g.lag);
  const int64_t turns = order_of(g.m, g.n, V::kColumns, p.strip).turns();
  if (g.k > 0) {
    describe(&p.a, kBytes, g.a, g.m, g.k, kTileM / 2, kTileK);
    describe(&p.b, kBytes, g.b, g.n, g.k, V::kColumns / 2, kTileK);
  }
  const auto kernel = dense_gemm_kernel<V, A, B, Epilogue>;
  allow_shared(kernel, kSharedBytes<V>, at.device, &allowed);
  launch_cluster(kernel, std::min(turns, at.multiprocessors / 2) * 2, kThreads, 2, kSharedBytes<V>,
                 at.stream, p);
}

// Where a product of these extents is launched; fails unless there is a kernel for it.
inline Launch launch_of(const Args& args, const DenseGemm& g) {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9)
    fail(kApexTeUnsupported, "%s: the GPU must be of arch 9.0", args.name());
  // Places in a matrix are 32 bits to a tensor copy, turns to the kernel.
  constexpr int64_t kLimit = int64_t{1} << 30;
  if (g.m > kLimit || g.n > kLimit || g.k > kLimit || order_of(g.m, g.n, 128, 1).turns() > kLimit)
    fail(kApexTeUnsupported, "%s: operands must have at most 2^30 rows, columns and tiles",
         args.name());
  return {args.device_id(), device_attribute(cudaDevAttrMultiProcessorCount),
          static_cast<cudaStream_t>(args.stream())};
}

}  // namespace apex_te
