// Arguments, checks and scratch of layer_norm and rms_norm, for both devices.
//
// Forward: x' = x + residual (rounded to x's dtype and stored) or x; y = xhat * gamma + bias with
// xhat = (x' - mean) * rstd, gamma = weight or 1 + weight; rms_norm has no mean and no bias. The
// variance is that of centred values. Backward: g = dy * gamma,
// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + d_residual (rms_norm has no mean(g)),
// dweight = sum over rows of dy * xhat, dbias = sum of dy. All arithmetic is fp32.
#pragma once

#include <algorithm>

#include "common/numerics/columnwise.h"
#include "common/numerics/scaling.h"

namespace apex_te {

struct NormParams {  // weight and bias; null where there is none
  const void *weight, *bias;
  bool is_fp32;        // else the dtype of x
  float gamma_offset;  // 1 for zero-centred weights
};

struct NormFwd {
  DType dtype;
  int64_t rows, cols;
  const void *x, *residual;
  NormParams params;
  float eps;
  void *y, *residual_sum;
  float *mean, *rstd;
  bool given;  // mean and rstd are those of an earlier forward, not to be computed
  DType fp8;   // kOther where y is wanted in x's dtype
  const float* scale;
  uint8_t *rowwise, *columnwise;
  int64_t ld;  // row length of columnwise, which may be padded
  float *amax, *scale_inv;
};

struct NormBwd {
  DType dtype;
  int64_t rows, cols;
  const void *dy, *x, *d_residual;
  NormParams params;
  const float *mean, *rstd;
  void *dx, *dweight, *dbias;
  float* workspace;  // [num_lines, cols], twice as wide with a bias gradient
  int64_t num_lines;
};

// Lines of partial sums over rows that backward may use: enough for every multiprocessor of a GPU,
// fewer where lines are long, and fixed by the shape.
inline int64_t norm_bwd_lines(int64_t rows, int64_t cols) {
  const int64_t wanted = std::min<int64_t>(264, (int64_t{1} << 21) / std::max<int64_t>(cols, 1));
  return std::min(rows, std::max<int64_t>(wanted, 16));
}

namespace norm {

inline TensorView x_of(Args& args, int64_t* rows, int64_t* cols) {
  const TensorView x = args.tensor();
  x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  *rows = x.size(0);
  *cols = x.size(1);
  return x;
}

inline TensorView like(const TensorView& t, DType dtype, int64_t rows, int64_t cols) {
  if (t) t.has_dtype({dtype}).has_shape({rows, cols}).is_dense();
  return t;
}

inline TensorView param(const TensorView& t, DType x, const TensorView& other, int64_t cols) {
  if (!t) return t;
  if (other)
    t.has_dtype({other.dtype()});
  else if (x == DType::kFloat32)
    t.has_dtype({x});
  else
    t.has_dtype({x, DType::kFloat32});
  t.has_shape({cols}).is_dense();
  return t;
}

inline float* statistic(Args& args, int64_t rows) {
  return args.tensor().has_dtype({DType::kFloat32}).has_shape({rows}).is_dense().data<float>();
}

inline float* scalar(const TensorView& t) {
  if (t) t.is_scalar(DType::kFloat32);
  return t.data<float>();
}

}  // namespace norm

// x, weight?, [bias?,] residual?, then y or the FP8 arguments, residual_sum?, [mean,] rstd, eps,
// zero_centered_gamma. With `given` there are no residual, residual_sum and eps.
template <bool kLayerNorm>
NormFwd check_norm_fwd(Args& args, bool to_fp8, bool given = false) {
  NormFwd p = {};
  p.given = given;
  const TensorView x = norm::x_of(args, &p.rows, &p.cols);
  p.dtype = x.dtype();
  p.x = x.data();
  const TensorView weight = norm::param(args.optional_tensor(), p.dtype, TensorView(), p.cols);
  TensorView bias;
  if (kLayerNorm) bias = norm::param(args.optional_tensor(), p.dtype, weight, p.cols);
  p.params = {weight.data(), bias.data(), false, 0.0f};
  p.params.is_fp32 = (weight ? weight : bias ? bias : x).dtype() == DType::kFloat32;
  TensorView residual;
  if (!given) residual = norm::like(args.optional_tensor(), p.dtype, p.rows, p.cols);
  p.residual = residual.data();
  p.fp8 = DType::kOther;
  if (to_fp8) {
    p.scale = norm::scalar(args.tensor());
    const TensorView rowwise = args.optional_tensor(), columnwise = args.optional_tensor();
    p.fp8 = rowwise ? rowwise.dtype() : columnwise ? columnwise.dtype() : DType::kE4M3;
    if (rowwise) rowwise.has_dtype({DType::kE4M3, DType::kE5M2});
    if (columnwise) columnwise.has_dtype({DType::kE4M3, DType::kE5M2});
    p.rowwise = norm::like(rowwise, p.fp8, p.rows, p.cols).data<uint8_t>();
    p.ld = columnwise ? check_columnwise(columnwise.has_dtype({p.fp8}), p.cols, p.rows) : p.rows;
    p.columnwise = columnwise.data<uint8_t>();
    p.amax = norm::scalar(args.optional_tensor());
    p.scale_inv = norm::scalar(args.optional_tensor());
  } else {
    p.y = norm::like(args.tensor(), p.dtype, p.rows, p.cols).data();
  }
  TensorView sum;
  if (!given) sum = norm::like(args.optional_tensor(), p.dtype, p.rows, p.cols);
  if (residual && !sum)
    fail(kApexTeValueError, "%s: residual_sum must be given with residual, got None", args.name());
  p.residual_sum = sum.data();
  if (kLayerNorm) p.mean = norm::statistic(args, p.rows);
  p.rstd = norm::statistic(args, p.rows);
  if (!given) p.eps = check_eps(args);
  p.params.gamma_offset = args.boolean() && weight ? 1.0f : 0.0f;
  return p;
}

// dy, x, weight?, [mean,] rstd, d_residual?, dx, dweight?, [dbias?,] workspace?,
// zero_centered_gamma.
template <bool kLayerNorm>
NormBwd check_norm_bwd(Args& args) {
  NormBwd p = {};
  const TensorView dy = norm::x_of(args, &p.rows, &p.cols);
  p.dtype = dy.dtype();
  p.dy = dy.data();
  p.x = norm::like(args.tensor(), p.dtype, p.rows, p.cols).data();
  const TensorView weight = norm::param(args.optional_tensor(), p.dtype, TensorView(), p.cols);
  if (kLayerNorm) p.mean = norm::statistic(args, p.rows);
  p.rstd = norm::statistic(args, p.rows);
  p.d_residual = norm::like(args.optional_tensor(), p.dtype, p.rows, p.cols).data();
  p.dx = norm::like(args.tensor(), p.dtype, p.rows, p.cols).data();
  const TensorView dweight = norm::param(args.optional_tensor(), p.dtype, weight, p.cols);
  TensorView dbias;
  if (kLayerNorm)
    dbias = norm::param(args.optional_tensor(), p.dtype, weight ? weight : dweight, p.cols);
  p.dweight = dweight.data();
  p.dbias = dbias.data();
  const TensorView any = weight ? weight : dweight ? dweight : dbias ? dbias : dy;
  p.params = {weight.data(), nullptr, any.dtype() == DType::kFloat32, 0.0f};
  const TensorView workspace = args.optional_tensor();
  if (dweight || dbias) {
    p.num_lines = norm_bwd_lines(p.rows, p.cols);
    if (!workspace)
      fail(kApexTeValueError, "%s: workspace must be given with dweight or dbias, got None",
           args.name());
    norm::like(workspace, DType::kFloat32, p.num_lines, (kLayerNorm ? 2 : 1) * p.cols);
  }
  p.workspace = workspace.data<float>();
  p.params.gamma_offset = args.boolean() && weight ? 1.0f : 0.0f;
  return p;
}

}  // namespace apex_te
