// hif8: HiF8 (HiFloat8) codes of a tensor with one scale, and back.
//
// q = encode(float(x) * scale), rounded half away from zero. Beyond 40960 in magnitude, infinities
// too, a value becomes 32768 if saturate, else infinity; NaN becomes 0x80, and a magnitude below
// 2^-23 0x00. Codes are uint8.
#pragma once

#include "common/numerics/hif8.h"
#include "common/numerics/quantize.h"
#include "common/numerics/scaling.h"

// With a given scale (none: 1). amax becomes max(amax, max |x|) with NaN above infinity; scale_inv
// is set to 1 / scale.
APEX_TE_FUNCTION(hif8_quantize,
                 "x: T[r c], scale: f32[1]?, rowwise: u8[r c]!?, columnwise: u8[c r~16]!?, "
                 "amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, saturate: bool")
// With scale = target / amax of x and its inverse, by the rules of common/numerics/scaling.h: two
// launches.
APEX_TE_FUNCTION(hif8_current,
                 "x: T[r c], rowwise: u8[r c]!?, columnwise: u8[c r~16]!?, amax: f32[^ 1]!, "
                 "scale: f32[1]!, scale_inv: f32[1]!, workspace: f32[1024]!, target: float, "
                 "eps: float, pow2: bool, saturate: bool")
// The second alone, for an amax that is known.
APEX_TE_FUNCTION(hif8_cast,
                 "x: T[r c], rowwise: u8[r c]!?, columnwise: u8[c r~16]!?, amax: f32[1], "
                 "scale: f32[1]!, scale_inv: f32[1]!, target: float, eps: float, pow2: bool, "
                 "saturate: bool")
// out = value of the code, times scale_inv if given, rounded to out's dtype. One dimension each.
APEX_TE_FUNCTION(hif8_decode, "fp8_data: u8[n], scale_inv: f32[1]?, out: T[n]!")

namespace apex_te {

struct Hif8Quantize {
  Quantize q;
  const float* given_scale;
  float *amax, *scale, *scale_inv;
  uint32_t* amaxes;
  ScaleRule rule;
  bool saturate;
};

inline Hif8Quantize check_hif8_quantize(Args& args) {
  Hif8Quantize p = {};
  const TensorView x = args.tensor();
  p.given_scale = float_scalar(args.optional_tensor());
  p.q = check_quantize(args, x, {DType::kUInt8});
  p.amax = float_scalar(args.optional_tensor());
  p.scale_inv = float_scalar(args.optional_tensor());
  p.saturate = args.boolean();
  return p;
}

inline Hif8Quantize check_hif8_current(Args& args, bool has_workspace) {
  Hif8Quantize p = {};
  p.q = check_quantize(args, args.tensor(), {DType::kUInt8});
  p.amax = float_scalar(args.tensor());
  p.scale = float_scalar(args.tensor());
  p.scale_inv = float_scalar(args.tensor());
  p.amaxes = has_workspace ? check_amaxes(args.tensor()) : nullptr;
  const double target = args.floating();
  if (!(target > 0.0 && target <= 32768.0))
    fail(kApexTeValueError, "%s: target must be above 0 and at most 32768, got %g", args.name(),
         target);
  p.rule = check_scale_rule(args, static_cast<float>(target));
  p.saturate = args.boolean();
  return p;
}

struct Hif8Decode {
  TensorView codes, out;
  const float* scale_inv;
};

inline Hif8Decode check_hif8_decode(Args& args) {
  Hif8Decode p;
  p.codes = args.tensor();
  p.codes.has_dtype({DType::kUInt8}).has_ndim(1).is_dense();
  p.scale_inv = float_scalar(args.optional_tensor());
  p.out = args.tensor();
  p.out.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .has_shape({p.codes.size(0)})
      .is_dense();
  return p;
}

}  // namespace apex_te
