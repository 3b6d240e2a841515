// Device code that the forward and backward kernels of the norms share.
#pragma once

#include <atomic>

#include "common/gpu/async_copy.h"
#include "common/gpu/cluster.h"
#include "common/gpu/vec.h"
#include "common/norm/arguments.h"

namespace apex_te {

// Copies of one thread into shared memory, which it waits for itself.
__device__ __forceinline__ void copy_async16(void* shared, const void* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
#else
  *static_cast<float4*>(shared) = *static_cast<const float4*>(global);
#endif
}
__device__ __forceinline__ void commit_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most `kLater` groups of this thread's copies are under way.
template <int kLater>
__device__ __forceinline__ void wait_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
#endif
}
__device__ __forceinline__ void copy_async4(void* shared, const void* global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
#else
  *static_cast<float*>(shared) = *static_cast<const float*>(global);
#endif
}

constexpr int kLoopBlocks = 3;  // of a multiprocessor, where rows are not aligned

// Keeps the words of vectors as they are: without it the compiler keeps what it unpacked in one
// pass for the next, in twice the registers.
template <typename T, int kCount>
__device__ __forceinline__ void keep_packed(Vec8<T> (&v)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k)
#pragma unroll
    for (int i = 0; i < static_cast<int>(2 * sizeof(T)); ++i)
      asm volatile("" : APEX_TE_REGISTER(v[k].words[i]));
}

// 8 values of weight or bias from column col on; their pointers are aligned to 16 bytes.
template <typename T>
__device__ __forceinline__ void load_params(const void* params, bool is_fp32, int64_t col,
                                            float* values) {
  if (is_fp32)
    unpack(load_vec(static_cast<const float*>(params) + col), values);
  else
    unpack(load_vec(static_cast<const T*>(params) + col), values);
}
template <typename T>
__device__ __forceinline__ float load_param(const void* params, bool is_fp32, int64_t col) {
  return is_fp32 ? static_cast<const float*>(params)[col]
                 : to_float(static_cast<const T*>(params)[col]);
}

template <typename T>
__device__ __forceinline__ void load_gamma(const NormParams& p, int64_t col, float* gamma) {
  if (!p.weight) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) gamma[i] = 1.0f;
    return;
  }
  load_params<T>(p.weight, p.is_fp32, col, gamma);
  if (p.gamma_offset == 0.0f) return;
#pragma unroll
  for (int i = 0; i < kVec; ++i) gamma[i] += p.gamma_offset;
}
template <typename T>
__device__ __forceinline__ void load_bias(const NormParams& p, int64_t col, float* bias) {
  if (p.bias) return load_params<T>(p.bias, p.is_fp32, col, bias);
#pragma unroll
  for (int i = 0; i < kVec; ++i) bias[i] = 0.0f;
}

__device__ __forceinline__ float rstd_of(float sum_of_squares, float count, float eps) {
  return 1.0f / sqrtf(sum_of_squares / count + eps);
}

// Number of sums over centred values: of their squares and, where fp32 can show it, of the values,
// which tell by how much the mean was rounded.
template <typename T, bool kLayerNorm>
constexpr int kCentredSums = kLayerNorm && sizeof(T) == 4 ? 2 : 1;

template <int kSums>
__device__ __forceinline__ void add_centred(float centred, float (&sums)[kSums]) {
  sums[0] = fmaf(centred, centred, sums[0]);
  if (kSums > 1) sums[kSums - 1] += centred;
}
template <int kSums>
__device__ __forceinline__ void correct_mean(float (&sums)[kSums], float count, float* mean) {
  if (kSums == 1) return;
  const float off = sums[kSums - 1] / count;
  *mean += off;
  const float squares = fmaf(-off, sums[kSums - 1], sums[0]);
  sums[0] = squares < 0.0f ? 0.0f : squares;  // a NaN stays
}

// Columns of a thread in a row: vector k begins at column first + k * step, if that is below end.
struct ThreadColumns {
  int first, step, end;

  __device__ __forceinline__ bool has(int k) const { return first + k * step < end; }
};

// The blocks of a row, and which of them this one is.
struct RowRanks {
  int count, rank;
};

// Sums of kCount (1 or 2) values over a row: over its `threads` in this block (a power of two below
// 32, or whole warps) and over its blocks. In three steps, so that other work can lie between the
// last two: over a warp; its sums put up in `parts`, one for each warp of each rank; and, after a
// barrier of the block or, between blocks, the phase of `exchange`, their total. Two rows in turn
// have different parts and barriers.
template <int kCount>
__device__ __forceinline__ void warp_sums(float (&values)[kCount], int threads) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (threads >= 32) {
      values[i] = warp_sum(values[i]);
    } else {
      for (int offset = threads / 2; offset; offset /= 2)
        values[i] += __shfl_xor_sync(0xFFFFFFFFu, values[i], offset);
    }
  }
}
template <int kCount>
__device__ __forceinline__ void put_sums(const float (&values)[kCount], RowRanks ranks,
                                         float2* parts, uint64_t* exchange) {
  const int block_warps = blockDim.x / 32, lane = threadIdx.x % 32;
  float2* part = parts + ranks.rank * block_warps + threadIdx.x / 32;
  if (ranks.count == 1) {
    if (lane == 0) *part = make_float2(values[0], values[kCount - 1]);
    return;
  }
  if (threadIdx.x == 0) barrier_expect(exchange, ranks.count * block_warps * 8);
  if (lane < ranks.count) store_remote_async(part, exchange, lane, values[0], values[kCount - 1]);
}
template <int kCount>
__device__ __forceinline__ void take_sums(float (&values)[kCount], int threads, RowRanks ranks,
                                          const float2* parts) {
  const int block_warps = blockDim.x / 32;
  const int warps = threads / 32, first = threadIdx.x / threads * warps;
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = 0.0f;
  for (int r = 0; r < ranks.count; ++r) {
#pragma unroll 4
    for (int w = first; w < first + warps; ++w) {
      const float2 part = parts[r * block_warps + w];
      values[0] += part.x;
      if (kCount > 1) values[kCount - 1] += part.y;
    }
  }
}
// A row within a warp needs only the first step.
__device__ __forceinline__ bool needs_parts(int threads, RowRanks ranks) {
  return threads > 32 || ranks.count > 1;
}
// All steps at once; `exchange` is in its first phase.
template <int kCount>
__device__ __forceinline__ void row_sums(float (&values)[kCount], int threads, RowRanks ranks,
                                         float2* parts, uint64_t* exchange) {
  warp_sums(values, threads);
  if (!needs_parts(threads, ranks)) return;
  put_sums(values, ranks, parts, exchange);
  if (ranks.count == 1)
    __syncthreads();
  else
    barrier_wait(exchange, 0);
  take_sums(values, threads, ranks, parts);
}

// Threads for a row that is cut into `pieces` of equal work: what row_sum wants.
inline int64_t row_threads(int64_t pieces) {
  if (pieces > 32) return (pieces + 31) / 32 * 32;
  int64_t threads = 1;
  while (threads < pieces) threads *= 2;
  return threads;
}

inline void check_grid(int64_t blocks, const char* op) {
  if (blocks > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "%s: x must have fewer than 2^31 rows or tiles", op);
}

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

constexpr int kMaxNormRanks = 16;  // blocks of a row

#if !defined(__HIP_PLATFORM_AMD__)
static __global__ void __launch_bounds__(1024) cluster_probe_kernel() {}

// The most blocks, each filling a multiprocessor, whose cluster fits on the current device.
inline int largest_cluster() {
  const auto* kernel = reinterpret_cast<const void*>(cluster_probe_kernel);
  allow_shared(kernel);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
             "cudaFuncSetAttribute");
  const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  int blocks = kMaxNormRanks;
  while (blocks > 1 && !clusters_at_once(kernel, 1024, blocks, bytes)) blocks /= 2;
  return blocks;
}
#endif

// The most blocks of the current device that may share a row: fewer than kMaxNormRanks where no
// such cluster fits, as on a slice of a GPU (MIG). Each device is asked once.
inline int most_norm_ranks([[maybe_unused]] int device) {
#if defined(__HIP_PLATFORM_AMD__)
  return 1;
#else
  if (!kHasCountedBarriers || device_attribute(cudaDevAttrComputeCapabilityMajor, device) < 9)
    return 1;
  static std::atomic<int> known[64];
  if (device >= 64) return largest_cluster();
  int blocks = known[device].load(std::memory_order_relaxed);
  if (!blocks) known[device].store(blocks = largest_cluster(), std::memory_order_relaxed);
  return blocks;
#endif
}

// Clusters of a kernel that the device can run at once.
inline int64_t max_active_clusters(const void* kernel, int threads, int cluster,
                                   size_t shared_bytes, int device) {
  if (cluster == 1) {
    int count = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, shared_bytes),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return std::max(count, 1) * device_attribute(cudaDevAttrMultiProcessorCount, device);
  }
#if defined(__HIP_PLATFORM_AMD__)
  fail(kApexTeUnsupported, "a row must not be shared by blocks on an AMD GPU, got %d", cluster);
#else
  if (cluster > 8)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "cudaFuncSetAttribute");
  return clusters_at_once(kernel, threads, cluster, shared_bytes);
#endif
}

// 8 elements of a row of any length and alignment, at the step-th turn of a thread: neighbours
// where the row allows 16-byte accesses, else a block's width apart, so that warps stay coalesced.
struct RowSpan {
  int64_t cols;
  bool aligned;

  __device__ int64_t steps() const { return (cols + blockDim.x * kVec - 1) / (blockDim.x * kVec); }
  __device__ int64_t col(int64_t step, int i) const {
    return aligned ? (step * blockDim.x + threadIdx.x) * kVec + i
                   : (step * kVec + i) * blockDim.x + threadIdx.x;
  }
  __device__ bool has(int64_t step, int i) const { return col(step, i) < cols; }

  template <typename T>
  __device__ __forceinline__ void load(const T* row, int64_t step, float* values) const {
    if (aligned) {
      const int64_t c = col(step, 0);
      unpack(c < cols ? load_vec(row + c) : Vec8<T>{}, values);
      return;
    }
    load_each(row, step, values);
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (!has(step, i)) values[i] = 0.0f;
  }
  // Without alignment; past the row its last element, so that no load waits for a branch.
  template <typename T>
  __device__ __forceinline__ void load_each(const T* row, int64_t step, float* values) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const int64_t c = col(step, i);
      values[i] = to_float(row[c < cols ? c : cols - 1]);
    }
  }
  template <typename T>
  __device__ __forceinline__ void load_gamma(const NormParams& p, int64_t step,
                                             float* gamma) const {
    if (p.weight && p.is_fp32)
      load_each(static_cast<const float*>(p.weight), step, gamma);
    else if (p.weight)
      load_each(static_cast<const T*>(p.weight), step, gamma);
#pragma unroll
    for (int i = 0; i < kVec; ++i) gamma[i] = p.weight ? gamma[i] + p.gamma_offset : 1.0f;
  }
  template <typename T>
  __device__ __forceinline__ void load_bias(const NormParams& p, int64_t step, float* bias) const {
    if (p.bias && p.is_fp32) return load_each(static_cast<const float*>(p.bias), step, bias);
    if (p.bias) return load_each(static_cast<const T*>(p.bias), step, bias);
#pragma unroll
    for (int i = 0; i < kVec; ++i) bias[i] = 0.0f;
  }
  template <typename T>
  __device__ __forceinline__ void store(T* row, int64_t step, const float* values) const {
    Vec8<T> out;
    pack(values, &out);
    if (aligned) {
      if (col(step, 0) < cols) store_vec(row + col(step, 0), out);
      return;
    }
    constexpr int kPerWord = 4 / sizeof(T);
    BitsOf<T>* bits = reinterpret_cast<BitsOf<T>*>(row);
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (has(step, i))
        bits[col(step, i)] = static_cast<BitsOf<T>>(out.words[i / kPerWord] >> 16 * (i % kPerWord));
  }
  __device__ __forceinline__ void store_codes(uint8_t* row, int64_t step, uint2 codes) const {
    if (aligned) {
      if (col(step, 0) < cols) *reinterpret_cast<uint2*>(row + col(step, 0)) = codes;
      return;
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (has(step, i))
        row[col(step, i)] = static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
  }
};

}  // namespace apex_te
