// The instructions of sm_90a that a product of FP8 codes is made of: matrix products of a
// warpgroup, tensor copies into both blocks of a cluster, and the barriers between the two.
#pragma once

#include <cuda.h>

#include "common/gpu/async_copy.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Rows of 128 bytes in 8-row atoms of 1024 bytes, whose 16-byte chunks are swizzled by the row:
// what a tensor copy with 128-byte swizzle writes. `address` may be moved along the row by 32.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kAtom = 1024 >> 4, kUnused = 1;
  return kSwizzle128 | kAtom << 32 | kUnused << 16 | (address & 0x3FFFF) >> 4;
}

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// clang-format off
#define APEX_TE_D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                         "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define APEX_TE_D32(d, i) APEX_TE_D8(d, i), APEX_TE_D8(d, i + 8), APEX_TE_D8(d, i + 16), \
                          APEX_TE_D8(d, i + 24)
#define APEX_TE_LIST_64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define APEX_TE_LIST_128 \
  APEX_TE_LIST_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"
// clang-format on

// d += a . b^T of 64 rows of a, 32 bytes of K and 256 or 128 rows of b. Thread t of the warpgroup
// has in d[4 j + {0, 1}] the columns 8 j + 2 (t % 4) + {0, 1} of row 16 (t / 32) + t % 32 / 4 and
// in d[4 j + {2, 3}] those of the eighth row after. `add` false: d = a . b^T.
#define APEX_TE_DEFINE_PRODUCT(A, B, types)                                                   \
  __device__ __forceinline__ void multiply_add(A, B, float (&d)[128], uint64_t a, uint64_t b, \
                                               bool add) {                                    \
    asm volatile(                                                                             \
        "{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"                                           \
        "wgmma.mma_async.sync.aligned.m64n256k32.f32." types " " APEX_TE_LIST_128             \
        "}, %128, %129, p, 1, 1; }"                                                           \
        : APEX_TE_D32(d, 0), APEX_TE_D32(d, 32), APEX_TE_D32(d, 64), APEX_TE_D32(d, 96)       \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                        \
  }                                                                                           \
  __device__ __forceinline__ void multiply_add(A, B, float (&d)[64], uint64_t a, uint64_t b,  \
                                               bool add) {                                    \
    asm volatile(                                                                             \
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"                                            \
        "wgmma.mma_async.sync.aligned.m64n128k32.f32." types " " APEX_TE_LIST_64              \
        "}, %64, %65, p, 1, 1; }"                                                             \
        : APEX_TE_D32(d, 0), APEX_TE_D32(d, 32)                                               \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                        \
  }
APEX_TE_DEFINE_PRODUCT(E4M3, E4M3, "e4m3.e4m3")
APEX_TE_DEFINE_PRODUCT(E5M2, E4M3, "e5m2.e4m3")
APEX_TE_DEFINE_PRODUCT(E4M3, E5M2, "e4m3.e5m2")
APEX_TE_DEFINE_PRODUCT(E5M2, E5M2, "e5m2.e5m2")

// Four 8x8 matrices of 16-bit elements to rows of 16 bytes in shared memory, whose addresses the
// lanes have in turn: a thread's words are those that it has of a product's matrices.
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t x, uint32_t y, uint32_t z,
                                               uint32_t w) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// A box of shared memory to a matrix from column x and row y on; what is behind its end is left
// out.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int x, int y, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
      "r"(from), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void stores_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the stores of this thread have read their shared memory.
__device__ __forceinline__ void stores_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// A box of a matrix from column x and row y on to shared memory; `barrier` counts its bytes.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int x, int y,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
// Copies a box to this place in both blocks of a cluster; each block's barrier counts its bytes.
__device__ __forceinline__ void copy_box_to_both(uint32_t to, const CUtensorMap& map, int x, int y,
                                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(static_cast<uint16_t>(3))
      : "memory");
}

// Arrives at the barrier of the cluster's block `rank` that lies where `barrier` does here. What
// the thread has read was read by products that are done: no fence is needed.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif

}  // namespace apex_te
