// Arguments of the ops activation and bias_gelu: y = f(x + bias), dx = dy f'(x + bias), in the
// input's dtype or straight to FP8.
//
// FP8: q = satcast_rne(result * scale) from the fp32 result; amax becomes max(amax, max |result|)
// with NaN above infinity, scale_inv 1 / scale. The columnwise copy may be padded with zeros
// (common/numerics/columnwise.h). dbias is the column sums of the fp32 dx, added in an order that
// the shape fixes.
#pragma once

#include "common/abi/op.h"
#include "common/activation/functions.h"
#include "common/numerics/columnwise.h"

namespace apex_te {

// Rows that one line of the workspace of dbias sums.
constexpr int64_t kActivationTileRows = 64;

// Checked arguments; what a call does not have is null. Plain data, so kernels take it whole.
struct ActivationOp {
  Activation kind;
  DType dtype;         // of x, dy, bias, out and dbias
  int64_t rows, cols;  // cols is x's last extent
  const void *x, *dy, *bias;
  void* out;  // y or dx
  void* dbias;
  float* workspace;
  DType fp8;  // kOther without FP8 outputs
  const float* scale;
  uint8_t *rowwise, *columnwise;
  int64_t columnwise_ld;  // length of its rows: `rows` or more
  float *amax, *scale_inv;
};

inline void check_activation_input(Args& args, ActivationOp& p, bool to_fp8, TensorView& x) {
  x = args.tensor();
  x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  if (to_fp8) x.has_ndim(2);
  x.is_dense();
  p.dtype = x.dtype();
  p.x = x.data<void>();
  p.rows = 1;
  for (int i = 0; i + 1 < x.ndim(); ++i) p.rows *= x.size(i);
  p.cols = x.ndim() ? x.size(x.ndim() - 1) : 1;
}

// A tensor of x's dtype and shape.
inline void* check_like(const TensorView& t, const TensorView& x) {
  t.has_dtype({x.dtype()});
  bool same = t.ndim() == x.ndim();
  for (int i = 0; same && i < x.ndim(); ++i) same = t.size(i) == x.size(i);
  if (!same) {
    int64_t extents[2][8];
    char expected[128] = "have x's shape ", actual[96];
    for (int i = 0; i < 8; ++i) {
      extents[0][i] = i < x.ndim() ? x.size(i) : 0;
      extents[1][i] = i < t.ndim() ? t.size(i) : 0;
    }
    format_shape(expected + strlen(expected), 96, extents[0], x.ndim() < 8 ? x.ndim() : 8);
    format_shape(actual, sizeof(actual), extents[1], t.ndim() < 8 ? t.ndim() : 8);
    t.refuse(kApexTeValueError, expected, actual);
  }
  return t.is_dense().data<void>();
}

inline void check_activation_fp8(Args& args, ActivationOp& p) {
  p.scale = args.tensor().is_scalar(DType::kFloat32).data<float>();
  const TensorView rowwise = args.optional_tensor();
  const TensorView columnwise = args.optional_tensor();
  p.fp8 = rowwise ? rowwise.dtype() : columnwise ? columnwise.dtype() : DType::kE4M3;
  if (rowwise)
    rowwise.has_dtype({DType::kE4M3, DType::kE5M2}).has_shape({p.rows, p.cols}).is_dense();
  if (columnwise) {
    columnwise.has_dtype({DType::kE4M3, DType::kE5M2});
    p.columnwise_ld = check_columnwise(columnwise, p.cols, p.rows);
  }
  if (rowwise && columnwise) columnwise.has_dtype({p.fp8});
  p.rowwise = rowwise.data<uint8_t>();
  p.columnwise = columnwise.data<uint8_t>();
  const TensorView amax = args.optional_tensor();
  if (amax) amax.is_scalar(DType::kFloat32);
  p.amax = amax.data<float>();
  const TensorView scale_inv = args.optional_tensor();
  if (scale_inv) scale_inv.is_scalar(DType::kFloat32);
  p.scale_inv = scale_inv.data<float>();
}

// Reads, in this order: dy (backward), x, bias (if the op has one), the FP8 outputs or the output
// in x's dtype, dbias and workspace (backward of an op with a bias). The kind is the caller's.
inline ActivationOp check_activation_op(Args& args, bool with_bias, bool is_bwd, bool to_fp8) {
  ActivationOp p = {};
  p.fp8 = DType::kOther;
  TensorView dy, x;
  if (is_bwd) dy = args.tensor();
  check_activation_input(args, p, to_fp8, x);
  if (is_bwd) p.dy = check_like(dy, x);
  if (with_bias) {
    const TensorView bias = args.optional_tensor();
    if (bias) bias.has_dtype({p.dtype}).has_shape({p.cols}).is_dense();
    p.bias = bias.data<void>();
  }
  if (to_fp8)
    check_activation_fp8(args, p);
  else
    p.out = check_like(args.tensor(), x);
  if (with_bias && is_bwd) {
    const TensorView dbias = args.optional_tensor();
    const TensorView workspace = args.optional_tensor();
    if (dbias) {
      p.dbias = dbias.has_dtype({p.dtype}).has_shape({p.cols}).is_dense().data<void>();
      if (!workspace)
        fail(kApexTeValueError, "%s: workspace must be given with dbias, got None", args.name());
      const int64_t lines = (p.rows + kActivationTileRows - 1) / kActivationTileRows;
      workspace.has_dtype({DType::kFloat32}).has_shape({lines, p.cols}).is_dense();
      p.workspace = workspace.data<float>();
    }
  }
  return p;
}

}  // namespace apex_te
