// byte_transpose: the transposed copy of a matrix of bytes, which are codes of any 8-bit format.
#pragma once

#include "common/abi/op.h"

APEX_TE_FUNCTION(byte_transpose, "fp8_data: Tensor, out: Tensor!")

namespace apex_te {

struct ByteTranspose {
  int64_t rows, cols;  // of codes
  const uint8_t* codes;
  uint8_t* out;
};

inline ByteTranspose check_byte_transpose(Args& args) {
  const TensorView codes = args.tensor();
  codes.has_dtype({DType::kUInt8}).has_ndim(2).is_dense();
  const ByteTranspose p{codes.size(0), codes.size(1), codes.data<const uint8_t>(), nullptr};
  const TensorView out = args.tensor();
  out.has_dtype({DType::kUInt8}).has_shape({p.cols, p.rows}).is_dense();
  return {p.rows, p.cols, p.codes, out.data<uint8_t>()};
}

}  // namespace apex_te
