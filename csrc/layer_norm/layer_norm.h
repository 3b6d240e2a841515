// layer_norm: layer normalisation over the last dimension; forward, forward straight to FP8 and
// backward. Formulas, checks and scratch: common/norm/arguments.h.
#pragma once

#include "common/norm/arguments.h"

APEX_TE_FUNCTION(layer_norm_fwd,
                 "x: T[r c], weight: W=T|f32[c]?, bias: W=T|f32[c]?, residual: T[r c]?, "
                 "y: T[r c]!, residual_sum: T[r c]!?residual, mean: f32[r]!, rstd: f32[r]!, "
                 "eps: float, zero_centered_gamma: bool; whole c")

// q = satcast_rne(y * scale) of the fp32 y; amax becomes max(amax, max |y|) with NaN above
// infinity; scale_inv is set to 1 / scale.
APEX_TE_FUNCTION(layer_norm_fwd_fp8,
                 "x: T[r c], weight: W=T|f32[c]?, bias: W=T|f32[c]?, residual: T[r c]?, "
                 "scale: f32[1], rowwise: F[r c]!?, columnwise: F[c r~16]!?, amax: f32[^ 1]!!?, "
                 "scale_inv: f32[scale]!?, residual_sum: T[r c]!?residual, mean: f32[r]!, "
                 "rstd: f32[r]!, eps: float, zero_centered_gamma: bool; whole c")

// y of layer_norm_fwd and layer_norm_fwd_fp8 once more, bitwise, from x as for layer_norm_bwd and
// its statistics.
APEX_TE_FUNCTION(
    layer_norm_again,
    "x: T[r c], weight: W=T|f32[c]?, bias: W=T|f32[c]?, y: T[r c]!, mean: f32[r], rstd: f32[r], "
    "zero_centered_gamma: bool; whole c")
APEX_TE_FUNCTION(
    layer_norm_again_fp8,
    "x: T[r c], weight: W=T|f32[c]?, bias: W=T|f32[c]?, scale: f32[1], rowwise: F[r c]!?, "
    "columnwise: F[c r~16]!?, amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, "
    "mean: f32[r], rstd: f32[r], zero_centered_gamma: bool; whole c")

// x is what was normalised: x + residual where there was a residual.
APEX_TE_FUNCTION(layer_norm_bwd,
                 "dy: T[r c], x: T[r c], weight: W=T|f32[c]?, mean: f32[r], rstd: f32[r], "
                 "d_residual: T[r c]?, dx: T[r c]!, dweight: W=T|f32[+ c]!?, "
                 "dbias: W=T|f32[+ c]!?, workspace: f32[norm_lines(r c) 2c]!?dweight|dbias, "
                 "zero_centered_gamma: bool; whole c")
