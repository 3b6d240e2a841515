// The map of sort_chunks: each block adds up the chunks' sizes and looks up its rows in the sums.
#pragma once

#include "moe_permute/moe_permute_route_cuda.h"

namespace apex_te {
namespace {

constexpr int kChunkThreads = 256;
constexpr int kChunkRows = 4 * kChunkThreads;  // of a block

__device__ __forceinline__ int64_t element(const void* values, bool is_long, int i) {
  return is_long ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
}

// The last of n ascending starts that is not above `row`: of equal ones, which empty chunks have,
// the one that has the row.
__device__ __forceinline__ int chunk_of(const uint32_t* starts, int n, uint32_t row) {
  int low = 0, high = n;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (starts[middle] <= row ? low : high) = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kChunkThreads) moe_chunk_map_kernel(const ChunkMap p) {
  __shared__ uint32_t inp_starts[kMaxChunks], out_starts[kMaxChunks];
  __shared__ int16_t order[kMaxChunks], places[kMaxChunks];
  __shared__ uint32_t partials[kSumPartials];
  const int n = p.num_chunks;
  const auto size_of = [&](int chunk) {
    const int64_t size = element(p.split_sizes, p.has_long_sizes, chunk);
    return static_cast<uint32_t>(size < 0 ? 0 : size < p.rows ? size : p.rows);
  };
  for (int i = threadIdx.x; i < n; i += kChunkThreads) places[i] = -1;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kChunkThreads) {
    const int64_t chunk = element(p.sorted_index, p.has_long_index, i);
    const bool is_chunk = chunk >= 0 && chunk < n;
    order[i] = static_cast<int16_t>(is_chunk ? chunk : -1);
    out_starts[i] = is_chunk ? size_of(static_cast<int>(chunk)) : 0;
    inp_starts[i] = size_of(i);
    if (is_chunk) places[chunk] = static_cast<int16_t>(i);
  }
  __syncthreads();
  const uint32_t inp_rows = exclusive_sums(inp_starts, n, partials);
  const uint32_t out_rows = exclusive_sums(out_starts, n, partials);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kChunkRows;
  const int64_t last = min(p.rows, first + kChunkRows);
  for (int64_t row = first + threadIdx.x; row < last; row += kChunkThreads) {
    const uint32_t r = static_cast<uint32_t>(row);
    int32_t source = -1, target = -1;
    if (r < out_rows) {
      const int i = chunk_of(out_starts, n, r), chunk = order[i];
      if (chunk >= 0) source = static_cast<int32_t>(inp_starts[chunk] + (r - out_starts[i]));
    }
    if (r < inp_rows) {
      const int chunk = chunk_of(inp_starts, n, r), i = places[chunk];
      if (i >= 0) target = static_cast<int32_t>(out_starts[i] + (r - inp_starts[chunk]));
    }
    p.map[row] = source;
    p.map[p.rows + row] = target;
  }
}

}  // namespace
}  // namespace apex_te
