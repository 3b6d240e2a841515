// byte_transpose: the transposed copy of a matrix of bytes, which are codes of any 8-bit format.
#pragma once

#include "common/numerics/columnwise.h"

APEX_TE_FUNCTION(byte_transpose, "fp8_data: u8[r c], out: u8[c r~16]!")

namespace apex_te {

struct ByteTranspose {
  int64_t rows, cols;  // of codes
  const uint8_t* codes;
  uint8_t* out;
  int64_t ld;  // row length of out, which may be padded
};

inline ByteTranspose check_byte_transpose(Args& args) {
  const TensorView codes = args.tensor();
  codes.has_dtype({DType::kUInt8}).has_ndim(2).is_dense();
  const ByteTranspose p{codes.size(0), codes.size(1), codes.data<const uint8_t>(), nullptr, 0};
  const TensorView out = args.tensor();
  const int64_t ld = check_columnwise(out.has_dtype({DType::kUInt8}), p.cols, p.rows);
  return {p.rows, p.cols, p.codes, out.data<uint8_t>(), ld};
}

}  // namespace apex_te
