// bias_gelu: gelu(x + bias), in the tanh or the exact form, and the gradients of x and bias, in the
// input's dtype or straight to FP8 (common/activation/arguments.h).
#pragma once

#include "common/activation/arguments.h"

APEX_TE_FUNCTION(bias_gelu_fwd, "x: T[*r c], bias: T[c]?, y: T[x]!, is_tanh: bool")
APEX_TE_IN_PLACE(bias_gelu_fwd, "y: x")
APEX_TE_FUNCTION(bias_gelu_bwd,
                 "dy: T[x], x: T[*r c], bias: T[c]?, dx: T[x]!, dbias: T[+ c]!?, "
                 "workspace: f32[r/64 c]!?dbias, is_tanh: bool")
APEX_TE_IN_PLACE(bias_gelu_bwd, "dx: dy, dx: x")
APEX_TE_FUNCTION(bias_gelu_fwd_fp8,
                 "x: T[r c], bias: T[c]?, scale: f32[1], rowwise: F[r c]!?, "
                 "columnwise: F[c r~16]!?, amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, "
                 "is_tanh: bool")
APEX_TE_FUNCTION(bias_gelu_bwd_fp8,
                 "dy: T[x], x: T[r c], bias: T[c]?, scale: f32[1], rowwise: F[r c]!?, "
                 "columnwise: F[c r~16]!?, amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, "
                 "dbias: T[+ c]!?, workspace: f32[r/64 c]!?dbias, is_tanh: bool")

namespace apex_te {

inline ActivationOp check_bias_gelu(Args& args, bool is_bwd, bool to_fp8) {
  ActivationOp p = check_activation_op(args, true, is_bwd, to_fp8);
  p.kind = args.boolean() ? Activation::kGelu : Activation::kGeluErf;
  return p;
}

}  // namespace apex_te
