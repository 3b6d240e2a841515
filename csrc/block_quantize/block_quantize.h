// block_quantize: FP8 with one scale for each block of 1 x 128 or 128 x 128 elements, and back.
//
// scale = fp8_max / amax of the block, q = satcast_rne(float(x) * scale); scale_inv = 1 / scale,
// infinite where the amax is, is what is stored. The columnwise copy is the quantization of x
// transposed: with 1 x 128 blocks it has its own scales, over 128 rows of x; with 128 x 128 blocks
// it is the rowwise copy transposed. Scales lie as common/numerics/block_scale.h has it; a block
// beyond the matrix counts as one of zeros: its scale_inv is 1.
//
// The columnwise copy may be padded (common/numerics/columnwise.h). The rowwise copy of 1 x 128
// blocks may have as many rows as its scales, a multiple of 4, of which those beyond the matrix
// become zeros: cuBLASLt multiplies that many.
#pragma once

#include "common/numerics/block_scale.h"
#include "common/numerics/columnwise.h"
#include "common/numerics/scaling.h"

APEX_TE_FUNCTION(block_quantize,
                 "x: Tensor, rowwise: Tensor!?, rowwise_scale_inv: Tensor!?, columnwise: Tensor!?, "
                 "columnwise_scale_inv: Tensor!?, amax: Tensor!?, block_rows: int, eps: float, "
                 "pow2: bool")
APEX_TE_FUNCTION(block_dequantize,
                 "fp8_data: Tensor, scale_inv: Tensor, out: Tensor!, block_rows: int")

namespace apex_te {

// An infinite scale becomes the largest finite value of x's dtype; bits of a float.
constexpr uint32_t kLargestHalfBits = 0x477FE000u;
constexpr uint32_t kLargestBFloat16Bits = 0x7F7F0000u;

struct BlockQuantize {
  TensorView x;
  int64_t rows, cols;
  DType fp8;  // kOther when only amax is wanted
  uint8_t *rowwise, *columnwise;
  int64_t rowwise_rows, columnwise_ld;  // rows of rowwise, row length of columnwise
  float *rowwise_scale_inv, *columnwise_scale_inv, *amax;
  int64_t block_rows;
  ScaleRule rule;
};

// Checks the rowwise copy and returns how many rows it has.
inline int64_t check_rowwise(const TensorView& rowwise, int64_t rows, int64_t cols,
                             int64_t block_rows) {
  const bool is_padded =
      block_rows == 1 && rowwise.ndim() == 2 && rowwise.size(0) == padded_to_4(rows);
  if (is_padded) rows = padded_to_4(rows);
  rowwise.has_shape({rows, cols}).is_dense();
  return rows;
}

inline BlockQuantize check_block_quantize(Args& args) {
  BlockQuantize p;
  p.x = args.tensor();
  p.x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.rows = p.x.size(0);
  p.cols = p.x.size(1);
  const TensorView rowwise = args.optional_tensor();
  const TensorView rowwise_scales = args.optional_tensor();
  const TensorView columnwise = args.optional_tensor();
  const TensorView transposed_scales = args.optional_tensor();
  const TensorView amax = args.optional_tensor();
  p.block_rows = check_block_rows(args);
  p.fp8 = rowwise ? rowwise.dtype() : columnwise ? columnwise.dtype() : DType::kOther;
  p.rule = check_scale_rule(args, p.fp8 == DType::kE5M2 ? E5M2::kMax : E4M3::kMax);
  if (p.x.dtype() != DType::kFloat32)
    p.rule.largest_bits = p.x.dtype() == DType::kFloat16 ? kLargestHalfBits : kLargestBFloat16Bits;
  if (!rowwise != !rowwise_scales || !columnwise != !transposed_scales)
    fail(kApexTeValueError, "%s: each of rowwise and columnwise must be given with its scale_inv",
         args.name());
  p.rowwise_rows = p.columnwise_ld = p.rows;
  if (rowwise) {
    rowwise.has_dtype({DType::kE4M3, DType::kE5M2});
    p.rowwise_rows = check_rowwise(rowwise, p.rows, p.cols, p.block_rows);
    check_block_scales(rowwise_scales, p.rows, p.cols, p.block_rows);
  }
  if (columnwise) {
    columnwise.has_dtype({DType::kE4M3, DType::kE5M2});
    p.columnwise_ld = check_columnwise(columnwise, p.cols, p.rows);
    check_block_scales(transposed_scales, p.cols, p.rows, p.block_rows);
  }
  if (rowwise && columnwise) columnwise.has_dtype({p.fp8});
  if (amax) amax.is_scalar(DType::kFloat32);
  p.rowwise = rowwise.data<uint8_t>();
  p.columnwise = columnwise.data<uint8_t>();
  p.rowwise_scale_inv = rowwise_scales.data<float>();
  p.columnwise_scale_inv = transposed_scales.data<float>();
  p.amax = amax.data<float>();
  return p;
}

struct BlockDequantize {
  TensorView codes, out;
  const float* scale_inv;
  int64_t rows, cols, block_rows;
};

inline BlockDequantize check_block_dequantize(Args& args) {
  BlockDequantize p;
  p.codes = args.tensor();
  p.codes.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(2).is_dense();
  p.rows = p.codes.size(0);
  p.cols = p.codes.size(1);
  const TensorView scales = args.tensor();
  p.out = args.tensor();
  p.block_rows = check_block_rows(args);
  check_block_scales(scales, p.rows, p.cols, p.block_rows);
  p.scale_inv = scales.data<float>();
  p.out.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .has_shape({p.rows, p.cols})
      .is_dense();
  return p;
}

}  // namespace apex_te
