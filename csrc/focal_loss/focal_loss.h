// focal_loss: sigmoid focal loss of rows of logits, summed over all, and its gradient.
//
// With y = x for the background and -x for the target's class, p = sigmoid(y), s half the label
// smoothing and w = 1 - alpha or alpha:
//   ce = softplus(y) - s y,  loss = sum(w p^gamma ce) / num_positives
//   d/dy = w p^gamma (gamma (1 - p) ce + p - s)
// A row whose target is -2 is ignored; with another target outside the classes a row has only
// background. Columns from num_classes on are padding. Both have gradient 0.
#pragma once

#include <cmath>

#include "common/abi/op.h"
#include "common/activation/functions.h"

// An element of the workspace is the sum of 8192 elements' losses; these are added in order.
constexpr int64_t kFocalTile = 8192;
constexpr int64_t kFocalIgnored = -2;
// grad: that of the sum, before the division by num_positives.
APEX_TE_FUNCTION(focal_loss_fwd,
                 "logits: T[r c], target: i64[r], num_positives: f32[1], loss: f32[+ 1]!, "
                 "grad: T[r c]!?, workspace: f32[focal_tiles(r c)]!, num_classes: int, "
                 "alpha: float, gamma: float, label_smoothing: float")
// grad: that of the loss, times grad_output; an element is rounded once.
APEX_TE_FUNCTION(focal_loss_bwd,
                 "logits: T[r c], target: i64[r], num_positives: f32[1], grad_output: f32[1], "
                 "grad: T[r c]!, num_classes: int, alpha: float, gamma: float, "
                 "label_smoothing: float")
APEX_TE_IN_PLACE(focal_loss_bwd, "grad: logits")
// grad *= grad_output / num_positives, for a grad of fwd.
APEX_TE_FUNCTION(focal_loss_scale, "grad: T[r c]!!, grad_output: f32[1], num_positives: f32[1]")

namespace apex_te {

struct FocalLoss {
  DType dtype;
  int64_t rows, cols, num_classes;
  const void* logits;
  const int64_t* target;
  const float *num_positives, *grad_output;
  float *loss, *workspace;
  void* grad;
  float alpha, gamma, smoothing;  // smoothing: half of the argument

  // Of the gradient; forward has no grad_output.
  APEX_TE_HD float factor() const { return grad_output ? *grad_output / *num_positives : 1.0f; }
  APEX_TE_HD int64_t numel() const { return rows * cols; }
  APEX_TE_HD int64_t tiles() const { return (numel() + kFocalTile - 1) / kFocalTile; }
};

inline FocalLoss read_matrix(const TensorView& matrix) {
  FocalLoss p = {};
  matrix.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.dtype = matrix.dtype();
  p.rows = matrix.size(0);
  p.cols = matrix.size(1);
  return p;
}

// The logits, targets and count, with which both directions begin.
inline FocalLoss read_rows(Args& args) {
  const TensorView logits = args.tensor(), target = args.tensor();
  FocalLoss p = read_matrix(logits);
  target.has_dtype({DType::kInt64}).has_shape({p.rows}).is_dense();
  p.logits = logits.data();
  p.target = target.data<int64_t>();
  p.num_positives = args.tensor().is_scalar(DType::kFloat32).data<float>();
  return p;
}

inline void* read_grad(const TensorView& grad, const FocalLoss& p) {
  if (grad) grad.has_dtype({p.dtype}).has_shape({p.rows, p.cols}).is_dense();
  return grad.data();
}

// The numbers with which both directions end.
inline void read_options(Args& args, FocalLoss& p) {
  p.num_classes = args.integer();
  if (p.num_classes < 0 || p.num_classes > p.cols)
    fail(kApexTeValueError, "%s: num_classes must be from 0 to %lld, got %lld", args.name(),
         static_cast<long long>(p.cols), static_cast<long long>(p.num_classes));
  p.alpha = static_cast<float>(args.floating());
  p.gamma = static_cast<float>(args.floating());
  if (!(p.gamma >= 0.0f && p.gamma < HUGE_VALF))
    fail(kApexTeValueError, "%s: gamma must be at least 0 and finite, got %g", args.name(),
         p.gamma);
  const double smoothing = args.floating();
  if (!(smoothing >= 0.0 && smoothing <= 1.0))
    fail(kApexTeValueError, "%s: label_smoothing must be in [0, 1], got %g", args.name(),
         smoothing);
  p.smoothing = static_cast<float>(smoothing / 2);
}

inline FocalLoss check_focal_loss_fwd(Args& args) {
  FocalLoss p = read_rows(args);
  p.loss = args.tensor().is_scalar(DType::kFloat32).data<float>();
  p.grad = read_grad(args.optional_tensor(), p);
  const TensorView workspace = args.tensor();
  workspace.has_dtype({DType::kFloat32}).has_shape({p.tiles()}).is_dense();
  p.workspace = workspace.data<float>();
  read_options(args, p);
  return p;
}

inline FocalLoss check_focal_loss_bwd(Args& args) {
  FocalLoss p = read_rows(args);
  p.grad_output = args.tensor().is_scalar(DType::kFloat32).data<float>();
  p.grad = read_grad(args.tensor(), p);
  read_options(args, p);
  return p;
}

inline FocalLoss check_focal_loss_scale(Args& args) {
  const TensorView grad = args.tensor();
  FocalLoss p = read_matrix(grad);
  p.grad = grad.data();
  p.grad_output = args.tensor().is_scalar(DType::kFloat32).data<float>();
  p.num_positives = args.tensor().is_scalar(DType::kFloat32).data<float>();
  return p;
}

// log(1 + e) for e from 0 to 1, within 1.5 ulp: a fit to log(1 + e) / e.
APEX_TE_HD float log1p_fast(float e) {
  float q = -0.00325637846f;
  q = mul_add(q, e, 0.0199071616f);
  q = mul_add(q, e, -0.0570642017f);
  q = mul_add(q, e, 0.106142648f);
  q = mul_add(q, e, -0.153118625f);
  q = mul_add(q, e, 0.196781173f);
  q = mul_add(q, e, -0.249545589f);
  q = mul_add(q, e, 0.333300054f);
  q = mul_add(q, e, -0.499999046f);
  return mul_add(e * e, q, e);
}

// Of an element: its loss is w power ce, and d/dy is w power slope.
struct FocalTerm {
  float power, ce, slope;
};

// Math has exp(z) for z <= 0; inverse(1 + e) and add_log1p(e, b), b + log(1 + e), for e from 0 to
// 1; and power(gamma, p, -log(p)), p^gamma.
template <typename Math>
APEX_TE_HD FocalTerm focal_term(float y, float gamma, float smoothing) {
  const float e = Math::exp(-fabsf(y));
  const float larger = Math::inverse(1.0f + e), smaller = e * larger;  // of sigmoid(y), sigmoid(-y)
  const float p = y >= 0.0f ? larger : smaller, rest = y >= 0.0f ? smaller : larger;
  const float above = y > 0.0f ? y : 0.0f;
  const float ce = Math::add_log1p(e, mul_add(-smoothing, y, above));
  // -log(p) = softplus(-y)
  const float power = Math::power(gamma, p, Math::add_log1p(e, above - y));
  return {power, ce, mul_add(gamma * rest, ce, p - smoothing)};
}

}  // namespace apex_te
