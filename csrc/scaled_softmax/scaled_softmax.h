// scaled_softmax: softmax of scale * x over the last dimension, masked or causal, and its gradient.
//
// y = softmax(scale * x) over the visible columns of a row, 0 elsewhere: hidden elements are never
// used, whatever stands there. Causal rows see the columns up to row + cols - queries. A row that
// sees nothing above -Inf is 0; a row that sees NaN or +Inf (-Inf where scale is negative) is NaN
// in its visible columns.
// dx = scale * y * (dy - sum(dy * y)) where y is not 0; elsewhere dx is 0 and dy is not used.
#pragma once

#include <cmath>
#include <limits>

#include "common/abi/op.h"
#include "common/numerics/codec.h"

// Shapes: x, y, dy, dx [B, H, Sq, Sk] or [N, Sq, Sk]; mask the same with 1 for any extent but Sk,
// and any strides but 1 for the last. causal: 0 none, 1 upper left (Sq == Sk), 2 bottom right.
// dx may be dy.
APEX_TE_FUNCTION(scaled_softmax_fwd,
                 "x: T[*r h q c], mask: Tensor?, y: T[*r h q c]!, scale: float, causal: int; "
                 "whole q c")
APEX_TE_IN_PLACE(scaled_softmax_fwd, "y: x")
APEX_TE_FUNCTION(scaled_softmax_bwd,
                 "dy: T[*r h q c], y: T[*r h q c], dx: T[*r h q c]!, scale: float, causal: int; "
                 "whole q c")
APEX_TE_IN_PLACE(scaled_softmax_bwd, "dx: dy")

namespace apex_te {

struct SoftmaxMask {
  const uint8_t *data, *end;  // first byte, behind the last one; null: no mask
  int64_t batch_stride, head_stride, query_stride;
};

struct SoftmaxShape {
  int64_t rows;  // B * H * Sq
  int64_t heads, queries, cols;
  bool causal;

  // Columns that a causal row sees.
  APEX_TE_HD int64_t visible(int64_t query) const {
    const int64_t n = query + 1 + cols - queries;
    return n < 0 ? 0 : n < cols ? n : cols;
  }
};

// Exponents are (v - max v) * scale_log2 with v = x or, where scale is negative, -x.
struct SoftmaxScale {
  float scale_log2;
  bool negative;
  explicit SoftmaxScale(double scale)
      : scale_log2(static_cast<float>(std::fabs(scale) * 1.4426950408889634)), negative(scale < 0) {
    // A scale of 0 must leave the -Inf of a hidden element what it is.
    if (scale_log2 == 0) scale_log2 = std::numeric_limits<float>::denorm_min();
  }
};

struct SoftmaxFwd {
  TensorView x, y;
  SoftmaxShape shape;
  SoftmaxMask mask;
  double scale;
};

struct SoftmaxBwd {
  TensorView dy, y, dx;
  SoftmaxShape shape;
  float scale;
};

inline SoftmaxShape check_softmax_shape(const TensorView& x) {
  x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  if (x.ndim() != 3) x.has_ndim(4);
  x.is_dense();
  const int queries = x.ndim() - 2;
  SoftmaxShape shape = {};
  shape.heads = x.ndim() == 4 ? x.size(1) : 1;
  shape.queries = x.size(queries);
  shape.cols = x.size(queries + 1);
  shape.rows = x.size(0) * shape.heads * shape.queries;
  return shape;
}

inline void check_softmax_like(const TensorView& x, const TensorView& other) {
  other.has_dtype({x.dtype()});
  x.ndim() == 4 ? other.has_shape({x.size(0), x.size(1), x.size(2), x.size(3)})
                : other.has_shape({x.size(0), x.size(1), x.size(2)});
  other.is_dense();
}

inline void check_softmax_causal(Args& args, const TensorView& x, SoftmaxShape* shape) {
  const int64_t causal = args.integer();
  if (causal < 0 || causal > 2)
    fail(kApexTeValueError, "%s: causal must be 0, 1 or 2, got %lld", args.name(),
         static_cast<long long>(causal));
  if (causal == 1 && shape->queries != shape->cols) {
    char actual[96] = "shape ";
    int64_t extents[4];
    for (int i = 0; i < x.ndim(); ++i) extents[i] = x.size(i);
    format_shape(actual + 6, sizeof(actual) - 6, extents, x.ndim());
    x.refuse(kApexTeValueError, "have as many rows as columns to be causal from the upper left",
             actual);
  }
  shape->causal = causal != 0;
}

inline SoftmaxMask check_softmax_mask(const TensorView& mask, const TensorView& x) {
  SoftmaxMask result = {};
  if (!mask) return result;
  const int n = x.ndim();
  mask.has_dtype({DType::kBool}).has_ndim(n);
  int64_t strides[4] = {};
  for (int i = 0; i < n; ++i) {
    const bool broadcast = mask.size(i) == 1 && i + 1 < n;
    if (mask.size(i) != x.size(i) && !broadcast) {
      char expected[128] = "broadcast over any dimension but the last to ", actual[96];
      int64_t wanted[4], given[4];
      for (int k = 0; k < n; ++k) wanted[k] = x.size(k), given[k] = mask.size(k);
      const size_t used = strlen(expected);
      format_shape(expected + used, sizeof(expected) - used, wanted, n);
      format_shape(actual, sizeof(actual), given, n);
      mask.refuse(kApexTeValueError, expected, actual);
    }
    strides[i] = mask.size(i) == 1 ? 0 : mask.stride(i);
  }
  if (x.size(n - 1) > 1 && strides[n - 1] != 1) {
    char actual[64];
    snprintf(actual, sizeof(actual), "stride %lld", static_cast<long long>(strides[n - 1]));
    mask.refuse(kApexTeValueError, "have stride 1 in its last dimension", actual);
  }
  result.data = result.end = mask.data<const uint8_t>();
  if (mask.numel()) {
    result.end += x.size(n - 1);
    for (int i = 0; i + 1 < n; ++i) result.end += (mask.size(i) - 1) * strides[i];
  }
  result.batch_stride = strides[0];
  result.head_stride = n == 4 ? strides[1] : 0;
  result.query_stride = strides[n - 2];
  return result;
}

inline SoftmaxFwd check_scaled_softmax_fwd(Args& args) {
  SoftmaxFwd p;
  p.x = args.tensor();
  p.shape = check_softmax_shape(p.x);
  p.mask = check_softmax_mask(args.optional_tensor(), p.x);
  p.y = args.tensor();
  check_softmax_like(p.x, p.y);
  p.scale = args.floating();
  check_softmax_causal(args, p.x, &p.shape);
  return p;
}

inline SoftmaxBwd check_scaled_softmax_bwd(Args& args) {
  SoftmaxBwd p;
  p.dy = args.tensor();
  p.shape = check_softmax_shape(p.dy);
  p.y = args.tensor();
  check_softmax_like(p.dy, p.y);
  p.dx = args.tensor();
  check_softmax_like(p.dy, p.dx);
  p.scale = static_cast<float>(args.floating());
  check_softmax_causal(args, p.dy, &p.shape);
  return p;
}

}  // namespace apex_te
