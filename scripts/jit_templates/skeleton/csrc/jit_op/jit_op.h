// jit_op: y = x / (1 + scale |x|) of every element.
//
// Its gradient is dx = dy / (1 + scale |x|)^2. The declarations below are read as text: by
// the builder, for the schemas that torch knows, and as contracts (docs/new_op.md). "!" is written.
#pragma once

#include <cmath>

#include "common/activation/arguments.h"

APEX_TE_FUNCTION(jit_op_fwd, "x: T[*r c], y: T[x]!, scale: float")
APEX_TE_IN_PLACE(jit_op_fwd, "y: x")
APEX_TE_FUNCTION(jit_op_bwd, "dy: T[x], x: T[*r c], dx: T[x]!, scale: float")
APEX_TE_IN_PLACE(jit_op_bwd, "dx: dy")

namespace apex_te {
namespace {

// The formula, in float32, once for both devices.
APEX_TE_HD float value_of(float x, float scale) { return x / (1.0f + scale * fabsf(x)); }
APEX_TE_HD float gradient_of(float x, float dy, float scale) {
  const float d = 1.0f + scale * fabsf(x);
  return dy / (d * d);
}

// Checked arguments. Plain data, so kernels take it whole.
struct Problem {
  DType dtype;  // of every tensor
  int64_t numel;
  float scale;
  const void *x, *dy;  // dy is null in the forward
  void* out;           // y or dx
};

// Reads the arguments in the order of the signatures; both devices call it, so that no kernel can
// be launched unchecked.
inline Problem check_problem(Args& args, bool is_bwd) {
  Problem p = {};
  TensorView dy;
  if (is_bwd) dy = args.tensor();
  const TensorView x = args.tensor();
  x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).is_dense();
  if (is_bwd) p.dy = check_like(dy, x);
  p.out = check_like(args.tensor(), x);
  const double scale = args.floating();
  if (!(scale >= 0.0 && scale < INFINITY))
    fail(kApexTeValueError, "%s: scale must be finite and at least 0, got %g", args.name(), scale);
  p.dtype = x.dtype();
  p.numel = x.numel();
  p.scale = static_cast<float>(scale);
  p.x = x.data();
  return p;
}

}  // namespace
}  // namespace apex_te
