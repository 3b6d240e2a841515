// Device code and launch helpers that differ by vendor or arch, each with a portable path.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/codec.h"
#include "common/op.h"

namespace apex_te {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears a non-sticky error, so that the next call does not report it
  if (error == cudaErrorInsufficientDriver)
    fail(kApexTeRuntimeError,
         "%s: the NVIDIA driver is too old for CUDA %d.%d, with which this op was compiled; update "
         "the driver or compile with an older toolkit (APEX_TE_CUDA_HOME)",
         what, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  fail(kApexTeRuntimeError, "%s: %s (%s)", what, cudaGetErrorString(error),
       cudaGetErrorName(error));
}

// Makes the tensors' device current for a launch and restores the caller's.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device == previous_) return;
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

inline bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

#if defined(__CUDACC__)

// Two floats to two FP8 codes, `low` in the lower byte: the cvt instruction from sm_89 on.
template <typename Format>
__device__ __forceinline__ uint32_t encode_fp8x2(float low, float high) {
  return encode_fp8<Format>(low) | static_cast<uint32_t>(encode_fp8<Format>(high)) << 8;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(APEX_TE_PORTABLE)
template <>
__device__ __forceinline__ uint32_t encode_fp8x2<E4M3>(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
template <>
__device__ __forceinline__ uint32_t encode_fp8x2<E5M2>(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
#endif

// Two floats to two bf16 or fp16 in one word, `low` in the lower half; nearest even.
__device__ __forceinline__ uint32_t bf16x2_of(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return from_float<BFloat16>(low).bits | static_cast<uint32_t>(from_float<BFloat16>(high).bits)
                                              << 16;
#endif
}
__device__ __forceinline__ uint32_t f16x2_of(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return from_float<Half>(low).bits | static_cast<uint32_t>(from_float<Half>(high).bits) << 16;
#endif
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  return value;
}

__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xFFFFFFFFu, value);
#else
  for (int offset = 16; offset; offset /= 2)
    value = max(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  return value;
#endif
}

__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(APEX_TE_PORTABLE)
  uint32_t result;
  asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return max(a & 0xFFFF0000u, b & 0xFFFF0000u) | max(a & 0xFFFFu, b & 0xFFFFu);
#endif
}

#endif  // __CUDACC__

}  // namespace apex_te
