// byte_transpose: the transposed copy of a matrix of bytes, which are codes of any 8-bit format.
// byte_transpose_stack: that of each matrix of a stack.
#pragma once

#include "common/numerics/columnwise.h"

APEX_TE_FUNCTION(byte_transpose, "fp8_data: u8[r c], out: u8[c r~16]!")
APEX_TE_FUNCTION(byte_transpose_stack, "fp8_data: u8[g r c], out: u8[g c r]!")

namespace apex_te {

struct ByteTranspose {
  int64_t rows, cols;  // of codes
  const uint8_t* codes;
  uint8_t* out;
  int64_t ld;         // row length of out, which may be padded
  int64_t count = 1;  // of matrices
};

inline ByteTranspose check_byte_transpose(Args& args) {
  const TensorView codes = args.tensor();
  codes.has_dtype({DType::kUInt8}).has_ndim(2).is_dense();
  const ByteTranspose p{codes.size(0), codes.size(1), codes.data<const uint8_t>(), nullptr, 0};
  const TensorView out = args.tensor();
  const int64_t ld = check_columnwise(out.has_dtype({DType::kUInt8}), p.cols, p.rows);
  return {p.rows, p.cols, p.codes, out.data<uint8_t>(), ld};
}

inline ByteTranspose check_byte_transpose_stack(Args& args) {
  const TensorView codes = args.tensor();
  codes.has_dtype({DType::kUInt8}).has_ndim(3).is_dense();
  const int64_t count = codes.size(0), rows = codes.size(1), cols = codes.size(2);
  const TensorView out = args.tensor();
  out.has_dtype({DType::kUInt8}).has_shape({count, cols, rows}).is_dense();
  return {rows, cols, codes.data<const uint8_t>(), out.data<uint8_t>(), rows, count};
}

}  // namespace apex_te
