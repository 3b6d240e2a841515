// The second step of a column sum (common/numerics/column_sums.h) on the GPU.
#pragma once

#include "common/gpu/dependent_launch.h"
#include "common/numerics/codec.h"
#include "common/numerics/column_sums.h"

namespace apex_te {

constexpr int kColumnSumThreads = 512;
constexpr int64_t kColumnSumBlocks = 256;  // that keep a GPU busy

// A block has 1 << log_cols columns and, side by side, as many groups of kLinesAtOnce lines as its
// threads take.
template <typename T>
__global__ void __launch_bounds__(kColumnSumThreads)
    column_sums_kernel(const float* lines, int64_t num_lines, int64_t cols, int log_cols, T* sums,
                       const int32_t* noop) {
  __shared__ double parts[kColumnSumThreads];
  const int lane = threadIdx.x & ((1 << log_cols) - 1), group = threadIdx.x >> log_cols;
  const int groups = blockDim.x >> log_cols;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) << log_cols) + lane;
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
    parts[threadIdx.x] = part;
    __syncthreads();
    if (group == 0)
      for (int g = 0; g < groups; ++g) sum += parts[(g << log_cols) + lane];
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
  // 32 bytes of a line at least: what memory gives at once.
  const int log_cols = cols >> 5 < kColumnSumBlocks ? 3 : 5;
  const int64_t blocks = ((cols - 1) >> log_cols) + 1;
  if (blocks > 0x7FFFFFFF) fail(kApexTeUnsupported, "a bias gradient must have fewer columns");
  const int64_t most = kColumnSumThreads >> log_cols;
  int64_t groups = (num_lines + kLinesAtOnce - 1) / kLinesAtOnce;
  groups = groups < 1 ? 1 : groups > most ? most : groups;
  launch_dependent(column_sums_kernel<T>, blocks, static_cast<int>(groups << log_cols), stream,
                   lines, num_lines, cols, log_cols, static_cast<T*>(sums), noop);
}

}  // namespace apex_te
