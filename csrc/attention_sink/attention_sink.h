// attention_sink: attention with a sink a, a logit of each head beside its scores that weighs no
// value, from attention without it, and the gradient of the sinks.
//
// With the log-sum-exp l of a query's scores, total = log(exp(l) + exp(a)) and out = values *
// exp(l - total), rounded once. Where l is -Inf, as no key is seen, out is 0 and values are not
// used. dsink = -sum(exp(a - total) * sum(dout * out)) over a head's queries, in fp32.
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

inline HeadRows check_head_rows(const TensorView& t, const AttentionSink& p) {
  t.has_dtype({p.dtype}).has_shape({p.batch, p.heads, p.queries, p.cols});
  if (t.numel() > 0 && p.cols > 1 && t.stride(3) != 1)
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
  p.in = check_head_rows(in, p);
  p.out = check_head_rows(out, p);
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
