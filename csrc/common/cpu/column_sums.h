// The second step of a column sum (common/numerics/column_sums.h) on the CPU.
#pragma once

#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"
#include "common/numerics/codec.h"
#include "common/numerics/column_sums.h"

namespace apex_te {

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
