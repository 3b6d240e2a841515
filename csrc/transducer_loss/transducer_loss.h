// transducer_loss: minus the log of the probability that a transducer gives to a sample's labels,
// summed over all alignments, and its gradient.
//
// With the log-probabilities x(t, u) of the cells of T frames and U = y_len + 1 places:
//   alpha(0, 0) = 0
//   alpha(t, u) = lse(alpha(t - 1, u) + x(t - 1, u, blank), alpha(t, u - 1) + x(t, u - 1, label u))
//   beta(t, u)  = lse(beta(t + 1, u) + x(t, u, blank), beta(t, u + 1) + x(t, u, label u + 1))
// where beta behind the last cell is 0, and loss = -beta(0, 0). With c = dloss exp(alpha(t, u) -
// beta(0, 0)), dx is -c exp(x + beta) of the next cell at blank and at the label, and fused with
// log_softmax also c exp(x_v + beta(t, u)) for every v. Sums have a fixed order. Those along an
// alignment are in double, as alpha and beta are hundreds where their sums are near 0; exponentials
// and logarithms, of differences, are in fp32.
#pragma once

#include <cmath>

#include "common/numerics/transducer.h"

// x: [rows, V]; rows of cells, packed where batch_offset (int64 [B]) is given. log_sums: for an x
// of logits the logsumexp of its rows that count, float32 [rows]; None for log-probabilities.
// label: int32 [B, U - 1]; f_len, y_len: int32 [B]. alpha, beta: float32 [B, T, U], not written
// behind the lengths. rest: what rounding them to float32 has lost, float32 [2, B, T, U], or None.
// loss: [B] of x's dtype. workspace: float32 [B, T + U, U, 2].
APEX_TE_FUNCTION(
    transducer_loss_fwd,
    "x: Tensor, log_sums: Tensor!?, label: Tensor, f_len: Tensor, y_len: Tensor, "
    "batch_offset: Tensor?, alpha: Tensor!, beta: Tensor!, rest: Tensor!?, loss: Tensor!, "
    "workspace: Tensor!, blank: int")
// grad: [B] of x's dtype. dx: like x. workspace: float32 [rows, 5].
APEX_TE_FUNCTION(
    transducer_loss_bwd,
    "x: Tensor, log_sums: Tensor?, label: Tensor, f_len: Tensor, y_len: Tensor, "
    "batch_offset: Tensor?, alpha: Tensor, beta: Tensor, rest: Tensor?, grad: Tensor, dx: Tensor!, "
    "workspace: Tensor!, blank: int, fuse_softmax: bool")

namespace apex_te {

constexpr double kImpossible = -HUGE_VAL;  // the log of 0

// What an element's gradient needs of its row: factor exp(x + shift), and what is added at blank
// and at the label.
struct RowGradient {
  float shift, factor, at_blank, at_label;
  int32_t label;
};

struct TransducerLoss {
  DType dtype;
  TransducerCells cells;
  int64_t cols, blank;
  const void *x, *grad;
  void *loss, *dx;
  float* log_sums;
  const int32_t* label;
  float *alpha, *beta, *rest, *workspace;
  bool fuse_softmax;

  APEX_TE_HD int64_t at(int64_t b, int64_t t, int64_t u) const {
    return (b * cells.frames + t) * cells.places + u;
  }
  APEX_TE_HD int64_t numel() const { return cells.batch * cells.frames * cells.places; }
  APEX_TE_HD double get(bool is_beta, int64_t at) const {
    const double high = is_beta ? beta[at] : alpha[at];
    return rest ? high + rest[(is_beta ? numel() : 0) + at] : high;
  }
  APEX_TE_HD void put(bool is_beta, int64_t at, double value) const {
    const float high = static_cast<float>(value);
    (is_beta ? beta : alpha)[at] = high;
    if (rest)
      rest[(is_beta ? numel() : 0) + at] =
          fabs(value) < HUGE_VAL ? static_cast<float>(value - high) : 0.0f;
  }
  // The place of a cell's two log-probabilities: those of a diagonal t + u lie together.
  APEX_TE_HD int64_t pair_at(int64_t b, int64_t t, int64_t u) const {
    return ((b * (cells.frames + cells.places) + t + u) * cells.places + u) * 2;
  }
  // The label behind place u of a sample; -1 for none.
  APEX_TE_HD int64_t label_of(int64_t b, int64_t u) const {
    return u + 1 < cells.places_of(b) ? label[b * (cells.places - 1) + u] : -1;
  }
  template <typename T>
  APEX_TE_HD float log_prob(int64_t row, int64_t v) const {
    const float value = to_float(static_cast<const T*>(x)[row * cols + v]);
    return log_sums ? value - log_sums[row] : value;
  }
  // That of the label behind a cell: 0 as a probability where there is none, NaN for an invalid
  // one.
  template <typename T>
  APEX_TE_HD float label_log_prob(int64_t row, int64_t b, int64_t u) const {
    if (u + 1 >= cells.places_of(b)) return -HUGE_VALF;
    const int64_t v = label_of(b, u);
    return v >= 0 && v < cols ? log_prob<T>(row, v) : HUGE_VALF - HUGE_VALF;
  }
};

APEX_TE_HD double log_add(double a, double b) {
  const double high = a < b ? b : a;
  if (high == kImpossible) return a + b;  // also where one is NaN
  return high + log1pf(expf(-static_cast<float>(fabs(a - b))));
}

template <typename T>
APEX_TE_HD RowGradient row_gradient(const TransducerLoss& p, int64_t row) {
  const TransducerCells::Cell cell = p.cells.cell_of(row);
  RowGradient made = {-HUGE_VALF, 0.0f, 0.0f, 0.0f, -1};
  if (!cell.counts) return made;
  const int64_t frames = p.cells.frames_of(cell.b), places = p.cells.places_of(cell.b);
  const int64_t at = p.at(cell.b, cell.t, cell.u);
  const double reached = p.get(false, at) - p.get(true, p.at(cell.b, 0, 0));
  made.factor = to_float(static_cast<const T*>(p.grad)[cell.b]);
  made.shift =
      static_cast<float>(reached + p.get(true, at) - (p.log_sums ? p.log_sums[row] : 0.0f));
  const bool is_last_place = cell.u + 1 == places;
  if (cell.t + 1 < frames || is_last_place) {
    const double next = cell.t + 1 < frames ? p.get(true, at + p.cells.places) : 0.0;
    made.at_blank =
        -made.factor * expf(static_cast<float>(reached + p.log_prob<T>(row, p.blank) + next));
  }
  if (is_last_place) return made;
  made.label = static_cast<int32_t>(p.label_of(cell.b, cell.u));
  const double by_label = p.label_log_prob<T>(row, cell.b, cell.u) + p.get(true, at + 1);
  made.at_label = -made.factor * expf(static_cast<float>(reached + by_label));
  return made;
}

// What both functions begin with, but for the extents of alpha.
inline TransducerLoss read_samples(Args& args, TensorView* views) {
  for (int i = 0; i < 6; ++i) views[i] = i == 1 || i == 5 ? args.optional_tensor() : args.tensor();
  TransducerLoss p = {};
  views[0].has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.dtype = views[0].dtype();
  p.cells.rows = views[0].size(0);
  p.cols = views[0].size(1);
  p.x = views[0].data();
  if (views[1]) views[1].has_dtype({DType::kFloat32}).has_shape({p.cells.rows}).is_dense();
  p.log_sums = views[1].data<float>();
  return p;
}

// alpha, beta and their rest, in this order.
inline void check_samples(Args& args, const TensorView* views, TransducerLoss& p) {
  const TensorView alpha = args.tensor(), beta = args.tensor(), rest = args.optional_tensor();
  alpha.has_dtype({DType::kFloat32}).has_ndim(3).is_dense();
  p.cells.batch = alpha.size(0);
  p.cells.frames = alpha.size(1);
  p.cells.places = alpha.size(2);
  p.cells.more = 1;
  if (p.cells.places < 1) alpha.refuse(kApexTeValueError, "have at least 1 place", "none");
  beta.has_dtype({DType::kFloat32});
  beta.has_shape({p.cells.batch, p.cells.frames, p.cells.places}).is_dense();
  if (rest) {
    rest.has_dtype({DType::kFloat32});
    rest.has_shape({2, p.cells.batch, p.cells.frames, p.cells.places}).is_dense();
  }
  views[2].has_dtype({DType::kInt32}).has_shape({p.cells.batch, p.cells.places - 1}).is_dense();
  p.cells = check_cells(views[3], views[4], views[5], p.cells);
  if (!p.cells.offset)
    views[0].has_shape({p.cells.batch * p.cells.frames * p.cells.places, p.cols});
  p.label = views[2].data<int32_t>();
  p.alpha = alpha.data<float>();
  p.beta = beta.data<float>();
  p.rest = rest.data<float>();
}

inline void read_blank(Args& args, TransducerLoss& p) {
  const int64_t blank = p.blank = args.integer();
  if (blank < 0 || blank >= p.cols)
    fail(kApexTeValueError, "%s: blank must be in [0, %lld), got %lld", args.name(),
         static_cast<long long>(p.cols), static_cast<long long>(blank));
}

inline TransducerLoss check_transducer_loss_fwd(Args& args) {
  TensorView views[6];
  TransducerLoss p = read_samples(args, views);
  check_samples(args, views, p);
  const TensorView loss = args.tensor(), workspace = args.tensor();
  loss.has_dtype({p.dtype}).has_shape({p.cells.batch}).is_dense();
  p.loss = loss.data();
  workspace.has_dtype({DType::kFloat32});
  workspace.has_shape({p.cells.batch, p.cells.frames + p.cells.places, p.cells.places, 2});
  p.workspace = workspace.is_dense().data<float>();
  read_blank(args, p);
  return p;
}

inline TransducerLoss check_transducer_loss_bwd(Args& args) {
  TensorView views[6];
  TransducerLoss p = read_samples(args, views);
  check_samples(args, views, p);
  const TensorView grad = args.tensor(), dx = args.tensor(), workspace = args.tensor();
  grad.has_dtype({p.dtype}).has_shape({p.cells.batch}).is_dense();
  dx.has_dtype({p.dtype}).has_shape({p.cells.rows, p.cols}).is_dense();
  workspace.has_dtype({DType::kFloat32}).has_shape({p.cells.rows, 5}).is_dense();
  p.grad = grad.data();
  p.dx = dx.data();
  p.workspace = workspace.data<float>();
  read_blank(args, p);
  p.fuse_softmax = args.boolean();
  return p;
}

}  // namespace apex_te
