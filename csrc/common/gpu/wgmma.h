// Matrix products of FP8 codes by a warpgroup: the instructions of sm_90a for them.
#pragma once

#include <cstdint>

#include "common/numerics/codec.h"

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
#define APEX_TE_D16(d, i) APEX_TE_D8(d, i), APEX_TE_D8(d, i + 8)
#define APEX_TE_D48(d) APEX_TE_D16(d, 0), APEX_TE_D16(d, 16), APEX_TE_D16(d, 32)
#define APEX_TE_D64(d) APEX_TE_D16(d, 0), APEX_TE_D16(d, 16), APEX_TE_D16(d, 32), APEX_TE_D16(d, 48)
#define APEX_TE_D96(d) APEX_TE_D64(d), APEX_TE_D16(d, 64), APEX_TE_D16(d, 80)
#define APEX_TE_D128(d) APEX_TE_D96(d), APEX_TE_D16(d, 96), APEX_TE_D16(d, 112)
#define APEX_TE_LIST_48 \
  "{" \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define APEX_TE_LIST_64 APEX_TE_LIST_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define APEX_TE_LIST_96 APEX_TE_LIST_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define APEX_TE_LIST_128 APEX_TE_LIST_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// clang-format on

// d += a . b^T of 64 rows of a, 32 bytes of K and as many rows of b as d has twice elements. Thread
// t of the warpgroup has in d[4 j + {0, 1}] the columns 8 j + 2 (t % 4) + {0, 1} of row
// 16 (t / 32) + t % 32 / 4 and in d[4 j + {2, 3}] those of the eighth row after. `add` false:
// d = a . b^T.
#define APEX_TE_DEFINE_PRODUCT(A, B, types, columns, size, at_a, at_b, at_add)                 \
  __device__ __forceinline__ void multiply_add(A, B, float (&d)[size], uint64_t a, uint64_t b, \
                                               bool add) {                                     \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " at_add                                      \
                 ", 0;\n"                                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k32.f32." types                  \
                 " " APEX_TE_LIST_##size "}, " at_a ", " at_b ", p, 1, 1; }"                   \
                 : APEX_TE_D##size(d)                                                          \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                \
  }
#define APEX_TE_DEFINE_PRODUCTS(A, B, types)                          \
  APEX_TE_DEFINE_PRODUCT(A, B, types, "96", 48, "%48", "%49", "%50")  \
  APEX_TE_DEFINE_PRODUCT(A, B, types, "128", 64, "%64", "%65", "%66") \
  APEX_TE_DEFINE_PRODUCT(A, B, types, "192", 96, "%96", "%97", "%98") \
  APEX_TE_DEFINE_PRODUCT(A, B, types, "256", 128, "%128", "%129", "%130")
APEX_TE_DEFINE_PRODUCTS(E4M3, E4M3, "e4m3.e4m3")
APEX_TE_DEFINE_PRODUCTS(E5M2, E4M3, "e5m2.e4m3")
APEX_TE_DEFINE_PRODUCTS(E4M3, E5M2, "e4m3.e5m2")
APEX_TE_DEFINE_PRODUCTS(E5M2, E5M2, "e5m2.e5m2")

// Four 8x8 matrices of 16-bit elements to rows of 16 bytes in shared memory, whose addresses the
// lanes have in turn: a thread's words are those that it has of a product's matrices.
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t x, uint32_t y, uint32_t z,
                                               uint32_t w) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// The same with matrices transposed: a thread's elements of row r and columns c and c + 1 go to
// place r of rows c and c + 1.
__device__ __forceinline__ void store_transposed(uint32_t row, uint32_t x, uint32_t y, uint32_t z,
                                                 uint32_t w) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// Tells the compiler that a value is the same in all lanes: the tiles' places in shared memory are
// then computed once for the warp, and the next product follows sooner.
template <typename T>
__device__ __forceinline__ T same_in_warp(T value) {
  return __shfl_sync(0xFFFFFFFFu, value, 0);
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
