// The scale of a group of elements from its largest magnitude.
#pragma once

#include "common/abi/op.h"
#include "common/numerics/codec.h"

namespace apex_te {

constexpr uint32_t kLargestFloatBits = 0x7F7FFFFFu;

// scale = target / amax, IEEE-rounded. An amax below eps counts as eps; an amax of 0, infinity or
// NaN gives scale 1; an infinite scale becomes `largest_bits`. pow2 clears the scale's mantissa.
struct ScaleRule {
  float target, eps;
  bool pow2;
  uint32_t largest_bits = kLargestFloatBits;

  // amax: bits of a magnitude.
  APEX_TE_HD float scale_of(uint32_t amax) const {
    const uint32_t floor = float_bits(eps);
    amax = amax < floor ? floor : amax;
    const uint32_t ratio = float_bits(target / bits_float(amax));
    uint32_t scale = ratio == 0x7F800000u ? largest_bits : ratio;
    scale = pow2 ? scale & 0xFF800000u : scale;
    return amax == 0u || amax >= 0x7F800000u ? 1.0f : bits_float(scale);
  }
  // scale_inv. Infinities were encoded as the largest value: an infinite inverse shows in every
  // result that there were some. A NaN has an encoding of its own.
  static APEX_TE_HD float inverse_of(uint32_t amax, float scale) {
    return amax == 0x7F800000u ? bits_float(amax) : 1.0f / scale;
  }
};

inline float check_eps(Args& args) {
  const double eps = args.floating();
  const float rounded = static_cast<float>(eps) + 0.0f;  // + 0 turns -0 into 0
  if (!(rounded >= 0.0f && float_bits(rounded) <= kLargestFloatBits))
    fail(kApexTeValueError, "%s: eps must be zero or more and finite, got %g", args.name(), eps);
  return rounded;
}

// Reads eps and pow2, in this order.
inline ScaleRule check_scale_rule(Args& args, float target) {
  const float eps = check_eps(args);
  return ScaleRule{target, eps, args.boolean()};
}

}  // namespace apex_te
