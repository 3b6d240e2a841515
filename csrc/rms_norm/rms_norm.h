// rms_norm: normalisation by the root of the mean square of the last dimension; forward, forward
// straight to FP8 and backward. Formulas, checks and scratch: common/norm/arguments.h.
#pragma once

#include "common/norm/arguments.h"

APEX_TE_FUNCTION(rms_norm_fwd,
                 "x: Tensor, weight: Tensor?, residual: Tensor?, y: Tensor!, "
                 "residual_sum: Tensor!?, rstd: Tensor!, eps: float, zero_centered_gamma: bool")

// q = satcast_rne(y * scale) of the fp32 y; amax becomes max(amax, max |y|) with NaN above
// infinity; scale_inv is set to 1 / scale.
APEX_TE_FUNCTION(rms_norm_fwd_fp8,
                 "x: Tensor, weight: Tensor?, residual: Tensor?, scale: Tensor, rowwise: Tensor!?, "
                 "columnwise: Tensor!?, amax: Tensor!?, scale_inv: Tensor!?, "
                 "residual_sum: Tensor!?, rstd: Tensor!, eps: float, zero_centered_gamma: bool")

// x is what was normalised: x + residual where there was a residual.
APEX_TE_FUNCTION(rms_norm_bwd,
                 "dy: Tensor, x: Tensor, weight: Tensor?, rstd: Tensor, d_residual: Tensor?, "
                 "dx: Tensor!, dweight: Tensor!?, workspace: Tensor!?, zero_centered_gamma: bool")
