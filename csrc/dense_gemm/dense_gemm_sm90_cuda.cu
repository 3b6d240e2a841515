// CUDA side of dense_gemm, for sm_90: a persistent kernel of clusters of two blocks. In each block
// one warp copies tiles of both operands into a ring in shared memory, and two warpgroups multiply
// them, each half of the tile's rows.
#include <algorithm>
#include <atomic>

#include "dense_gemm/dense_gemm.h"

APEX_TE_LIBRARY()

#if defined(__HIP_PLATFORM_AMD__)

APEX_TE_DEFINE(dense_gemm) {
  apex_te::fail(kApexTeUnsupported, "%s: there is no kernel for AMD GPUs", args.name());
}

#else

#include "dense_gemm/dense_gemm_store.h"

namespace apex_te {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// By the two warpgroups of consumers.
template <typename V, typename A, typename B>
__device__ __forceinline__ void multiply_tiles(const Params& p, const Ring<V>& ring,
                                               uint32_t staged) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int warpgroup = same_in_warp(warp / 4), rank = static_cast<int>(cluster_rank());
  staged += warp * V::kStagedBytes;
  const Order order = order_of(p.g.m, p.g.n, V::kColumns, p.strip);
  const int turns = static_cast<int>(order.turns()), blocks = stages_of(p.g);
  const float factor = *p.g.a_scale_inv * *p.g.b_scale_inv;
  Place<V::kStages> place;
  float d[kSums<V>];
  for (int turn = static_cast<int>(blockIdx.x / 2); turn < turns;
       turn += static_cast<int>(gridDim.x / 2)) {
    multiply_tile<V, A, B>(d, ring, blocks, warpgroup, &place);
    store_tile<V>(d, p, staged, tile_of(order, turn, rank, V::kColumns), factor);
  }
  if (threadIdx.x % 32 == 0) stores_wait();
}

#endif

template <typename V, typename A, typename B>
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
      if (threadIdx.x == kConsumers) copy_tiles(p, ring);
      __syncwarp();
    }
  } else {
    take_registers<232>();
    multiply_tiles<V, A, B>(p, ring, shared_address(staged));
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

template <typename V, typename A, typename B>
void launch(const Launch& at, const DenseGemm& g) {
  static_assert(kSharedBytes<V> <= kSharedLimit, "what a block may have on sm_90");
  static std::atomic<uint64_t> allowed{0};
  constexpr int kDefaultStrip = 2048 / V::kColumns;
  Params p;
  p.g = g;
  const int n_tiles = order_of(g.m, g.n, V::kColumns, 1).n_tiles;
  p.strip = std::min(g.strip ? static_cast<int>(g.strip) : kDefaultStrip, n_tiles);
  const int64_t turns = order_of(g.m, g.n, V::kColumns, p.strip).turns();
  if (g.k > 0) {
    describe(&p.a, kBytes, g.a, g.m, g.k, kTileM / 2, kTileK);
    describe(&p.b, kBytes, g.b, g.n, g.k, V::kColumns / 2, kTileK);
  }
  if (g.out) describe(&p.out, kBFloat16s, g.out, g.m, g.n, kWarpRows, V::kBox);
  if (g.added) describe(&p.added, kBFloat16s, g.added, g.m, g.n, kTileM, V::kColumns);
  if (g.wide_added) describe(&p.added, kFloats, g.wide_added, g.m, g.n, kTileM, V::kColumns);
  const auto kernel = dense_gemm_kernel<V, A, B>;
  allow_shared(kernel, kSharedBytes<V>, at.device, &allowed);
  launch_cluster(kernel, std::min(turns, at.multiprocessors / 2) * 2, kThreads, 2, kSharedBytes<V>,
                 at.stream, p);
}

using Fast256 = Variant<256, 4, 0>;
using Fast192 = Variant<192, 5, 0>;
using Fast128 = Variant<128, 6, 0>;
template <int kInterval>
using Split192 = Variant<192, 5, kInterval, true>;
template <int kInterval>
using Split128 = Variant<128, 6, kInterval, true>;

template <typename Call>
bool with_variant(const DenseGemm& g, int64_t columns, const Call& call) {
  const int64_t key = g.promotion * 1000 + columns;
  switch (g.variant * 1000000 + key) {
    case 256:
      return call(Fast256{}), true;
    case 192:
      return call(Fast192{}), true;
    case 128:
      return call(Fast128{}), true;
    case 128192:
      return call(Split192<1>{}), true;
    case 256192:
      return call(Split192<2>{}), true;
    case 512192:
      return call(Split192<4>{}), true;
    case 128128:
      return call(Split128<1>{}), true;
    case 256128:
      return call(Split128<2>{}), true;
    case 512128:
      return call(Split128<4>{}), true;
    // For measurements.
    case 512160:
      return call(Variant<160, 5, 4, true>{}), true;
    case 1000192:
      return call(Variant<192, 4, 0>{}), true;
    case 1512192:
      return call(Variant<192, 4, 4, true>{}), true;
    case 2512192:
      return call(Variant<192, 5, 4, false>{}), true;
    case 3512192:
      return call(Variant<192, 4, 4, false>{}), true;
    default:
      return false;
  }
}

// The width of tiles that takes least time: clusters take as many turns each, of which one costs
// its columns and what a tile costs beside its products. Narrow tiles read more of shared memory
// for the same products: 128x256 at 256 clocks for 256 columns, 128x192 at 208, 128x128 at 144.
int64_t columns_of(const DenseGemm& g, int64_t clusters) {
  struct Choice {
    int columns, clocks;
  };
  constexpr Choice kFast[] = {{256, 256}, {192, 200}, {128, 144}};
  constexpr Choice kSplit[] = {{192, 200}, {128, 144}};
  const int64_t blocks = (g.k + kTileK - 1) / kTileK;
  constexpr int64_t kBeside = 1500;  // clocks to fill the ring and to write a tile
  int64_t best = 0, least = INT64_MAX;
  const auto consider = [&](const Choice& choice) {
    const int64_t turns = order_of(g.m, g.n, choice.columns, 1).turns();
    const int64_t rounds = (turns + clusters - 1) / clusters;
    const int64_t clocks = rounds * (blocks * choice.clocks * 4 + kBeside);
    if (clocks < least) best = choice.columns, least = clocks;
  };
  if (g.promotion)
    for (const Choice& choice : kSplit) consider(choice);
  else
    for (const Choice& choice : kFast) consider(choice);
  return best;
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(dense_gemm) {
  using namespace apex_te;
  const DenseGemm g = check_dense_gemm(args);
  const DeviceGuard guard(args.device_id());
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9)
    fail(kApexTeUnsupported, "%s: the GPU must be of arch 9.0", args.name());
  if (g.m == 0 || g.n == 0) return;
  // Places in a matrix are 32 bits to a tensor copy, turns to the kernel.
  constexpr int64_t kLimit = int64_t{1} << 30;
  if (g.m > kLimit || g.n > kLimit || g.k > kLimit || order_of(g.m, g.n, 128, 1).turns() > kLimit)
    fail(kApexTeUnsupported, "%s: operands must have at most 2^30 rows, columns and tiles",
         args.name());
  const Launch at = {args.device_id(), device_attribute(cudaDevAttrMultiProcessorCount),
                     static_cast<cudaStream_t>(args.stream())};
  const int64_t columns = g.columns ? g.columns : columns_of(g, at.multiprocessors / 2);
  const bool is_known = with_variant(g, columns, [&](auto variant) {
    using V = decltype(variant);
    const bool is_a_e5m2 = g.a_type == DType::kE5M2, is_b_e5m2 = g.b_type == DType::kE5M2;
    if (is_a_e5m2)
      launch<V, E5M2, E4M3>(at, g);
    else if (is_b_e5m2)
      launch<V, E4M3, E5M2>(at, g);
    else
      launch<V, E4M3, E4M3>(at, g);
  });
  if (!is_known)
    fail(kApexTeValueError, "%s: columns must be 0, 128, 192 or 256, got %lld", args.name(),
         static_cast<long long>(g.columns));
}

#endif
