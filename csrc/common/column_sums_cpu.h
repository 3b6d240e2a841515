// add_lines for a dtype that is chosen at run time.
#pragma once

#include "common/column_sums.h"
#include "common/cpu_rows.h"
#include "common/scratch.h"

namespace apex_te {

inline void add_lines(const float* lines, int64_t num_lines, int64_t cols, DType dtype,
                      void* sums) {
  if (dtype == DType::kFloat32) return add_lines<float>(lines, num_lines, cols, sums);
  const auto buffer = make_scratch<float>(cols);
  add_lines<float>(lines, num_lines, cols, buffer.get());
  RowDType(dtype).narrow(buffer.get(), cols, sums, 0);
}

}  // namespace apex_te
