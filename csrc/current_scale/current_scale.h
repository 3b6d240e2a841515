// current_scale: quantize a matrix to FP8 with a scale computed from its own amax.
//
// amax = max |x| with NaN above infinity; scale = fp8_max / amax by the rule of
// common/numerics/scaling.h; q = satcast_rne(float(x) * scale); scale_inv = 1 / scale, infinite
// where amax is.
#pragma once

#include "common/numerics/fp8_formats.h"
#include "common/numerics/quantize.h"
#include "common/numerics/scaling.h"

// Two launches: amax, then scale and cast.
APEX_TE_FUNCTION(current_scale_fwd,
                 "x: T[r c], rowwise: F*[r c]!?, columnwise: F*[c r~16]!?, amax: f32[^ 1]!, "
                 "scale: f32[1]!, scale_inv: f32[1]!, workspace: f32[1024]!, eps: float, "
                 "pow2: bool")
// The second alone, for an amax that is known.
APEX_TE_FUNCTION(current_scale_cast,
                 "x: T[r c], rowwise: F*[r c]!?, columnwise: F*[c r~16]!?, amax: f32[1], "
                 "scale: f32[1]!, scale_inv: f32[1]!, eps: float, pow2: bool")
// amax alone.
APEX_TE_FUNCTION(current_scale_amax, "x: T[r c], amax: f32[^ 1]!, workspace: f32[1024]!")

namespace apex_te {

struct CurrentScaleCall {
  Quantize q;
  float *amax, *scale, *scale_inv;
  uint32_t* amaxes;  // the workspace; null where amax is given
  ScaleRule rule;
};

inline CurrentScaleCall check_current_scale(Args& args, bool has_workspace) {
  CurrentScaleCall p;
  p.q = check_quantize(args, args.tensor(), kFP8DTypes);
  p.amax = float_scalar(args.tensor());
  p.scale = float_scalar(args.tensor());
  p.scale_inv = float_scalar(args.tensor());
  p.amaxes = has_workspace ? check_amaxes(args.tensor()) : nullptr;
  p.rule = check_scale_rule(args, fp8_max(p.q.codes));
  return p;
}

struct CurrentScaleAmax {
  TensorView x;
  float* amax;
  uint32_t* amaxes;
};

inline CurrentScaleAmax check_current_scale_amax(Args& args) {
  CurrentScaleAmax p;
  p.x = check_quantize_input(args.tensor());
  p.amax = float_scalar(args.tensor());
  p.amaxes = check_amaxes(args.tensor());
  return p;
}

}  // namespace apex_te
