// The second step of a column sum (common/numerics/column_sums.h) on the GPU.
#pragma once

#include "common/gpu/dependent_launch.h"
#include "common/numerics/codec.h"
#include "common/numerics/column_sums.h"

namespace apex_te {

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

}  // namespace apex_te
