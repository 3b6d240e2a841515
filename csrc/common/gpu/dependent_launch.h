// Programmatic dependent launch: a kernel that starts while the one before it in the stream ends.
//
// From sm_90 on; elsewhere the same calls give an ordinary launch.
#pragma once

#include <utility>

#include "common/gpu/device.h"

namespace apex_te {

#if defined(__CUDACC__)

// In the first kernel: the next one may be scheduled as soon as every block has come here or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(APEX_TE_PORTABLE)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In the next kernel: waits until the first has ended and its writes can be read. Returns at once
// in an ordinary launch.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(APEX_TE_PORTABLE)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches a kernel that calls wait_for_previous_kernel before it reads what that one writes. The
// caller knows the kernel before it: one that is not its own may have let it start at any time.
template <typename... Params, typename... Args>
void launch_dependent_grid(void (*kernel)(Params...), dim3 grid, dim3 threads, size_t shared_bytes,
                           cudaStream_t stream, Args&&... args) {
#if defined(__HIP_PLATFORM_AMD__)
  kernel<<<grid, threads, shared_bytes, stream>>>(std::forward<Args>(args)...);
  check_cuda(cudaGetLastError(), "launch");
#else
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), "launch");
#endif
}
template <typename... Params, typename... Args>
void launch_dependent_shared(void (*kernel)(Params...), int64_t blocks, int threads,
                             size_t shared_bytes, cudaStream_t stream, Args&&... args) {
  launch_dependent_grid(kernel, dim3(static_cast<unsigned>(blocks)), threads, shared_bytes, stream,
                        std::forward<Args>(args)...);
}
template <typename... Params, typename... Args>
void launch_dependent(void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t stream,
                      Args&&... args) {
  launch_dependent_shared(kernel, blocks, threads, 0, stream, std::forward<Args>(args)...);
}

#endif  // __CUDACC__

}  // namespace apex_te
