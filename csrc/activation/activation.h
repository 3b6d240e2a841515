// activation: gelu (tanh or exact), quick gelu, relu, squared relu or silu of every element, and
// the gradients, in the input's dtype or straight to FP8 (common/activation/arguments.h).
#pragma once

#include "common/activation/arguments.h"

APEX_TE_FUNCTION(activation_fwd, "x: T[*r c], y: T[x]!, kind: int")
APEX_TE_IN_PLACE(activation_fwd, "y: x")
APEX_TE_FUNCTION(activation_bwd, "dy: T[x], x: T[*r c], dx: T[x]!, kind: int")
APEX_TE_IN_PLACE(activation_bwd, "dx: dy, dx: x")
APEX_TE_FUNCTION(activation_fwd_fp8,
                 "x: T[r c], scale: f32[1], rowwise: F[r c]!?, columnwise: F[c r~16]!?, "
                 "amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, kind: int")
APEX_TE_FUNCTION(activation_bwd_fp8,
                 "dy: T[x], x: T[r c], scale: f32[1], rowwise: F[r c]!?, columnwise: F[c r~16]!?, "
                 "amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, kind: int")

namespace apex_te {

inline ActivationOp check_activation(Args& args, bool is_bwd, bool to_fp8) {
  ActivationOp p = check_activation_op(args, false, is_bwd, to_fp8);
  const int64_t kind = args.integer();
  if (kind < 0 || kind > static_cast<int64_t>(Activation::kSilu))
    fail(kApexTeValueError, "%s: kind must be 0 to 5, got %lld", args.name(),
         static_cast<long long>(kind));
  p.kind = static_cast<Activation>(kind);
  return p;
}

}  // namespace apex_te
