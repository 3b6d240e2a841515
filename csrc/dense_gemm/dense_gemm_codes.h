// What epilogues have in common that make FP8 codes of rounded sums.
#pragma once

#include "common/gpu/vec.h"
#include "dense_gemm/dense_gemm_ring.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t low_half) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(low_half))
               : "memory");
}

__device__ __forceinline__ float scale_of(const Gated& gated) {
  return gated.scale ? *gated.scale : 1.0f;
}

// What is left of a product when all tiles are done.
__device__ __forceinline__ void finish_codes(const Gated& gated, uint32_t amax) {
  amax = warp_max(amax);
  if (threadIdx.x % 32 == 0 && gated.amax && amax)
    atomicMax(reinterpret_cast<unsigned int*>(gated.amax), amax);
  // One comparison: two made the compiler spill registers.
  if (blockIdx.x + threadIdx.x % 128 == 0 && gated.scale_inv)
    *gated.scale_inv = 1.0f / *gated.scale;
}

// Codes of group q of 16 columns, of the lane's row and of the eighth row after.
__device__ __forceinline__ void stage_codes(uint32_t to, int q, uint32_t row_codes,
                                            uint32_t row_8_codes) {
  const uint32_t row = threadIdx.x % 32 / 4;
  const uint32_t at = to + row * 128 + threadIdx.x % 4 * 2 + (q ^ row % 8) * 16;
  store_shared(at, row_codes);
  store_shared(at + 8, row_codes >> 16);
  store_shared(at + 8 * 128, row_8_codes);
  store_shared(at + 8 * 128 + 8, row_8_codes >> 16);
}

#endif

}  // namespace apex_te
