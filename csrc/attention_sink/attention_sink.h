// attention_sink: attention from parts of its softmax: with a sink a, a logit of each head beside
// its scores that weighs no value, from attention without it, and the gradient of the sinks; of
// all keys, from attentions to some of them.
//
// With the log-sum-exp l of a query's scores, total = log(exp(l) + exp(a)) and out = values *
// exp(l - total), rounded once. Where l is -Inf, as no key is seen, out is 0 and values are not
// used. dsink = -sum(exp(a - total) * sum(dout * out)) over a head's queries, in fp32.
//
// Of attentions o_i with log-sum-exps l_i to other keys each, total = log(sum exp(l_i)) and out =
// sum o_i * exp(l_i - total), in this order, rounded once. An l_i of -Inf adds nothing.
#pragma once

#include <cmath>

#include "common/abi/op.h"
#include "common/numerics/codec.h"

// values, out and dout may have any strides but 1 for the last dimension. sink: None is 0. An
// element of the workspace is the sum of 64 queries; these are added in order.
constexpr int64_t kAttentionSinkTile = 64;
APEX_TE_FUNCTION(attention_sink_fwd,
                 "values: T[b h s d], lse: f32[b h s], sink: f32[h]?, out: T[b h s d]!, "
                 "total: f32[b h s]!; whole d")
APEX_TE_IN_PLACE(attention_sink_fwd, "out: values")
APEX_TE_FUNCTION(attention_sink_bwd,
                 "dout: T[b h s d], out: T[b h s d], total: f32[b h s], sink: f32[h], "
                 "dsink: f32[+ h]!, workspace: f32[b h s/64]!")
// Those of one or two parts are of the last queries.
APEX_TE_FUNCTION(attention_join,
                 "values: T[b h s d], lse: f32[b h s], part: T[b h n d], part_lse: f32[b h n], "
                 "part2: T[b h m d]?, part2_lse: f32[b h m]?part2, out: T[b h s d]!, "
                 "total: f32[b h s]!; whole d")
APEX_TE_IN_PLACE(attention_join, "out: values")

namespace apex_te {

// Rows of a tensor [b, h, s, d].
struct HeadRows {
  char* data;
  int64_t strides[3];

  APEX_TE_HD int64_t at(int64_t batch, int64_t head, int64_t query) const {
    return batch * strides[0] + head * strides[1] + query * strides[2];
  }
};

struct AttentionSink {
  DType dtype;
  int64_t batch, heads, queries, cols;
  HeadRows in, out;         // of forward values and out, of backward dout and out
  const float *lse, *sink;  // of backward total and sink
  float *total, *dsink, *workspace;

  APEX_TE_HD int64_t tiles() const {
    return (queries + kAttentionSinkTile - 1) / kAttentionSinkTile;
  }
};

constexpr int kJoinedParts = 3;

// An attention to some keys, of the queries from `first` on.
struct AttentionPart {
  HeadRows rows;
  const float* lse;
  int64_t first, queries;

  APEX_TE_HD float lse_of(int64_t line, int64_t query) const {
    return query < first ? -HUGE_VALF : lse[line * queries + query - first];
  }
};

struct AttentionJoin {
  DType dtype;
  int64_t batch, heads, queries, cols;
  int count;
  AttentionPart parts[kJoinedParts];
  HeadRows out;
  float* total;

  APEX_TE_HD int64_t tiles() const {
    return (queries + kAttentionSinkTile - 1) / kAttentionSinkTile;
  }
};

inline HeadRows check_head_rows(const TensorView& t, DType dtype, int64_t batch, int64_t heads,
                                int64_t queries, int64_t cols) {
  t.has_dtype({dtype}).has_shape({batch, heads, queries, cols});
  if (t.numel() > 0 && cols > 1 && t.stride(3) != 1)
    t.refuse(kApexTeValueError, "have contiguous rows", "other strides");
  return {t.data<char>(), {t.stride(0), t.stride(1), t.stride(2)}};
}

// Tensors in the order of both functions: two of rows, with the log-sum-exp and the sinks.
inline AttentionSink check_attention_sink(const TensorView& in, const TensorView& out,
                                          const TensorView& lse, const TensorView& sink) {
  AttentionSink p = {};
  in.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(4);
  p.dtype = in.dtype();
  p.batch = in.size(0);
  p.heads = in.size(1);
  p.queries = in.size(2);
  p.cols = in.size(3);
  p.in = check_head_rows(in, p.dtype, p.batch, p.heads, p.queries, p.cols);
  p.out = check_head_rows(out, p.dtype, p.batch, p.heads, p.queries, p.cols);
  lse.has_dtype({DType::kFloat32}).has_shape({p.batch, p.heads, p.queries}).is_dense();
  if (sink) sink.has_dtype({DType::kFloat32}).has_shape({p.heads}).is_dense();
  p.lse = lse.data<float>();
  p.sink = sink.data<float>();
  return p;
}

inline AttentionSink check_attention_sink_fwd(Args& args) {
  const TensorView values = args.tensor(), lse = args.tensor(), sink = args.optional_tensor();
  const TensorView out = args.tensor(), total = args.tensor();
  AttentionSink p = check_attention_sink(values, out, lse, sink);
  total.has_dtype({DType::kFloat32}).has_shape({p.batch, p.heads, p.queries}).is_dense();
  p.total = total.data<float>();
  return p;
}

inline AttentionSink check_attention_sink_bwd(Args& args) {
  const TensorView dout = args.tensor(), out = args.tensor(), total = args.tensor();
  const TensorView sink = args.tensor(), dsink = args.tensor(), workspace = args.tensor();
  AttentionSink p = check_attention_sink(dout, out, total, sink);
  dsink.has_dtype({DType::kFloat32}).has_shape({p.heads}).is_dense();
  workspace.has_dtype({DType::kFloat32}).has_shape({p.batch, p.heads, p.tiles()}).is_dense();
  p.dsink = dsink.data<float>();
  p.workspace = workspace.data<float>();
  return p;
}

inline AttentionJoin check_attention_join(Args& args) {
  AttentionJoin p = {};
  for (int i = 0; i < kJoinedParts; ++i) {
    const TensorView values = i < 2 ? args.tensor() : args.optional_tensor();
    const TensorView lse = i < 2 ? args.tensor() : args.optional_tensor();
    if (!values) break;
    if (!lse) fail(kApexTeValueError, "%s: part2_lse must be given with part2", args.name());
    values.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(4);
    const int64_t queries = values.size(2);
    if (i == 0) {
      p.dtype = values.dtype();
      p.batch = values.size(0);
      p.heads = values.size(1);
      p.queries = queries;
      p.cols = values.size(3);
    }
    p.parts[i] = {check_head_rows(values, p.dtype, p.batch, p.heads, queries, p.cols),
                  lse.data<const float>(), p.queries - queries, queries};
    lse.has_dtype({DType::kFloat32}).has_shape({p.batch, p.heads, queries}).is_dense();
    if (queries > p.queries)
      values.refuse(kApexTeValueError, "have at most as many queries as values", "more");
    p.count = i + 1;
  }
  const TensorView out = args.tensor(), total = args.tensor();
  p.out = check_head_rows(out, p.dtype, p.batch, p.heads, p.queries, p.cols);
  total.has_dtype({DType::kFloat32}).has_shape({p.batch, p.heads, p.queries}).is_dense();
  p.total = total.data<float>();
  return p;
}

// The log-sum-exp of a query's parts, and the factor of each.
struct JoinTotal {
  float total, factors[kJoinedParts];

  template <int kParts>
  APEX_TE_HD void of(const float (&lse)[kParts]) {
    float high = lse[0];
    for (int i = 1; i < kParts; ++i) high = lse[i] > high || lse[i] != lse[i] ? lse[i] : high;
    float sum = 0.0f;
    for (int i = 0; i < kParts; ++i) sum += expf(lse[i] - high);
    total = high == -HUGE_VALF ? high : high + logf(sum);
    for (int i = 0; i < kParts; ++i)
      factors[i] = lse[i] == -HUGE_VALF ? 0.0f : expf(lse[i] - total);
  }
};

// A query's log-sum-exp with the sink, and the factor of its output.
struct SinkTotal {
  float total, factor;

  APEX_TE_HD SinkTotal(float lse, float sink) {
    if (lse == -HUGE_VALF) {
      total = sink;
      factor = 0.0f;
      return;
    }
    const float high = lse < sink ? sink : lse;
    total = high + log1pf(expf(-fabsf(lse - sink)));
    factor = 1.0f / (1.0f + expf(sink - lse));
  }
};

// The weight of the sink, 0 where it and all scores are -Inf.
APEX_TE_HD float sink_weight(float sink, float total) {
  return sink == -HUGE_VALF ? 0.0f : expf(sink - total);
}

}  // namespace apex_te
