// moe_router: scores of each token's experts, the choice of the top_k best, and the gradient.
//
// With x the logits of a token in float32, in which everything is computed:
//   scores s:  softmax     x for the choice; probs are the softmax over the chosen
//              pre-softmax softmax(x) over all experts; probs are the chosen of them
//              sigmoid     1 / (1 + exp(-x)); probs are the chosen divided by their sum if top_k >
//              1 sqrtsoftplus sqrt(log(1 + exp(x))); probs as of sigmoid
//   choice:    by s + expert_bias, the largest first, of equal ones the smaller expert; a NaN is
//   the
//              largest of all. With groups only experts of the group_topk groups with the largest
//              sums of their top_k / group_topk best are chosen from.
//   probs:     times scaling_factor
// Both devices add in one order, that of a warp whose lanes have as many consecutive experts each
// (experts_per_lane), and use the same functions: all results but lse have the same bits.
#pragma once

#include <cmath>

#include "common/abi/op.h"
#include "common/numerics/codec.h"
#include "common/numerics/exp.h"
#include "common/numerics/with_dtype.h"

// index: the chosen experts. dense_probs: probs at their experts, else 0. scores: of all experts,
// softmax(x), or s over its sum. lse: log(sum(exp(x))), NaN where the largest x is infinite.
// counts: tokens of each expert in each of g sequences, of r / g consecutive rows or, with
// sequence_first, of every g-th row. score_function: a Score. group_topk: 0 without groups.
APEX_TE_FUNCTION(moe_router_fwd,
                 "logits: T[r c], expert_bias: f32[c]?, index: i32[r k]!, probs: f32[r k]!?, "
                 "dense_probs: T[r c]!?, routing_map: bool[r c]!?, scores: f32[r c]!?, "
                 "lse: f32[r]!?, counts: i32[g c]!?, score_function: int, num_groups: int, "
                 "group_topk: int, scaling_factor: float, sequence_first: bool; whole c k")
// Gradients with respect to the outputs that are given. grad_scores may be [1, c], for all rows.
APEX_TE_FUNCTION(
    moe_router_bwd,
    "logits: T[r c], index: i32[r k], grad_probs: f32[r k]?, grad_dense_probs: T[r c]?, "
    "grad_scores: f32[r c]?, grad_lse: f32[r]?, grad_logits: T[r c]!, "
    "score_function: int, scaling_factor: float; whole c k")

namespace apex_te {

constexpr int kMaxExperts = 1024;
constexpr float kSmallest = 1e-20f;  // added to sums, which are divided by

enum class Score : int { kSoftmax, kPreSoftmax, kSigmoid, kSqrtSoftplus };
APEX_TE_HD bool is_softmax(Score score) { return score <= Score::kPreSoftmax; }

APEX_TE_HD float sigmoid_of(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

// log(1 + exp(x)) = max(x, 0) + log(1 + t) with t = exp(-|x|), and log(1 + t) = 2 atanh(z) with
// z = t / (2 + t) <= 1 / 3, whose series ends below half an ulp.
APEX_TE_HD float softplus_of(float x) {
  const float t = exp_fast(-fabsf(x));
  const float z = t / (2.0f + t), w = z * z;
  float series = 1.0f / 15;
  series = series * w + 1.0f / 13;
  series = series * w + 1.0f / 11;
  series = series * w + 1.0f / 9;
  series = series * w + 1.0f / 7;
  series = series * w + 1.0f / 5;
  series = series * w + 1.0f / 3;
  return (x > 0.0f ? x : 0.0f) + 2.0f * (z + z * w * series);
}

// A score that an expert has by itself, and its derivative.
APEX_TE_HD float score_of(Score score, float x) {
  return score == Score::kSigmoid ? sigmoid_of(x) : sqrtf(softplus_of(x));
}
APEX_TE_HD float slope_of(Score score, float x, float s) {
  if (score == Score::kSigmoid) return s * (1.0f - s);
  return s == 0.0f ? 0.0f : sigmoid_of(x) / (2.0f * s);
}

// An integer that orders like a float, -0 like 0 and NaN above infinity; never 0, which stands for
// an expert that cannot be chosen.
APEX_TE_HD uint32_t key_of(float value) {
  const uint32_t bits = float_bits(value + 0.0f);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0xFFFFFFFFu;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
APEX_TE_HD float value_of(uint32_t key) {
  return bits_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);  // that of NaN is a NaN
}

APEX_TE_HD int experts_per_lane(int experts) {
  int each = 1;
  while (32 * each < experts) each *= 2;
  return each;
}

// Checked arguments of both directions; what a call does not have is null or 0.
struct Router {
  DType dtype;
  int64_t rows;
  int experts, top_k;
  Score score;
  float scaling_factor;
  const void* logits;
  int32_t* index;
  // forward
  const float* expert_bias;
  float *probs, *scores, *lse;
  void* dense_probs;
  uint8_t* routing_map;
  int32_t* counts;
  int64_t sequences;
  bool sequence_first;
  int num_groups, group_size, group_topk, group_best;
  // backward
  const float *grad_probs, *grad_scores, *grad_lse;
  const void* grad_dense_probs;
  bool one_grad_scores;
  void* grad_logits;

  APEX_TE_HD int32_t* counts_of(int64_t row) const {
    return counts + (sequence_first ? row % sequences : row / (rows / sequences)) * experts;
  }
  APEX_TE_HD const float* grad_scores_of(int64_t row) const {
    return grad_scores + (one_grad_scores ? 0 : row * experts);
  }
  // Whether a softmax over all experts is needed.
  APEX_TE_HD bool has_softmax() const {
    return score == Score::kPreSoftmax || lse || grad_lse ||
           (is_softmax(score) && (scores || grad_scores));
  }
  // What the chosen experts' values are multiplied with, from their sum, for probs before scaling.
  APEX_TE_HD bool is_normalised() const {
    return score == Score::kSoftmax || (score != Score::kPreSoftmax && top_k > 1);
  }
  APEX_TE_HD float factor_of(float sum) const {
    if (!is_normalised()) return 1.0f;
    return 1.0f / (score == Score::kSoftmax ? sum : sum + kSmallest);
  }
};

inline void check_score(Args& args, Router& p) {
  const int64_t score = args.integer();
  if (score < 0 || score > 3)
    fail(kApexTeValueError, "%s: score_function must be from 0 to 3, got %lld", args.name(),
         static_cast<long long>(score));
  p.score = static_cast<Score>(score);
}

inline void check_logits(const TensorView& logits, Router& p) {
  logits.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  if (logits.size(1) > kMaxExperts)
    logits.refuse(kApexTeUnsupported, "have at most 1024 columns", "more");
  p.dtype = logits.dtype();
  p.logits = logits.data();
  p.rows = logits.size(0);
  p.experts = static_cast<int>(logits.size(1));
}

inline void check_index(const TensorView& index, Router& p) {
  index.has_dtype({DType::kInt32}).has_ndim(2);
  index.has_shape({p.rows, index.size(1)}).is_dense();
  if (index.size(1) > p.experts)
    index.refuse(kApexTeValueError, "have at most the columns of logits", "more");
  p.index = index.data<int32_t>();
  p.top_k = static_cast<int>(index.size(1));
}

inline void* check_optional(const TensorView& x, DType dtype,
                            std::initializer_list<int64_t> shape) {
  if (x) x.has_dtype({dtype}).has_shape(shape).is_dense();
  return x.data();
}

inline Router check_moe_router_fwd(Args& args) {
  Router p = {};
  const auto optional = [&](DType dtype, std::initializer_list<int64_t> shape) {
    return check_optional(args.optional_tensor(), dtype, shape);
  };
  check_logits(args.tensor(), p);
  p.expert_bias = static_cast<float*>(optional(DType::kFloat32, {p.experts}));
  check_index(args.tensor(), p);
  p.probs = static_cast<float*>(optional(DType::kFloat32, {p.rows, p.top_k}));
  p.dense_probs = optional(p.dtype, {p.rows, p.experts});
  p.routing_map = static_cast<uint8_t*>(optional(DType::kBool, {p.rows, p.experts}));
  p.scores = static_cast<float*>(optional(DType::kFloat32, {p.rows, p.experts}));
  p.lse = static_cast<float*>(optional(DType::kFloat32, {p.rows}));
  const TensorView counts = args.optional_tensor();
  if (counts) {
    counts.has_dtype({DType::kInt32}).has_ndim(2);
    counts.has_shape({counts.size(0), p.experts}).is_dense();
    p.sequences = counts.size(0);
    if (p.sequences < 1 || p.rows % p.sequences)
      fail(kApexTeValueError, "%s: counts must have rows that divide the %lld of logits, got %lld",
           args.name(), static_cast<long long>(p.rows), static_cast<long long>(p.sequences));
    p.counts = counts.data<int32_t>();
  }
  check_score(args, p);
  const int64_t groups = args.integer(), group_topk = args.integer();
  p.scaling_factor = static_cast<float>(args.floating());
  p.sequence_first = args.boolean();
  if (group_topk == 0) return p;
  if (groups < 1 || groups > kMaxExperts || p.experts % groups || group_topk < 0 ||
      group_topk > groups)
    fail(kApexTeValueError,
         "%s: num_groups must divide %d experts and be at least group_topk, %lld, got %lld",
         args.name(), p.experts, static_cast<long long>(group_topk),
         static_cast<long long>(groups));
  p.num_groups = static_cast<int>(groups);
  p.group_size = p.experts / p.num_groups;
  p.group_topk = static_cast<int>(group_topk);
  if (p.top_k < p.group_topk || p.top_k > p.group_topk * p.group_size)
    fail(kApexTeValueError,
         "%s: index must have from group_topk, %d, columns to the experts in that many groups, "
         "got %d",
         args.name(), p.group_topk, p.top_k);
  p.group_best = p.top_k / p.group_topk;
  return p;
}

inline Router check_moe_router_bwd(Args& args) {
  Router p = {};
  const auto optional = [&](DType dtype, std::initializer_list<int64_t> shape) {
    return check_optional(args.optional_tensor(), dtype, shape);
  };
  check_logits(args.tensor(), p);
  check_index(args.tensor(), p);
  p.grad_probs = static_cast<float*>(optional(DType::kFloat32, {p.rows, p.top_k}));
  p.grad_dense_probs = optional(p.dtype, {p.rows, p.experts});
  const TensorView scores = args.optional_tensor();
  p.one_grad_scores = scores && scores.ndim() == 2 && scores.size(0) == 1;
  p.grad_scores = static_cast<float*>(
      check_optional(scores, DType::kFloat32, {p.one_grad_scores ? 1 : p.rows, p.experts}));
  p.grad_lse = static_cast<float*>(optional(DType::kFloat32, {p.rows}));
  const TensorView grad_logits = args.tensor();
  grad_logits.has_dtype({p.dtype}).has_shape({p.rows, p.experts}).is_dense();
  p.grad_logits = grad_logits.data();
  check_score(args, p);
  p.scaling_factor = static_cast<float>(args.floating());
  return p;
}

}  // namespace apex_te
