// The GPU's runtime: CUDA's or, in a hipified copy, AMD's HIP, and what the kernels need of it that
// HIP has not or means otherwise (op_builder/jit/backends/hipify.py maps the names).
#pragma once

#if defined(__HIP_PLATFORM_AMD__)

#include <hip/hip_runtime.h>

#include <cstdint>

// Lanes of a wave: 64 on gfx9 (CDNA), 32 on gfx10 and later (RDNA). Known to device code alone: a
// library may have code for both.
#if defined(__HIP_DEVICE_COMPILE__)
#if defined(__GFX9__) || defined(__GFX8__)
#define APEX_TE_WAVE_SIZE 64
#else
#define APEX_TE_WAVE_SIZE 32
#endif
static_assert(APEX_TE_WAVE_SIZE % 32 == 0, "a wave is one warp of the kernels or several");
#endif

// A warp of the kernels is 32 lanes, on a wave of 64 one half of it: sums are taken in the same
// order, and have the same bits, whatever the wave is. Shuffles stay within the half. Masks are not
// needed: the lanes of a wave run in lockstep.
template <typename T>
__device__ __forceinline__ T apex_te_shfl(uint32_t, T value, int lane, int width = 32) {
  return __shfl(value, lane, width);
}
template <typename T>
__device__ __forceinline__ T apex_te_shfl_xor(uint32_t, T value, int lanes, int width = 32) {
  return __shfl_xor(value, lanes, width);
}
template <typename T>
__device__ __forceinline__ T apex_te_shfl_up(uint32_t, T value, unsigned lanes, int width = 32) {
  return __shfl_up(value, lanes, width);
}
template <typename T>
__device__ __forceinline__ T apex_te_shfl_down(uint32_t, T value, unsigned lanes, int width = 32) {
  return __shfl_down(value, lanes, width);
}
// Lockstep needs no barrier, but memory accesses must keep their order.
__device__ __forceinline__ void apex_te_syncwarp() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}

// Loads what another block wrote before its __threadfence(), past this multiprocessor's L1 cache.
template <typename T>
__device__ __forceinline__ T apex_te_load_coherent(const T* p) {
  return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// HIP reads the second bound as waves of a SIMD, CUDA as blocks of a multiprocessor: left out.
constexpr int apex_te_block_threads(int threads, int = 0) { return threads; }
#define APEX_TE_LAUNCH_BOUNDS(...) \
  __attribute__((amdgpu_flat_work_group_size(1, apex_te_block_threads(__VA_ARGS__))))

#if !defined(__grid_constant__)
#define __grid_constant__
#endif

// An operand of an empty asm that keeps a value in a register of its thread.
#define APEX_TE_REGISTER "+v"

#else

#include <cuda_runtime.h>

#define APEX_TE_REGISTER "+r"

#endif

namespace apex_te {

// Barriers that count arrivals and copies in shared memory (mbarrier) and named barriers. Without
// them the kernels built on them are left out. They could not be imitated: two warps in one wave of
// 64 lanes would wait for each other in turn for ever.
#if defined(__HIP_PLATFORM_AMD__)
constexpr bool kHasCountedBarriers = false;
#else
constexpr bool kHasCountedBarriers = true;
#endif

}  // namespace apex_te
