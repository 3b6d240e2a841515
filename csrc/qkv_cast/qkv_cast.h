// qkv_cast: FP8 casts around a fused QKV projection, whose weight may hold its heads in groups.
//
// The rows of the weight are heads of `size` rows. Interleaved they go group by group: `repeats`
// query heads, a key head, a value head; else all queries, all keys, all values. Without queries
// (repeats 0) a group is a key head and a value head.
//
// qkv_cast_weight casts an interleaved weight. Its rowwise copy has the rows of all queries, then
// those of all keys and all values, so that the product's output splits into three views; the
// columnwise copy has them in the weight's own order.
//
// qkv_cast_grad casts the gradient of the projection's output from those of its heads, which have
// any strides but a dense last dimension. Both copies have the weight's order, so that neither
// product of the backward needs another order.
//
// Both quantize as cast_transpose does, with the same bits.
#pragma once

#include "common/numerics/column_sums.h"
#include "common/numerics/columnwise.h"
#include "common/numerics/fp8_formats.h"

APEX_TE_FUNCTION(qkv_cast_weight,
                 "weight: T[h c], scale: f32[1], out_rowwise: F*[h c]!, "
                 "out_columnwise: F*[c h~16]!?, amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, "
                 "noop: i32[1]?, repeats: int, groups: int; whole h")
APEX_TE_FUNCTION(qkv_cast_grad,
                 "queries: T[o i q s]?, keys: T[o i g s], values: T[o i g s], scale: f32[1], "
                 "rowwise: F*[tokens(o i) qkv(q g s queries)]!?, "
                 "columnwise: F*[qkv(q g s queries) tokens(o i)~16]!?, amax: f32[^ 1]!!?, "
                 "scale_inv: f32[scale]!?, dbias: T[+ qkv(q g s queries)]!?, "
                 "workspace: f32[tokens(o i)/256 qkv(q g s queries)]!?dbias, interleaved: bool")

namespace apex_te {

// Heads of a matrix dimension.
struct HeadOrder {
  int64_t repeats, groups, size;
  bool interleaved;

  int64_t heads() const { return (repeats + 2) * groups; }

  struct Head {
    int part;  // 0: queries, 1: keys, 2: values
    int64_t index;
  };
  // The head at a place of the matrix. Places fit into 32 bits, whose division is cheap on a GPU.
  APEX_TE_HD Head head_at(uint32_t place) const {
    const auto r = static_cast<uint32_t>(repeats), g = static_cast<uint32_t>(groups);
    if (interleaved) {
      const uint32_t group = place / (r + 2), in_group = place - group * (r + 2);
      if (in_group < r) return {0, static_cast<int64_t>(group) * r + in_group};
      return {static_cast<int>(in_group - r) + 1, group};
    }
    if (place < r * g) return {0, place};
    place -= r * g;
    return place < g ? Head{1, place} : Head{2, place - g};
  }
  // Place of a head among all queries, all keys, all values.
  APEX_TE_HD int64_t sorted_place(const Head& head) const {
    return (head.part == 0   ? 0
            : head.part == 1 ? repeats * groups
                             : (repeats + 1) * groups) +
           head.index;
  }
};

constexpr int64_t kMaxHeadElements = 0x7FFFFFFF;

// What both functions write.
struct QkvOutputs {
  DType fp8;  // kOther where only the amax is wanted
  uint8_t *rowwise, *columnwise;
  int64_t columnwise_length;  // of a row of columnwise, from the matrix's rows on zeros
  float *amax, *scale_inv;
};

inline QkvOutputs check_qkv_outputs(Args& args, const TensorView& rowwise,
                                    const TensorView& columnwise, int64_t rows, int64_t cols) {
  QkvOutputs out;
  out.fp8 = rowwise ? rowwise.dtype() : columnwise ? columnwise.dtype() : DType::kOther;
  if (rowwise) rowwise.has_dtype(kFP8DTypes).has_shape({rows, cols}).is_dense();
  if (columnwise) columnwise.has_dtype(kFP8DTypes);
  if (rowwise && columnwise) columnwise.has_dtype({out.fp8});
  out.columnwise_length = columnwise ? check_columnwise(columnwise, cols, rows) : 0;
  out.rowwise = rowwise.data<uint8_t>();
  out.columnwise = columnwise.data<uint8_t>();
  const TensorView amax = args.optional_tensor();
  if (amax) amax.is_scalar(DType::kFloat32);
  out.amax = amax.data<float>();
  const TensorView scale_inv = args.optional_tensor();
  if (scale_inv) scale_inv.is_scalar(DType::kFloat32);
  out.scale_inv = scale_inv.data<float>();
  return out;
}

struct QkvCastWeight {
  TensorView weight;
  int64_t rows, cols;
  HeadOrder order;
  const float* scale;
  QkvOutputs out;
  const int32_t* noop;
};

inline QkvCastWeight check_qkv_cast_weight(Args& args) {
  QkvCastWeight p;
  p.weight = args.tensor();
  p.weight.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.rows = p.weight.size(0);
  p.cols = p.weight.size(1);
  p.scale = args.tensor().is_scalar(DType::kFloat32).data<float>();
  const TensorView rowwise = args.tensor();
  const TensorView columnwise = args.optional_tensor();
  p.out = check_qkv_outputs(args, rowwise, columnwise, p.rows, p.cols);
  const TensorView noop = args.optional_tensor();
  if (noop) noop.is_scalar(DType::kInt32);
  p.noop = noop.data<int32_t>();
  const int64_t repeats = args.integer(), groups = args.integer();
  if (repeats < 0 || groups < 1 || repeats > kMaxHeadElements || groups > kMaxHeadElements ||
      p.rows > kMaxHeadElements || p.rows % ((repeats + 2) * groups))
    fail(kApexTeValueError,
         "%s: weight must have a multiple of (repeats + 2) * groups rows below 2^31, "
         "got %lld rows with repeats %lld and groups %lld",
         args.name(), static_cast<long long>(p.rows), static_cast<long long>(repeats),
         static_cast<long long>(groups));
  p.order = {repeats, groups, p.rows / ((repeats + 2) * groups), true};
  return p;
}

// Heads [outer, inner, heads, size] of one part; strides in elements.
struct HeadsView {
  const void* data;
  int64_t outer, inner, head;
};

struct QkvCastGrad {
  DType dtype;
  int64_t rows, cols;
  int64_t inner;  // rows are numbered (outer, inner)
  HeadOrder order;
  HeadsView queries, keys, values;
  const float* scale;
  QkvOutputs out;
  TensorView dbias;
  float* workspace;
};

inline HeadsView check_heads(const TensorView& t, DType dtype, int64_t outer, int64_t inner,
                             int64_t heads, int64_t size) {
  t.has_dtype({dtype}).has_shape({outer, inner, heads, size});
  if (size > 1 && t.numel() && t.stride(3) != 1)
    t.refuse(kApexTeValueError, "be dense in its last dimension", "another stride");
  int64_t strides[3];  // of what is there once, none
  for (int i = 0; i < 3; ++i) strides[i] = t.size(i) > 1 ? t.stride(i) : 0;
  return {t.data(), strides[0], strides[1], strides[2]};
}

// Numbers rows with one stride where the strides of all parts allow it.
inline void join_rows(QkvCastGrad& p, int64_t outer) {
  HeadsView* views[] = {&p.queries, &p.keys, &p.values};
  for (const HeadsView* v : views)
    if (outer > 1 && p.inner > 1 && v->outer != p.inner * v->inner) return;
  for (HeadsView* v : views)
    if (p.inner > 1) v->outer = v->inner;
  p.inner = 1;
}

inline QkvCastGrad check_qkv_cast_grad(Args& args) {
  QkvCastGrad p;
  const TensorView queries = args.optional_tensor();
  const TensorView keys = args.tensor(), values = args.tensor();
  keys.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(4);
  p.dtype = keys.dtype();
  const int64_t outer = keys.size(0), groups = keys.size(2), size = keys.size(3);
  p.inner = keys.size(1);
  p.keys = check_heads(keys, p.dtype, outer, p.inner, groups, size);
  p.values = check_heads(values, p.dtype, outer, p.inner, groups, size);
  p.order = {0, groups, size, true};
  if (queries) {
    queries.has_ndim(4);
    const int64_t heads = queries.size(2);
    p.order.repeats = groups ? heads / groups : 0;
    if (p.order.repeats < 1 || p.order.repeats * groups != heads)
      fail(kApexTeValueError,
           "%s: queries must have a multiple of the %lld heads of keys, got %lld", args.name(),
           static_cast<long long>(groups), static_cast<long long>(heads));
    p.queries = check_heads(queries, p.dtype, outer, p.inner, heads, size);
  } else {
    p.queries = p.keys;  // strides alone are read
  }
  const bool is_small = groups <= kMaxHeadElements && size <= kMaxHeadElements &&
                        p.order.repeats <= kMaxHeadElements && p.order.heads() <= kMaxHeadElements;
  if (!is_small || p.order.heads() * size > kMaxHeadElements)
    fail(kApexTeUnsupported, "%s: all heads must have fewer than 2^31 elements, got more",
         args.name());
  p.rows = outer * p.inner;
  p.cols = p.order.heads() * size;
  join_rows(p, outer);
  p.scale = args.tensor().is_scalar(DType::kFloat32).data<float>();
  const TensorView rowwise = args.optional_tensor();
  const TensorView columnwise = args.optional_tensor();
  p.out = check_qkv_outputs(args, rowwise, columnwise, p.rows, p.cols);
  p.dbias = args.optional_tensor();
  const TensorView workspace = args.optional_tensor();
  if (p.dbias) {
    p.dbias.has_dtype({p.dtype}).has_shape({p.cols}).is_dense();
    const int64_t tiles = (p.rows + kSumTileRows - 1) / kSumTileRows;
    if (!workspace)
      fail(kApexTeValueError, "%s: workspace must be given with dbias, got None", args.name());
    workspace.has_dtype({DType::kFloat32}).has_shape({tiles, p.cols}).is_dense();
  }
  p.workspace = workspace.data<float>();
  p.order.interleaved = args.boolean();
  return p;
}

}  // namespace apex_te
