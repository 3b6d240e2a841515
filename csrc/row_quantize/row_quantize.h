// row_quantize: FP8 with one scale for each row of a matrix, and for each row of its transpose.
//
// Elements are x, or x times the scale of their column. Scales are those of block_quantize for a
// block that is a row (common/numerics/block_rule.h): the largest magnitude of row r gives
// rowwise_scale_inv[r], that of column c columnwise_scale_inv[c]. The columnwise copy may be padded
// (common/numerics/columnwise.h).
#pragma once

#include "common/numerics/block_rule.h"
#include "common/numerics/columnwise.h"

APEX_TE_FUNCTION(row_quantize,
                 "x: T[r c], column_scale: f32[c]?, rowwise: F[r c]!?, "
                 "rowwise_scale_inv: f32[r 1]!?rowwise, columnwise: F[c r~16]!?, "
                 "columnwise_scale_inv: f32[c 1]!?columnwise, eps: float, scales: int")

namespace apex_te {

// Plain data, so kernels take it whole. The scales of a copy that a call does not ask for are null;
// data without elements may be null, too.
struct RowQuantize {
  int64_t rows, cols;
  DType dtype, fp8;
  const void* x;
  const float* column_scale;
  uint8_t *rowwise, *columnwise;
  float *rowwise_scale_inv, *columnwise_scale_inv;
  int64_t ld;  // row length of columnwise
  BlockRule rule;
};

inline float* check_row_scales(Args& args, const TensorView& data, const TensorView& scale_inv,
                               int64_t rows) {
  if (!data != !scale_inv)
    fail(kApexTeValueError, "%s: each of rowwise and columnwise must be given with its scale_inv",
         args.name());
  if (scale_inv) scale_inv.has_dtype({DType::kFloat32}).has_shape({rows, 1}).is_dense();
  return scale_inv.data<float>();
}

inline RowQuantize check_row_quantize(Args& args) {
  RowQuantize p = {};
  const TensorView x = args.tensor();
  x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.rows = x.size(0);
  p.cols = x.size(1);
  p.dtype = x.dtype();
  p.x = x.data<const void>();
  const TensorView column_scale = args.optional_tensor();
  if (column_scale) column_scale.has_dtype({DType::kFloat32}).has_shape({p.cols}).is_dense();
  p.column_scale = column_scale.data<const float>();
  const TensorView rowwise = args.optional_tensor(), rowwise_scale_inv = args.optional_tensor();
  const TensorView columnwise = args.optional_tensor(),
                   columnwise_scale_inv = args.optional_tensor();
  const auto codes = {DType::kE4M3, DType::kE5M2};
  if (rowwise) rowwise.has_dtype(codes).has_shape({p.rows, p.cols}).is_dense();
  p.ld = columnwise ? check_columnwise(columnwise.has_dtype(codes), p.cols, p.rows) : p.rows;
  if (rowwise && columnwise) columnwise.has_dtype({rowwise.dtype()});
  if (!rowwise && !columnwise)
    fail(kApexTeValueError, "%s: rowwise or columnwise must be given, got None for both",
         args.name());
  p.rowwise_scale_inv = check_row_scales(args, rowwise, rowwise_scale_inv, p.rows);
  p.columnwise_scale_inv = check_row_scales(args, columnwise, columnwise_scale_inv, p.cols);
  p.rowwise = rowwise.data<uint8_t>();
  p.columnwise = columnwise.data<uint8_t>();
  p.fp8 = rowwise ? rowwise.dtype() : columnwise.dtype();
  p.rule = check_block_rule(args, p.fp8, p.dtype);
  return p;
}

}  // namespace apex_te
