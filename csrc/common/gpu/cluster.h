// Thread block clusters and their distributed shared memory (sm_90 and later).
//
// Below sm_90 a cluster is one block: ranks are 0, a remote access is a local one.
#pragma once

#include "common/gpu/device.h"

namespace apex_te {

#if defined(__CUDACC__)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(APEX_TE_PORTABLE)
#define APEX_TE_HAS_CLUSTERS 1
#else
#define APEX_TE_HAS_CLUSTERS 0
#endif

__device__ __forceinline__ uint32_t cluster_rank() {
#if APEX_TE_HAS_CLUSTERS
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

__device__ __forceinline__ uint32_t cluster_size() {
#if APEX_TE_HAS_CLUSTERS
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

// Orders shared memory, local and remote, before and after it among all threads of the cluster.
__device__ __forceinline__ void cluster_arrive() {
#if APEX_TE_HAS_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if APEX_TE_HAS_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Writes two values to the block `rank`'s copy of `shared`, where `barrier` counts 8 bytes when
// they are there. No fence is needed, which a cluster_arrive after stores to global memory waits
// for.
__device__ __forceinline__ void store_remote_async(float2* shared, uint64_t* barrier, uint32_t rank,
                                                   float x, float y) {
#if APEX_TE_HAS_CLUSTERS
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  uint32_t counter = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(counter) : "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(address),
      "f"(x), "f"(y), "r"(counter)
      : "memory");
#else
  *shared = make_float2(x, y);
#endif
}

// Launches blocks in clusters of `cluster` along x; more than 8 is not portable between GPUs and is
// allowed for the kernel here. The device must be of arch 9.0 or later unless `cluster` is 1.
template <typename... Params, typename... Values>
void launch_cluster(void (*kernel)(Params...), int64_t blocks, int threads, int cluster,
                    size_t shared_bytes, cudaStream_t stream, Values... values) {
#if defined(__HIP_PLATFORM_AMD__)
  if (cluster > 1)
    fail(kApexTeUnsupported, "a row must not be shared by blocks on an AMD GPU, got %d", cluster);
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(Params(values)...);
  check_cuda(cudaGetLastError(), "launch");
#else
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  if (cluster > 1) {
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  if (cluster > 8)
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                    cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "cudaFuncSetAttribute");
  check_cuda(cudaLaunchKernelEx(&config, kernel, Params(values)...), "cudaLaunchKernelEx");
#endif
}

#if !defined(__HIP_PLATFORM_AMD__)
// Clusters that the device runs at once; of single blocks, one for each multiprocessor. 0 if none
// fits, as on a slice of a GPU (MIG). A kernel with clusters of more than 8 blocks must allow them
// before.
inline int64_t clusters_at_once(const void* kernel, int threads, int cluster, size_t shared_bytes) {
  if (cluster == 1) return device_attribute(cudaDevAttrMultiProcessorCount);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&count, kernel, &config),
             "cudaOccupancyMaxActiveClusters");
  return count;
}
#endif

#endif  // __CUDACC__

}  // namespace apex_te
