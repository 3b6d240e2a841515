// Cuts a list into launches: tables in kernel parameters, chunks, and vectors of any dtype.
#pragma once

#include <algorithm>

#include "common/gpu/amax.h"
#include "multi_tensor/multi_tensor.h"

namespace apex_te {

constexpr int kThreads = 256;
constexpr int kOptionBytes = 288;  // room for a kernel's other parameters

// The tensors of one launch, passed by value: no copy to the device, so a captured graph keeps it.
// Block b works on chunk b - first_block[i] of the last tensor i with first_block[i] <= b.
template <int kLists, int kBytes>
struct Table {
  static constexpr int kSize = (kBytes - kOptionBytes - 16) / (8 * kLists + 12);
  void* data[kLists][kSize];
  uint64_t packed[kSize];  // numel << 16 | is_aligned << 15 | dtypes
  int32_t first_block[kSize];
  int32_t count;
  int64_t chunk;
};
// Parameters beyond 4 KB need a toolkit and a driver of CUDA 12.1.
constexpr int kSmallTable = 4096;
#if CUDART_VERSION >= 12010 && !defined(__HIP_PLATFORM_AMD__)
constexpr int kLargeTable = 32764;
#else
constexpr int kLargeTable = kSmallTable;
#endif

inline bool allows_large_tables() {
  static const bool allowed = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12010;
  }();
  return allowed;
}

// A block's part of a launch.
template <int kLists, int kBytes>
struct Work {
  const Table<kLists, kBytes>& table;
  int tensor;        // in the table
  int64_t begin, n;  // elements
  bool is_aligned;   // every column allows vectors of 8 (or 4 optimizer) elements
  __device__ explicit Work(const Table<kLists, kBytes>& t) : table(t) {
    const int block = blockIdx.x;
    int low = 0, high = t.count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (t.first_block[middle] <= block)
        low = middle;
      else
        high = middle - 1;
    }
    tensor = low;
    begin = (block - t.first_block[low]) * t.chunk;
    n = min(t.chunk, static_cast<int64_t>(t.packed[low] >> 16) - begin);
    is_aligned = t.packed[low] >> 15 & 1;
  }
  __device__ int dtype(int list) const {
    return static_cast<int>(table.packed[tensor] >> 2 * list) & 3;
  }
  template <typename T = void>
  __device__ T* data(int list) const {
    return static_cast<T*>(table.data[list][tensor]);
  }
  __device__ bool is_first_chunk() const { return begin == 0; }
};

inline int bytes_of(const Row& row, int list) { return row.dtype(list) == DType::kFloat32 ? 4 : 2; }

// Calls launch(table, blocks, first_row, first_chunk) until every row had its chunks. A row without
// elements gets one block as well; whoever does not want that leaves it out.
template <int kLists, int kBytes, typename Launch>
void launch_tables(const Rows& rows, int64_t chunk, uint64_t (*pack)(const Row&),
                   const Launch& launch) {
  Table<kLists, kBytes> table;
  table.chunk = chunk;
  int64_t first_chunk = 0;
  for (size_t begin = 0; begin < rows.size();) {
    int64_t blocks = 0;
    int count = 0;
    for (; count < table.kSize && begin + count < rows.size(); ++count) {
      const Row& row = rows[begin + count];
      const int64_t chunks = chunks_of(row.numel, chunk);
      if (blocks + chunks > 0x7FFFFFFF) break;
      for (int k = 0; k < kLists; ++k) table.data[k][count] = row.data[k];
      table.packed[count] = static_cast<uint64_t>(row.numel) << 16 | pack(row);
      table.first_block[count] = static_cast<int32_t>(blocks);
      blocks += chunks;
    }
    if (count == 0) fail(kApexTeUnsupported, "multi_tensor: a tensor has 2^45 elements or more");
    table.count = count;
    launch(table, static_cast<unsigned>(blocks), static_cast<int>(begin), first_chunk);
    check_cuda(cudaGetLastError(), "multi_tensor");
    begin += count;
    first_chunk += blocks;
  }
}

// The small table where the list fits in it: its launch costs less.
template <int kLists, typename Launch>
void launch_list(const Rows& rows, int64_t chunk, uint64_t (*pack)(const Row&),
                 const Launch& launch) {
  if (rows.size() <= Table<kLists, kSmallTable>::kSize || !allows_large_tables())
    launch_tables<kLists, kSmallTable>(rows, chunk, pack, launch);
  else
    launch_tables<kLists, kLargeTable>(rows, chunk, pack, launch);
}

// A row's dtypes, and whether columns [0, kLists) are aligned for vectors of kWidth elements.
template <int kLists, int kWidth>
uint64_t pack_row(const Row& row) {
  bool aligned = true;
  for (int k = 0; k < kLists; ++k)
    aligned = aligned && is_aligned(row.data[k], std::min(16, kWidth * bytes_of(row, k)));
  return row.dtypes | (aligned ? 1u << 15 : 0u);
}

#if defined(__CUDACC__)

// kWidth elements of a dtype that a block knows at run time, as words: loads can be issued before
// any of them is looked at.
template <int kWidth>
struct Raw {
  uint32_t words[kWidth];
};

__device__ __forceinline__ void put(uint32_t* words, const uint4& w) {
  words[0] = w.x;
  words[1] = w.y;
  words[2] = w.z;
  words[3] = w.w;
}

template <int kWidth, bool kVector>
__device__ __forceinline__ Raw<kWidth> load_raw(const void* data, int dtype, int64_t i, int64_t n) {
  Raw<kWidth> raw = {};
  if (!kVector) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (k >= n) continue;
      if (dtype == 0)
        raw.words[k] = static_cast<const uint32_t*>(data)[i + k];
      else
        raw.words[k / 2] |= static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i + k])
                            << 16 * (k % 2);
    }
  } else if (dtype == 0) {
#pragma unroll
    for (int k = 0; k < kWidth / 4; ++k)
      put(raw.words + 4 * k,
          reinterpret_cast<const uint4*>(static_cast<const float*>(data) + i)[k]);
  } else if (kWidth == 8) {
    put(raw.words, *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + i));
  } else {
    const uint2 w = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + i);
    raw.words[0] = w.x;
    raw.words[1] = w.y;
  }
  return raw;
}

template <int kWidth>
__device__ __forceinline__ void unpack(const Raw<kWidth>& raw, int dtype, float* values) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const uint32_t half = raw.words[k / 2] >> 16 * (k % 2) & 0xFFFFu;
    values[k] = dtype == 0   ? __uint_as_float(raw.words[k])
                : dtype == 1 ? to_float(Half{static_cast<uint16_t>(half)})
                             : __uint_as_float(half << 16);
  }
}

template <int kWidth, bool kVector>
__device__ __forceinline__ void store_values(void* data, int dtype, int64_t i, int64_t n,
                                             const float* values) {
  if (dtype == 0) {
    float* out = static_cast<float*>(data) + i;
#pragma unroll
    for (int k = 0; k < kWidth; k += kVector ? 4 : 1) {
      if (kVector)
        *reinterpret_cast<float4*>(out + k) =
            make_float4(values[k], values[k + 1], values[k + 2], values[k + 3]);
      else if (k < n)
        out[k] = values[k];
    }
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(data) + i;
  uint32_t words[kWidth / 2];
#pragma unroll
  for (int k = 0; k < kWidth / 2; ++k)
    words[k] = dtype == 1 ? f16x2_of(values[2 * k], values[2 * k + 1])
                          : bf16x2_of(values[2 * k], values[2 * k + 1]);
  if (kVector && kWidth == 8) {
    *reinterpret_cast<uint4*>(out) =
        make_uint4(words[0], words[1], words[kWidth / 2 - 2], words[kWidth / 2 - 1]);
  } else if (kVector) {
    *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (k < n) out[k] = static_cast<uint16_t>(words[k / 2] >> 16 * (k % 2));
  }
}

// Calls body.run<vectors, is_vector>(i, n) over a chunk: kSteps vectors a thread while they are
// whole, then single ones, then, and throughout where a column is misaligned, element by element.
// The run's vectors start at i and lie kThreads * kWidth apart; n elements are left from i on.
template <int kWidth, int kSteps, typename Body>
__device__ __forceinline__ void for_chunk(int64_t begin, int64_t n, bool is_aligned, Body& body) {
  constexpr int64_t kStride = kThreads * kWidth;
  int64_t i = threadIdx.x * kWidth;
  if (is_aligned) {
    for (; i + (kSteps - 1) * kStride + kWidth <= n; i += kSteps * kStride)
      body.template run<kSteps, true>(begin + i, n - i);
    if (kSteps > 1)
      for (; i + kWidth <= n; i += kStride) body.template run<1, true>(begin + i, n - i);
  }
  for (; i < n; i += kStride) body.template run<1, false>(begin + i, n - i);
}

// Sums each of a block's kSums values over its threads, in a fixed order; the result is thread 0's.
template <int kSums>
__device__ __forceinline__ void block_sum(float (&values)[kSums]) {
  __shared__ float warps[kSums][kThreads / 32];
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    values[s] = warp_sum(values[s]);
    if (threadIdx.x % 32 == 0) warps[s][threadIdx.x / 32] = values[s];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    values[s] = 0.0f;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) values[s] += warps[s][w];
  }
}

// Leaves a block's partial sums; the first chunk of a tensor also says where its sums begin.
template <int kSums, int kLists, int kBytes>
__device__ __forceinline__ void store_partials(const Partials& p, float (&values)[kSums],
                                               const Work<kLists, kBytes>& work, int first_row,
                                               int64_t first_chunk) {
  block_sum(values);
  if (threadIdx.x != 0) return;
  const int64_t chunk = first_chunk + blockIdx.x;
#pragma unroll
  for (int s = 0; s < kSums; ++s) p.sums[chunk * kSums + s] = values[s];
  if (work.is_first_chunk()) p.first_chunk[first_row + work.tensor] = static_cast<int32_t>(chunk);
  if (chunk == 0) *p.counter = 0;
}

// Sums a tensor's partial sums in float64, in a fixed order; the result is thread 0's.
template <int kSums>
__device__ __forceinline__ void sum_partials(const Partials& p, int row, int num_rows,
                                             double (&totals)[kSums]) {
  __shared__ double threads[kSums][kThreads];
  const int64_t begin = p.first_chunk[row];
  const int64_t end = row + 1 < num_rows ? p.first_chunk[row + 1] : p.num_chunks;
#pragma unroll
  for (int s = 0; s < kSums; ++s) totals[s] = 0.0;
#pragma unroll 8
  for (int64_t c = begin + threadIdx.x; c < end; c += kThreads)
#pragma unroll
    for (int s = 0; s < kSums; ++s) totals[s] += static_cast<double>(p.sums[c * kSums + s]);
#pragma unroll
  for (int s = 0; s < kSums; ++s) threads[s][threadIdx.x] = totals[s];
  for (int half = kThreads / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half)
#pragma unroll
      for (int s = 0; s < kSums; ++s) threads[s][threadIdx.x] += threads[s][threadIdx.x + half];
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) totals[s] = threads[s][0];
}

#endif  // __CUDACC__

}  // namespace apex_te
