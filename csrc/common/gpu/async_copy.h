// Asynchronous copies from global into shared memory, whose arrival an mbarrier counts.
//
// On sm_90 and later the bulk copy engine moves a whole chunk for one instruction and no register;
// before it every lane of the warp issues 16-byte copies. AMD's GPUs have no such barriers.
#pragma once

#include <cstdint>

#include "common/gpu/compat.h"

namespace apex_te {

#if defined(__HIP_PLATFORM_AMD__)

// Not defined: a kernel that would call one does not link (kHasCountedBarriers).
constexpr unsigned kCopyArrivals = 1;
__device__ void barrier_init(uint64_t* barrier, unsigned arrivals);
__device__ void barrier_arrive(uint64_t* barrier);
__device__ void barrier_expect(uint64_t* barrier, uint32_t bytes);
__device__ void barrier_wait(uint64_t* barrier, unsigned parity);
__device__ void finish_reads();
__device__ void release_chunk(uint64_t* barrier);
__device__ void copy_chunk(void* chunk, const void* source, uint32_t bytes, uint64_t* barrier);

#else

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr unsigned kCopyArrivals = 1;  // with which a barrier of copy_chunk starts
#else
constexpr unsigned kCopyArrivals = 32;
#endif

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// By one thread, before a __syncthreads() that every user of the barrier passes.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
      : "memory");
}

// Arrives and lets the phase end only when `bytes` have come too (sm_90 and later).
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
#else
  barrier_arrive(barrier);
#endif
}

// Waits for the end of the phase with this parity: 0, 1, 0, ... from the barrier's start.
__device__ __forceinline__ void barrier_wait(uint32_t address, unsigned parity) {
  uint32_t done;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#endif
  } while (!done);
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, unsigned parity) {
  barrier_wait(shared_address(barrier), parity);
}

// By each thread that has read a chunk, before the arrival or __syncwarp() after which it is
// written again: neither orders the reads before the copy engine's writes, nor waits for loads in
// flight.
__device__ __forceinline__ void finish_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  asm volatile("fence.acq_rel.cta;" ::: "memory");
#endif
}

// By each thread that has read a chunk, to let it be written again; `barrier` counts threads.
__device__ __forceinline__ void release_chunk(uint64_t* barrier) {
  finish_reads();
  barrier_arrive(barrier);
}

// By a whole warp: `bytes` from `source` to `chunk` of shared memory, both addresses and the size
// multiples of 16. The barrier's phase ends when they are there. A chunk that was read before is
// written again only after this warp has waited for its readers' release_chunk, or, where only this
// warp reads, after finish_reads and a __syncwarp().
__device__ __forceinline__ void copy_chunk(void* chunk, const void* source, uint32_t bytes,
                                           uint64_t* barrier) {
  const unsigned lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(chunk)),
        "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
  }
#else
  for (uint32_t at = lane * 16; at < bytes; at += 32 * 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     shared_address(static_cast<char*>(chunk) + at)),
                 "l"(__cvta_generic_to_global(static_cast<const char*>(source) + at))
                 : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
  __syncwarp();
}

#endif

}  // namespace apex_te
