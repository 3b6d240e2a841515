// cross_entropy: softmax cross entropy of each row and its gradient, from one read of the logits.
//
// With p = softmax(x), t the target, V columns and e the label smoothing:
//   loss = (1 - e) (lse(x) - x_t) + e (lse(x) - mean(x))
//   grad_j = (p_j - (1 - e) [j == t] - e / V) / num_valid
// A row whose target is ignore_index has loss 0 and gradient 0 and is not read. A target outside
// [0, V) is an error on the CPU; on the GPU it makes the row's loss and gradient NaN.
//
// The gradient is made with the loss (fwd) or later from the logits (bwd), when the factor that the
// incoming gradient brings is known: each element is then rounded once.
#pragma once

#include "common/abi/op.h"
#include "common/numerics/codec.h"

// loss: [rows] float32. grad: the logits' dtype, may be the logits themselves. stats: [rows, 2]
// float32, the largest logit of a row and the sum of exp(x - largest), not written for ignored
// rows. num_valid: one int32, divides the gradient.
APEX_TE_FUNCTION(cross_entropy_fwd,
                 "logits: T[r c], target: i64|i32[r], loss: f32[r]!, grad: T[r c]!?, "
                 "stats: f32[r 2]!?, num_valid: i32[1]?, ignore_index: int, "
                 "label_smoothing: float; whole c")
APEX_TE_IN_PLACE(cross_entropy_fwd, "grad: logits")
// grad = that of fwd times grad_output (float32, one element or one a row), from the logits, which
// it may overwrite, and their stats. made: grad is what fwd made; a grad_output of 1, which must be
// one element, then leaves it as it is.
APEX_TE_FUNCTION(cross_entropy_bwd,
                 "logits: T[r c], target: i64|i32[r], stats: f32[r 2], grad_output: Tensor, "
                 "grad: T[r c]!!, num_valid: i32[1]?, ignore_index: int, label_smoothing: float, "
                 "made: bool; whole c")
APEX_TE_IN_PLACE(cross_entropy_bwd, "grad: logits")
// num_valid = number of targets other than ignore_index.
APEX_TE_FUNCTION(cross_entropy_count, "target: i64|i32[r], num_valid: i32[+ 1]!, ignore_index: int")
// total = sum of the losses in a fixed order, over num_valid where it is given.
APEX_TE_FUNCTION(cross_entropy_sum, "loss: f32[r], num_valid: i32[1]?, total: f32[+ 1]!")
// grad *= grad_output (one element) in place; a factor of 1 touches nothing. What ignored rows give
// is 0 and stays so, also where the factor is infinite or NaN: rows whose target is ignore_index
// and, with a num_valid (one int32 element) of 0, the whole gradient are left as they are.
APEX_TE_FUNCTION(cross_entropy_scale,
                 "grad: T[r c]!!, grad_output: f32[1], target: i64|i32[r]?, num_valid: i32[1]?, "
                 "ignore_index: int")

namespace apex_te {

struct Targets {
  const void* data;
  bool is_64_bit;
  int64_t rows, ignore_index;

  APEX_TE_HD int64_t operator[](int64_t row) const {
    return is_64_bit ? static_cast<const int64_t*>(data)[row]
                     : static_cast<const int32_t*>(data)[row];
  }
};

inline Targets read_targets(Args& args, const TensorView& target) {
  target.has_dtype({DType::kInt64, DType::kInt32}).has_ndim(1).is_dense();
  if (target.size(0) > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "%s: target must have fewer than 2^31 elements, got %lld", args.name(),
         static_cast<long long>(target.size(0)));
  return Targets{target.data<void>(), target.dtype() == DType::kInt64, target.size(0), 0};
}

inline Targets read_targets(Args& args, const TensorView& target, int64_t rows) {
  const Targets targets = read_targets(args, target);
  if (targets.rows != rows)
    fail(kApexTeValueError, "%s: target must have shape [%lld], got [%lld]", args.name(),
         static_cast<long long>(rows), static_cast<long long>(targets.rows));
  return targets;
}

inline const int32_t* read_num_valid(Args& args) {
  const TensorView num_valid = args.optional_tensor();
  if (num_valid) num_valid.is_scalar(DType::kInt32);
  return num_valid.data<int32_t>();
}

struct CrossEntropy {
  TensorView logits;
  int64_t rows, cols;
  Targets target;
  float* loss;
  TensorView grad;
  float* stats;
  const int32_t* num_valid;
  float label_smoothing;
};

// The logits and their targets, with which both directions begin.
inline void read_rows(Args& args, CrossEntropy& p) {
  p.logits = args.tensor();
  p.logits.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.rows = p.logits.size(0);
  p.cols = p.logits.size(1);
  p.target = read_targets(args, args.tensor(), p.rows);
}

inline float* read_stats(const TensorView& stats, int64_t rows) {
  return stats.has_dtype({DType::kFloat32}).has_shape({rows, 2}).is_dense().data<float>();
}

// num_valid, ignore_index and label_smoothing, with which both directions end.
inline void read_options(Args& args, CrossEntropy& p) {
  p.num_valid = read_num_valid(args);
  p.target.ignore_index = args.integer();
  p.label_smoothing = static_cast<float>(args.floating());
  if (!(p.label_smoothing >= 0.0f && p.label_smoothing <= 1.0f))
    fail(kApexTeValueError, "%s: label_smoothing must be in [0, 1], got %g", args.name(),
         p.label_smoothing);
  if (p.rows && (!p.cols || p.cols > 0x7FFFFFFF - 4096))
    fail(kApexTeValueError, "%s: logits must have 1 to 2^31 - 4097 columns, got %lld", args.name(),
         static_cast<long long>(p.cols));
}

inline CrossEntropy check_cross_entropy_fwd(Args& args) {
  CrossEntropy p;
  read_rows(args, p);
  p.loss = args.tensor().has_dtype({DType::kFloat32}).has_shape({p.rows}).is_dense().data<float>();
  p.grad = args.optional_tensor();
  if (p.grad) p.grad.has_dtype({p.logits.dtype()}).has_shape({p.rows, p.cols}).is_dense();
  const TensorView stats = args.optional_tensor();
  p.stats = stats ? read_stats(stats, p.rows) : nullptr;
  read_options(args, p);
  return p;
}

// The factor of each row's gradient.
struct GradOutput {
  const float* data;
  bool per_row, made;

  APEX_TE_HD float operator[](int64_t row) const { return data[per_row ? row : 0]; }
};

struct CrossEntropyBwd : CrossEntropy {
  GradOutput grad_output;
};

inline CrossEntropyBwd check_cross_entropy_bwd(Args& args) {
  CrossEntropyBwd p;
  read_rows(args, p);
  p.loss = nullptr;
  p.stats = read_stats(args.tensor(), p.rows);
  const TensorView factor = args.tensor();
  factor.has_dtype({DType::kFloat32}).is_dense();
  const bool per_row = factor.ndim() == 1 && factor.size(0) == p.rows && p.rows != 1;
  if (!per_row) factor.is_scalar(DType::kFloat32);
  p.grad = args.tensor();
  p.grad.has_dtype({p.logits.dtype()}).has_shape({p.rows, p.cols}).is_dense();
  read_options(args, p);
  p.grad_output = GradOutput{factor.data<float>(), per_row, args.boolean()};
  if (p.grad_output.made && per_row)
    fail(kApexTeValueError, "%s: grad_output must have one element where grad is made, got %lld",
         args.name(), static_cast<long long>(p.rows));
  return p;
}

struct CrossEntropyCount {
  Targets target;
  int32_t* num_valid;
};

inline CrossEntropyCount check_cross_entropy_count(Args& args) {
  CrossEntropyCount p;
  p.target = read_targets(args, args.tensor());
  p.num_valid = args.tensor().is_scalar(DType::kInt32).data<int32_t>();
  p.target.ignore_index = args.integer();
  return p;
}

struct CrossEntropySum {
  const float* loss;
  int64_t rows;
  const int32_t* num_valid;
  float* total;
};

inline CrossEntropySum check_cross_entropy_sum(Args& args) {
  CrossEntropySum p;
  const TensorView loss = args.tensor();
  loss.has_dtype({DType::kFloat32}).has_ndim(1).is_dense();
  p.loss = loss.data<float>();
  p.rows = loss.size(0);
  p.num_valid = read_num_valid(args);
  p.total = args.tensor().is_scalar(DType::kFloat32).data<float>();
  return p;
}

struct CrossEntropyScale {
  void* grad;
  DType dtype;
  int64_t rows, cols;
  const float* grad_output;
  Targets target;  // without data where no rows are ignored
  const int32_t* num_valid;

  // Where the factor leaves the gradient as it is, and one of its rows.
  APEX_TE_HD bool is_kept() const { return *grad_output == 1.0f || (num_valid && !*num_valid); }
  APEX_TE_HD bool is_kept(int64_t row) const {
    return target.data && target[row] == target.ignore_index;
  }
};

inline CrossEntropyScale check_cross_entropy_scale(Args& args) {
  CrossEntropyScale p;
  const TensorView grad = args.tensor();
  grad.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.grad = grad.data<void>();
  p.dtype = grad.dtype();
  p.rows = grad.size(0);
  p.cols = grad.size(1);
  if (p.cols > 0x7FFFFFFF - 4096)
    fail(kApexTeValueError, "%s: grad must have at most 2^31 - 4097 columns, got %lld", args.name(),
         static_cast<long long>(p.cols));
  p.grad_output = args.tensor().is_scalar(DType::kFloat32).data<float>();
  const TensorView target = args.optional_tensor();
  p.target = target ? read_targets(args, target, p.rows) : Targets{};
  p.num_valid = read_num_valid(args);
  p.target.ignore_index = args.integer();
  return p;
}

}  // namespace apex_te
