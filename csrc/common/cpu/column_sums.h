// The second step of a column sum (common/numerics/column_sums.h) on the CPU.
#pragma once

#include <algorithm>

#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"
#include "common/numerics/codec.h"
#include "common/numerics/column_sums.h"

namespace apex_te {

// Column sums of up to kSumTileRows rows of up to kCols columns: the first step, as tiles of the
// GPU add them. Rows of x are `ld` elements apart.
template <typename T, int64_t kCols>
APEX_TE_INLINE void sum_tile(const T* x, int64_t ld, int64_t rows, int64_t cols, float* line) {
  constexpr int64_t kRows = kSumThreadRows;
  float tile_sums[kCols] = {}, sums[2][kCols];
  for (int64_t r0 = 0; r0 < rows; r0 += 2 * kRows) {
    std::fill_n(sums[0], 2 * kCols, 0.0f);
    for (int64_t r = r0; r < std::min(rows, r0 + 2 * kRows); ++r) {
      float values[kCols];
      widen(x + r * ld, cols, values);
      float* row_sums = sums[(r - r0) / kRows];
      for (int64_t c = 0; c < cols; ++c) row_sums[c] += values[c];
    }
    for (int64_t c = 0; c < cols; ++c) tile_sums[c] += sums[0][c] + sums[1][c];
  }
  std::copy_n(tile_sums, cols, line);
}
template <typename T, int64_t kCols>
APEX_TE_TARGET_AVX2 void sum_tile_avx2(const T* x, int64_t ld, int64_t rows, int64_t cols,
                                       float* line) {
  sum_tile<T, kCols>(x, ld, rows, cols, line);
}
template <typename T, int64_t kCols>
APEX_TE_TARGET_PORTABLE void sum_tile_portable(const T* x, int64_t ld, int64_t rows, int64_t cols,
                                               float* line) {
  sum_tile<T, kCols>(x, ld, rows, cols, line);
}
template <typename T, int64_t kCols>
auto tile_summer() {
  return use_avx2() ? sum_tile_avx2<T, kCols> : sum_tile_portable<T, kCols>;
}

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

// The dtype of the sums is chosen at run time.
inline void add_lines(const float* lines, int64_t num_lines, int64_t cols, DType dtype,
                      void* sums) {
  if (dtype == DType::kFloat32) return add_lines<float>(lines, num_lines, cols, sums);
  const auto buffer = make_scratch<float>(cols);
  add_lines<float>(lines, num_lines, cols, buffer.get());
  RowDType(dtype).narrow(buffer.get(), cols, sums, 0);
}

}  // namespace apex_te
