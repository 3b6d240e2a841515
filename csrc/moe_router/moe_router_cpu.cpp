// CPU kernels of moe_router: rows in chunks; the sums are added as a GPU's warp adds them.
#include <algorithm>
#include <functional>

#include "common/cpu/parallel.h"
#include "common/cpu/rows.h"
#include "common/cpu/scratch.h"
#include "moe_router/moe_router.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kChunkElements = 1 << 14;
constexpr uint32_t kLastKey = 0xFFFFFFFFu;

struct Arrays {
  float x[kMaxExperts], exps[kMaxExperts], scores[kMaxExperts], values[kMaxExperts];
  float grads[kMaxExperts], products[kMaxExperts];
  uint64_t order[kMaxExperts], some[kMaxExperts], groups[kMaxExperts];
  bool is_chosen[kMaxExperts];
};

// What the lanes of a warp have, in the order of a butterfly.
APEX_TE_INLINE float sum_of_lanes(float* lanes) {
  for (int width = 16; width > 0; width /= 2)
    for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  return lanes[0];
}
// Of all experts, each lane with consecutive ones; and of the chosen, which go round the lanes.
APEX_TE_INLINE float sum_experts(const float* values, int n) {
  const int each = experts_per_lane(n);
  float lanes[32] = {};
  for (int lane = 0; lane * each < n; ++lane)
    for (int e = lane * each; e < std::min(n, (lane + 1) * each); ++e) lanes[lane] += values[e];
  return sum_of_lanes(lanes);
}
APEX_TE_INLINE float sum_chosen(const float* values, int n) {
  float lanes[32] = {};
  for (int r = 0; r < n; ++r) lanes[r % 32] += values[r];
  return sum_of_lanes(lanes);
}

// Largest logit; exps and their sum follow.
APEX_TE_INLINE float exp_scores(const float* x, int n, float* exps, float* sum) {
  const float max = max_of(x, n);
  for (int e = 0; e < n; ++e) exps[e] = exp_fast(x[e] - max);
  *sum = sum_experts(exps, n);
  return max;
}

// Integers that order experts by key and then from the first to the last, as an expert's number.
uint64_t entry_of(uint32_t key, int expert) {
  return static_cast<uint64_t>(key) << 32 | (kLastKey - static_cast<uint32_t>(expert));
}
int expert_of(uint64_t entry) { return static_cast<int>(kLastKey - static_cast<uint32_t>(entry)); }

void sort_best(uint64_t* entries, int n, int count) {
  std::partial_sort(entries, entries + count, entries + n, std::greater<uint64_t>());
}

// Leaves entries of the best groups; others are 0.
void limit_groups(const Router& p, Arrays& a) {
  for (int g = 0; g < p.num_groups; ++g) {
    std::copy_n(a.order + g * p.group_size, p.group_size, a.some);
    sort_best(a.some, p.group_size, p.group_best);
    float sum = 0.0f;
    for (int i = 0; i < p.group_best; ++i) sum += value_of(static_cast<uint32_t>(a.some[i] >> 32));
    a.groups[g] = entry_of(key_of(sum), g);
  }
  sort_best(a.groups, p.num_groups, p.group_topk);
  std::fill_n(a.is_chosen, p.num_groups, false);
  for (int i = 0; i < p.group_topk; ++i) a.is_chosen[expert_of(a.groups[i])] = true;
  for (int e = 0; e < p.experts; ++e)
    if (!a.is_chosen[e / p.group_size]) a.order[e] = 0;
}

// Values of the chosen experts, whose sum factor_of takes.
APEX_TE_INLINE void chosen_values(const Router& p, const int32_t* index, const float* x,
                                  const float* scores, float* values) {
  const float largest = p.top_k ? x[index[0]] : 0.0f;
  for (int r = 0; r < p.top_k; ++r)
    values[r] = p.score == Score::kSoftmax ? exp_fast(x[index[r]] - largest) : scores[index[r]];
}

// Scores that experts have by themselves or by the softmax over all, whose exps and sum are given.
APEX_TE_INLINE void score_row(const Router& p, const float* x, const float* exps, float sum,
                              float* scores) {
  const int n = p.experts;
  const float inverse = 1.0f / sum;
  if (p.score == Score::kSoftmax)
    std::copy_n(x, n, scores);
  else if (p.score == Score::kPreSoftmax)
    for (int e = 0; e < n; ++e) scores[e] = exps[e] * inverse;
  else if (p.score == Score::kSigmoid)
    for (int e = 0; e < n; ++e) scores[e] = score_of(Score::kSigmoid, x[e]);
  else
    for (int e = 0; e < n; ++e) scores[e] = score_of(Score::kSqrtSoftplus, x[e]);
}

APEX_TE_INLINE void forward_row(const Router& p, const RowDType& dtype, int64_t row, Arrays& a) {
  const int n = p.experts, k = p.top_k;
  dtype.widen(p.logits, row * n, n, a.x);
  float sum = 0.0f;
  if (p.has_softmax()) {
    const float max = exp_scores(a.x, n, a.exps, &sum);
    if (p.lse) p.lse[row] = max + logf(sum);
  }
  score_row(p, a.x, a.exps, sum, a.scores);
  if (p.scores) {
    float* out = p.scores + row * n;
    const float total = is_softmax(p.score) ? sum : sum_experts(a.scores, n) + kSmallest;
    const float* from = is_softmax(p.score) ? a.exps : a.scores;
    const float inverse = 1.0f / total;
    for (int e = 0; e < n; ++e) out[e] = from[e] * inverse;
  }
  for (int e = 0; e < n; ++e)
    a.order[e] = entry_of(key_of(p.expert_bias ? a.scores[e] + p.expert_bias[e] : a.scores[e]), e);
  if (p.group_topk) limit_groups(p, a);
  sort_best(a.order, n, k);
  int32_t* index = p.index + row * k;
  for (int r = 0; r < k; ++r) index[r] = expert_of(a.order[r]);
  if (p.probs || p.dense_probs) {
    chosen_values(p, index, a.x, a.scores, a.values);
    const float factor = p.factor_of(sum_chosen(a.values, k));
    for (int r = 0; r < k; ++r) a.values[r] = a.values[r] * factor * p.scaling_factor;
  }
  if (p.probs) std::copy_n(a.values, k, p.probs + row * k);
  if (p.dense_probs) {
    std::fill_n(a.products, n, 0.0f);
    for (int r = 0; r < k; ++r) a.products[index[r]] = a.values[r];
    dtype.narrow(a.products, n, p.dense_probs, row * n);
  }
  if (p.routing_map) {
    uint8_t* map = p.routing_map + row * n;
    std::fill_n(map, n, uint8_t{0});
    for (int r = 0; r < k; ++r) map[index[r]] = 1;
  }
}

// Into grads: of the chosen experts' scores or, for the softmax over them, logits; of others 0.
APEX_TE_INLINE void chosen_grads(const Router& p, const RowDType& dtype, int64_t row, Arrays& a) {
  const int n = p.experts, k = p.top_k;
  const int32_t* index = p.index + row * k;
  std::fill_n(a.grads, n, 0.0f);
  if (!p.grad_probs && !p.grad_dense_probs) return;
  float* of_probs = a.exps;
  std::fill_n(of_probs, k, 0.0f);
  if (p.grad_dense_probs) {
    dtype.widen(p.grad_dense_probs, row * n, n, a.products);
    for (int r = 0; r < k; ++r) of_probs[r] = a.products[index[r]];
  }
  if (p.grad_probs)
    for (int r = 0; r < k; ++r) of_probs[r] += p.grad_probs[row * k + r];
  for (int r = 0; r < k; ++r) of_probs[r] *= p.scaling_factor;
  if (p.is_normalised()) {
    chosen_values(p, index, a.x, a.scores, a.values);
    const float factor = p.factor_of(sum_chosen(a.values, k));
    for (int r = 0; r < k; ++r) a.values[r] = a.values[r] * factor;
    for (int r = 0; r < k; ++r) a.products[r] = of_probs[r] * a.values[r];
    const float dot = sum_chosen(a.products, k);
    for (int r = 0; r < k; ++r)
      of_probs[r] = p.score == Score::kSoftmax ? a.values[r] * (of_probs[r] - dot)
                                               : (of_probs[r] - dot) * factor;
  }
  for (int r = 0; r < k; ++r) a.grads[index[r]] = of_probs[r];
}

APEX_TE_INLINE void backward_row(const Router& p, const RowDType& dtype, int64_t row, Arrays& a) {
  const int n = p.experts;
  dtype.widen(p.logits, row * n, n, a.x);
  if (!is_softmax(p.score)) score_row(p, a.x, nullptr, 0.0f, a.scores);
  chosen_grads(p, dtype, row, a);
  const float* of_scores = p.grad_scores ? p.grad_scores_of(row) : nullptr;
  if (!is_softmax(p.score)) {
    if (of_scores) {
      const float inverse = 1.0f / (sum_experts(a.scores, n) + kSmallest);
      for (int e = 0; e < n; ++e) a.products[e] = of_scores[e] * (a.scores[e] * inverse);
      const float dot = sum_experts(a.products, n);
      for (int e = 0; e < n; ++e) a.grads[e] += (of_scores[e] - dot) * inverse;
    }
    if (p.score == Score::kSigmoid)
      for (int e = 0; e < n; ++e) a.grads[e] *= slope_of(Score::kSigmoid, a.x[e], a.scores[e]);
    else
      for (int e = 0; e < n; ++e) a.grads[e] *= slope_of(Score::kSqrtSoftplus, a.x[e], a.scores[e]);
  }
  if (p.has_softmax()) {
    float sum;
    exp_scores(a.x, n, a.exps, &sum);
    const float inverse = 1.0f / sum;
    for (int e = 0; e < n; ++e) a.exps[e] = a.exps[e] * inverse;
    // values: the gradient of the softmax over all experts; grads: of the logits.
    const bool is_pre = p.score == Score::kPreSoftmax, is_of_all = is_pre || is_softmax(p.score);
    for (int e = 0; e < n; ++e) {
      a.values[e] = is_pre ? a.grads[e] : 0.0f;
      if (is_of_all && of_scores) a.values[e] += of_scores[e];
      if (is_pre) a.grads[e] = 0.0f;
      a.products[e] = a.values[e] * a.exps[e];
    }
    const float less = (p.grad_lse ? p.grad_lse[row] : 0.0f) - sum_experts(a.products, n);
    for (int e = 0; e < n; ++e) a.grads[e] += a.exps[e] * (a.values[e] + less);
  }
  dtype.narrow(a.grads, n, p.grad_logits, row * n);
}

APEX_TE_TARGET_PORTABLE void forward_portable(const Router& p, const RowDType& dtype, int64_t row,
                                              Arrays& a) {
  forward_row(p, dtype, row, a);
}
APEX_TE_TARGET_AVX2 void forward_avx2(const Router& p, const RowDType& dtype, int64_t row,
                                      Arrays& a) {
  forward_row(p, dtype, row, a);
}
APEX_TE_TARGET_PORTABLE void backward_portable(const Router& p, const RowDType& dtype, int64_t row,
                                               Arrays& a) {
  backward_row(p, dtype, row, a);
}
APEX_TE_TARGET_AVX2 void backward_avx2(const Router& p, const RowDType& dtype, int64_t row,
                                       Arrays& a) {
  backward_row(p, dtype, row, a);
}

template <typename Run>
void for_rows(const Router& p, const Run& run) {
  const RowDType dtype(p.dtype);
  const int64_t each = std::max<int64_t>(1, kChunkElements / std::max(1, p.experts));
  parallel_for((p.rows + each - 1) / each, [&](int64_t chunk) {
    Arrays& arrays = thread_scratch<Arrays>();
    const int64_t end = std::min(p.rows, (chunk + 1) * each);
    for (int64_t row = chunk * each; row < end; ++row) run(p, dtype, row, arrays);
  });
}

void count_rows(const Router& p) {
  std::fill_n(p.counts, p.sequences * p.experts, 0);
  for (int64_t row = 0; row < p.rows; ++row)
    for (int r = 0; r < p.top_k; ++r) ++p.counts_of(row)[p.index[row * p.top_k + r]];
}

void check_chosen(const Router& p) {
  for (int64_t i = 0; i < p.rows * p.top_k; ++i)
    if (p.index[i] < 0 || p.index[i] >= p.experts)
      fail(kApexTeValueError, "moe_router_bwd: index must hold experts from 0 to %d, got %d",
           p.experts - 1, p.index[i]);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(moe_router_fwd) {
  using namespace apex_te;
  const Router p = check_moe_router_fwd(args);
  for_rows(p, use_avx2() ? forward_avx2 : forward_portable);
  if (p.counts) count_rows(p);
}

APEX_TE_DEFINE(moe_router_bwd) {
  using namespace apex_te;
  const Router p = check_moe_router_bwd(args);
  check_chosen(p);
  for_rows(p, use_avx2() ? backward_avx2 : backward_portable);
}
