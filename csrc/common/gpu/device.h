// Device code and launch helpers that differ by vendor or arch, each with a portable path.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <utility>

#include "common/abi/op.h"
#include "common/gpu/compat.h"
#include "common/numerics/codec.h"

namespace apex_te {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  // clears a non-sticky error, so that the next call does not report it
  static_cast<void>(cudaGetLastError());
#if !defined(__HIP_PLATFORM_AMD__)
  if (error == cudaErrorInsufficientDriver || error == cudaErrorUnsupportedPtxVersion)
    fail(kApexTeRuntimeError,
         "%s: the NVIDIA driver is missing or older than CUDA %d.%d, with which this op was "
         "compiled (%s); update the driver or compile with an older toolkit (APEX_TE_CUDA_HOME)",
         what, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, cudaGetErrorName(error));
  if (error == cudaErrorNoKernelImageForDevice)
    fail(kApexTeRuntimeError,
         "%s: this op's library holds no code for this GPU (%s); add its arch to "
         "APEX_TE_CUDA_ARCH_LIST (python -m apex_te why <op> shows what there is)",
         what, cudaGetErrorName(error));
#endif
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
    if (changed_) static_cast<void>(cudaSetDevice(previous_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Allows a kernel all the dynamic shared memory that a block of the current device may have, once
// for each device: what one launch asks for would be taken from another thread's launch that needs
// more.
inline void allow_shared(const void* kernel) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;
  std::pair<const void*, int> key{kernel, 0};
  check_cuda(cudaGetDevice(&key.second), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  if (allowed.count(key)) return;
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int own = static_cast<int>(attributes.sharedSizeBytes);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - own),
             "cudaFuncSetAttribute");
  allowed.insert(key);
}

inline bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// A grid of rows x cols blocks, columns fastest: block_row() may lie past the last row where there
// are more rows than a grid's y holds. A division of a linear index would delay the first load.
constexpr int64_t kMaxGridY = 65535;
inline dim3 grid_of(int64_t rows, int64_t cols, const char* name) {
  if (cols > 0x7FFFFFFF || rows > kMaxGridY * kMaxGridY)
    fail(kApexTeUnsupported, "%s: the matrix is too large for one launch", name);
  const int64_t y = rows < kMaxGridY ? rows : kMaxGridY;
  return dim3(static_cast<unsigned>(cols), static_cast<unsigned>(y),
              static_cast<unsigned>((rows + kMaxGridY - 1) / kMaxGridY));
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

// Largest of two pairs of bf16 or fp16, half by half; of a number and a NaN, the number.
__device__ __forceinline__ uint32_t max_pairs(BFloat16, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  uint32_t result;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return bf16x2_of(fmaxf(bits_float(a << 16), bits_float(b << 16)),
                   fmaxf(bits_float(a & 0xFFFF0000u), bits_float(b & 0xFFFF0000u)));
#endif
}
__device__ __forceinline__ uint32_t max_pairs(Half, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  uint32_t result;
  asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  const auto low = [](uint32_t w) { return to_float(Half{static_cast<uint16_t>(w)}); };
  return f16x2_of(fmaxf(low(a), low(b)), fmaxf(low(a >> 16), low(b >> 16)));
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

// Two FP8 codes, the first in the lower byte, to two floats: the cvt instruction from sm_89 on.
template <typename Format>
__device__ __forceinline__ float2 decode_fp8x2(uint32_t codes) {
  return make_float2(decode_fp8<Format>(static_cast<uint8_t>(codes)),
                     decode_fp8<Format>(static_cast<uint8_t>(codes >> 8)));
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(APEX_TE_PORTABLE)
template <>
__device__ __forceinline__ float2 decode_fp8x2<E4M3>(uint32_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  return make_float2(to_float(Half{static_cast<uint16_t>(halves)}),
                     to_float(Half{static_cast<uint16_t>(halves >> 16)}));
}
#endif

__device__ __forceinline__ int64_t block_row() {
  return static_cast<int64_t>(blockIdx.z) * kMaxGridY + blockIdx.y;
}

// A store that stays one: with computed addresses nvcc may split one through uint4* into four.
__device__ __forceinline__ void store_16(uint4* p, uint4 v) {
#if defined(__CUDA_ARCH__) && !defined(APEX_TE_PORTABLE)
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
#else
  *p = v;
#endif
}

// The larger of a magnitude and |value|; a NaN is the largest.
__device__ __forceinline__ float larger_magnitude(float magnitude, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(magnitude), "f"(fabsf(value)));
  return result;
#else
  return bits_float(max(float_bits(magnitude), magnitude_bits(value)));
#endif
}

#endif  // __CUDACC__

}  // namespace apex_te
