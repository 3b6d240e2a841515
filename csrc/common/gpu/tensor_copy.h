// Tensor copies (sm_90 and later): boxes of a matrix between global memory and shared memory, where
// the rows of a box are swizzled for matrix products; and the barriers of a cluster that they use.
#pragma once

#include <cuda.h>

#include "common/gpu/async_copy.h"
#include "common/gpu/device.h"

namespace apex_te {

// How long the L2 cache keeps what is copied.
constexpr uint64_t kKeepNormally = 0x1000000000000000, kKeepLess = 0x12F0000000000000,
                   kKeepLonger = 0x14F0000000000000;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A box of shared memory to a matrix from column x and row y on; what is behind its end is left
// out.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int x, int y, uint32_t from,
                                          uint64_t keep = kKeepNormally) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], "
      "%4;" ::"l"(&map),
      "r"(from), "r"(x), "r"(y), "l"(keep)
      : "memory");
}
__device__ __forceinline__ void store_box_of(const CUtensorMap& map, int x, int y, int z,
                                             uint32_t from, uint64_t keep = kKeepNormally) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], "
      "[%1], %5;" ::"l"(&map),
      "r"(from), "r"(x), "r"(y), "r"(z), "l"(keep)
      : "memory");
}
// Adds a box of float32 to one of matrix z, in the L2 cache; subnormal sums become 0.
__device__ __forceinline__ void add_box_of(const CUtensorMap& map, int x, int y, int z,
                                           uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], "
      "[%1];" ::"l"(&map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void stores_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the stores of this thread, except for the last kLeft commits, have read their shared
// memory.
template <int kLeft = 0>
__device__ __forceinline__ void stores_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// A box of a matrix from column x and row y on to shared memory; `barrier` counts its bytes.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int x, int y,
                                         uint32_t barrier, uint64_t keep = kKeepNormally) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"(keep)
      : "memory");
}
__device__ __forceinline__ void copy_box_of(uint32_t to, const CUtensorMap& map, int x, int y,
                                            int z, uint32_t barrier,
                                            uint64_t keep = kKeepNormally) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(keep)
      : "memory");
}
// `bytes` that lie together, in multiples of 16 at multiples of 16, to shared memory.
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}
// Fetches a box of a matrix from column x and row y on into the L2 cache.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(x),
               "r"(y)
               : "memory");
}
// Copies a box to this place in both blocks of a cluster; each block's barrier counts its bytes.
__device__ __forceinline__ void copy_box_to_both(uint32_t to, const CUtensorMap& map, int x, int y,
                                                 uint32_t barrier, uint64_t keep = kKeepNormally) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(static_cast<uint16_t>(3)), "l"(keep)
      : "memory");
}

__device__ __forceinline__ void copy_box_of_to_both(uint32_t to, const CUtensorMap& map, int x,
                                                    int y, int z, uint32_t barrier,
                                                    uint64_t keep = kKeepNormally) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(static_cast<uint16_t>(3)), "l"(keep)
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

// Position of a warp in a ring.
template <int kSize>
struct Place {
  int at = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void next() {
    if (++at == kSize) {
      at = 0;
      phase ^= 1;
    }
  }
};

#endif

struct BoxElement {
  CUtensorMapDataType type;
  int bytes;
};
constexpr BoxElement kBytes = {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1};
constexpr BoxElement kBFloat16s = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2};
constexpr BoxElement kFloats = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4};

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

inline Encode find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                              cudaEnableDefault, &result),
             "cudaGetDriverEntryPointByVersion");
#else
  check_cuda(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result),
             "cudaGetDriverEntryPoint");
#endif
  if (result != cudaDriverEntryPointSuccess || !found)
    fail(kApexTeRuntimeError, "the NVIDIA driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<Encode>(found);
}

// Boxes of a matrix or of several, whose rows begin at multiples of 16 bytes: the extents,
// distances in elements and boxes of columns, rows and, with kRank 3, matrices. In shared memory
// the 16-byte chunks of a box's rows are swizzled by the row, so that 8 of them one below the other
// are in different banks, where a box is 128 or 64 bytes wide.
template <int kRank>
void describe_boxes(CUtensorMap* map, BoxElement element, const void* data,
                    const int64_t (&extents)[kRank], const int64_t (&distances)[kRank - 1],
                    const int (&boxes)[kRank]) {
  static const Encode encode = find_encode();
  cuuint64_t sizes[kRank], strides[kRank - 1];
  cuuint32_t box[kRank], steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(extents[i]);
    box[i] = static_cast<cuuint32_t>(boxes[i]);
    steps[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(distances[i - 1] * element.bytes);
  }
  const int box_bytes = boxes[0] * element.bytes;
  const CUtensorMapSwizzle swizzle = box_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUresult result =
      encode(map, element.type, kRank, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    fail(kApexTeRuntimeError, "cuTensorMapEncodeTiled of [%lld, %lld]: error %d",
         static_cast<long long>(extents[1]), static_cast<long long>(extents[0]),
         static_cast<int>(result));
}

// Boxes of a dense matrix [rows, columns].
inline void describe(CUtensorMap* map, BoxElement element, const void* data, int64_t rows,
                     int64_t columns, int box_rows, int box_columns) {
  describe_boxes<2>(map, element, data, {columns, rows}, {columns}, {box_columns, box_rows});
}

}  // namespace apex_te
