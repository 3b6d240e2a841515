// The second step of a deterministic column sum (a bias or weight gradient): a kernel has left the
// sums of each tile of rows in a line of fp32. Lines are added by 16, and those sums, in order of
// rows and in double, so that many lines cost no accuracy: the same bits on both devices.
#pragma once

#include "common/codec.h"
#if defined(__CUDACC__)
#include "common/dependent_launch.h"
#else
#include "common/parallel.h"
#endif

namespace apex_te {

constexpr int kLinesAtOnce = 16;

#if defined(__CUDACC__)

constexpr int kColumnSumCols = 32;    // columns of a block
constexpr int kColumnSumGroups = 16;  // groups of 16 lines that a block adds at a time

template <typename T>
__global__ void __launch_bounds__(kColumnSumCols* kColumnSumGroups)
    column_sums_kernel(const float* lines, int64_t num_lines, int64_t cols, T* sums,
                       const int32_t* noop) {
  __shared__ double parts[kColumnSumGroups][kColumnSumCols];
  const int lane = threadIdx.x % kColumnSumCols, group = threadIdx.x / kColumnSumCols;
  const int groups = blockDim.x / kColumnSumCols;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kColumnSumCols + lane;
  wait_for_previous_kernel();
  if (noop && *noop != 0) return;
  double sum = 0.0;
  for (int64_t begin = 0; begin < num_lines; begin += groups * kLinesAtOnce) {
    const int64_t line = begin + group * kLinesAtOnce;
    float values[kLinesAtOnce];
    double part = 0.0;
#pragma unroll
    for (int i = 0; i < kLinesAtOnce; ++i)
      values[i] = c < cols && line + i < num_lines ? lines[(line + i) * cols + c] : 0.0f;
#pragma unroll
    for (int i = 0; i < kLinesAtOnce; ++i) part += values[i];
    parts[group][lane] = part;
    __syncthreads();
    if (group == 0)
      for (int g = 0; g < groups; ++g) sum += parts[g][lane];
    __syncthreads();
  }
  if (group == 0 && c < cols) sums[c] = from_float<T>(static_cast<float>(sum));
}

// lines: [num_lines, cols]; sums: [cols], zeros where there is no line. The kernel that wrote the
// lines may call let_next_kernel_start. A noop flag that is not 0 leaves sums unwritten.
template <typename T>
void launch_column_sums(const float* lines, int64_t num_lines, int64_t cols, void* sums,
                        cudaStream_t stream, const int32_t* noop = nullptr) {
  if (cols == 0) return;
  const int64_t blocks = (cols + kColumnSumCols - 1) / kColumnSumCols;
  if (blocks > 0x7FFFFFFF) fail(kApexTeUnsupported, "a bias gradient must have fewer columns");
  int64_t groups = (num_lines + kLinesAtOnce - 1) / kLinesAtOnce;
  groups = groups < 1 ? 1 : groups > kColumnSumGroups ? kColumnSumGroups : groups;
  launch_dependent(column_sums_kernel<T>, blocks, static_cast<int>(groups * kColumnSumCols), stream,
                   lines, num_lines, cols, static_cast<T*>(sums), noop);
}

#else

template <typename T>
void add_lines(const float* lines, int64_t num_lines, int64_t cols, void* sums) {
  constexpr int64_t kChunk = 256;
  parallel_for((cols + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t begin = chunk * kChunk, n = cols - begin < kChunk ? cols - begin : kChunk;
    double totals[kChunk] = {};
    for (int64_t line = 0; line < num_lines; line += kLinesAtOnce) {
      const int64_t end = line + kLinesAtOnce < num_lines ? line + kLinesAtOnce : num_lines;
      double parts[kChunk] = {};
      for (int64_t i = line; i < end; ++i)
        for (int64_t c = 0; c < n; ++c) parts[c] += lines[i * cols + begin + c];
      for (int64_t c = 0; c < n; ++c) totals[c] += parts[c];
    }
    for (int64_t c = 0; c < n; ++c)
      static_cast<T*>(sums)[begin + c] = from_float<T>(static_cast<float>(totals[c]));
  });
}

#endif

}  // namespace apex_te
