// The largest magnitude a kernel has seen, as integer bits: exact, order-free, NaN above infinity.
#pragma once

#include "common/gpu/vec.h"

namespace apex_te {

// Running maximum of elements as they were loaded: two at a time for 16-bit types, whose magnitudes
// order like their values. amax_bits turns the result into a float's bits.
template <typename T>
__device__ __forceinline__ void fold_amax(const Vec8<T>& v, uint32_t& amax) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(2 * sizeof(T)); ++i)
    amax = sizeof(T) == 4 ? max(amax, v.words[i] & 0x7FFFFFFFu)
                          : max_u16x2(amax, v.words[i] & 0x7FFF7FFFu);
}
__device__ __forceinline__ uint32_t amax_bits(float, uint32_t amax) { return amax; }
__device__ __forceinline__ uint32_t amax_bits(BFloat16, uint32_t amax) {
  return max(amax << 16, amax & 0xFFFF0000u);
}
__device__ __forceinline__ uint32_t amax_bits(Half, uint32_t amax) {
  const uint32_t bits = max(amax & 0xFFFFu, amax >> 16);
  return float_bits(to_float(Half{static_cast<uint16_t>(bits)}));
}

// Running maximum of fp32 results.
__device__ __forceinline__ void fold_amax(const float* values, uint32_t& amax) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) amax = max(amax, magnitude_bits(values[i]));
}

// The tensor's amax so far, read by thread 0 while the data loads. A later, larger value only makes
// the atomic at the end superfluous.
__device__ __forceinline__ uint32_t amax_so_far(const float* amax) {
  return amax && threadIdx.x == 0 ? *reinterpret_cast<const volatile uint32_t*>(amax) : 0u;
}
// Each warp leaves its amax (a float's bits); after a barrier thread 0 folds them into the
// tensor's. The atomic comes last in a kernel and returns nothing: no thread waits for it.
__device__ __forceinline__ void stage_amax(uint32_t amax, uint32_t* warps) {
  amax = warp_max(amax);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
}
template <int kBlock>
__device__ __forceinline__ void finish_amax(float* tensor_amax, uint32_t seen,
                                            const uint32_t* warps) {
  if (threadIdx.x != 0 || !tensor_amax) return;
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kBlock / 32; ++i) amax = max(amax, warps[i]);
  if (amax > seen) atomicMax(reinterpret_cast<unsigned int*>(tensor_amax), amax);
}

}  // namespace apex_te
