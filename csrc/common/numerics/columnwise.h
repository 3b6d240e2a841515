// Row length of columnwise copies [cols, rows] of FP8 data, which may be padded for products.
//
// A weight gradient contracts over the rows of the matrix (its tokens), and a product reads FP8
// data in units of 16 bytes. A copy [cols, rows rounded up to 16] with zeros behind the last row
// gives the same sums at every number of rows, and is written in whole vectors.
#pragma once

#include "common/abi/op.h"

namespace apex_te {

constexpr int64_t kColumnwiseMultiple = 16;

// Checks that a columnwise copy is a dense [cols, rows] or [cols, rows rounded up to 16], and
// returns its row length. The op writes zeros to the columns from `rows` on.
inline int64_t check_columnwise(const TensorView& columnwise, int64_t cols, int64_t rows) {
  const int64_t padded =
      (rows + kColumnwiseMultiple - 1) / kColumnwiseMultiple * kColumnwiseMultiple;
  const bool is_padded = columnwise.ndim() == 2 && columnwise.size(1) == padded;
  columnwise.has_shape({cols, is_padded ? padded : rows}).is_dense();
  return is_padded ? padded : rows;
}

}  // namespace apex_te
