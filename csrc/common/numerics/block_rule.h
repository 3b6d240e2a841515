// The scale of a block of 1 x 128 or 128 x 128 elements, and what it does to them.
#pragma once

#include <cmath>

#include "common/numerics/scaling.h"

namespace apex_te {

// An infinite scale becomes the largest finite value of the matrix's dtype; bits of a float.
constexpr uint32_t kLargestHalfBits = 0x477FE000u;
constexpr uint32_t kLargestBFloat16Bits = 0x7F7F0000u;

// Quotients rounded to nearest, by a scale_of<true>, for a few products each. A product with the
// rounded inverse is off by less than two steps, and what it leaves of x corrects it. One
// correction is exact for elements of 16 bits (tests/L0/ops/test_server_scales.py tries all), the
// second for any (Markstein): a scale is at least 1e-10 / 57344, so no remainder that counts is
// subnormal.
struct Divisor {
  float value, inverse;
  Divisor() = default;
  APEX_TE_HD explicit Divisor(float scale) : value(scale), inverse(inverse_of(scale)) {}
  template <int kBytes>
  APEX_TE_HD float quotient(float x) const {
    const float product = x * inverse, rest = fmaf(-product, value, x);
    float q = fmaf(rest, inverse, product);
    if (kBytes > 2) q = fmaf(fmaf(-q, value, x), inverse, q);
    return fabsf(rest) > 0.0f ? q : product;  // an infinity leaves NaN; -0 keeps its sign
  }

 private:
  // 1 / scale, as the compiler computes it where neither can be subnormal.
  static APEX_TE_HD float inverse_of(float scale) {
#ifdef __CUDA_ARCH__
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
    return fmaf(inverse, -fmaf(scale, inverse, -1.0f), inverse);
#else
    return 1.0f / scale;
#endif
  }
};

// Scales of blocks: ScaleRule's, or those of inference engines (vLLM's per_token_group_quant),
// which count an amax as at least kServerEps and divide elements by amax / target, IEEE-rounded.
// That is scale_inv, stored as it is.
struct BlockRule : ScaleRule {
  bool divides;
  static constexpr float kServerEps = 1e-10f;

  // What elements are multiplied by, or divided by. kDivides: `divides`, known to the compiler.
  template <bool kDivides>
  APEX_TE_HD float scale_of(uint32_t amax) const {
    if (!kDivides) return ScaleRule::scale_of(amax);
    const uint32_t floor = float_bits(eps);
    amax = amax < floor ? floor : amax;
    return amax >= 0x7F800000u ? 1.0f : bits_float(amax) / target;
  }
  template <bool kDivides>
  APEX_TE_HD static float inverse_of(uint32_t amax, float scale) {
    if (!kDivides) return ScaleRule::inverse_of(amax, scale);
    return amax == 0x7F800000u ? bits_float(amax) : scale;
  }
};

// Biased exponent of the power of two that BlockRule gives E4M3 data of bfloat16 elements without
// eps, of bits of their amax. 448 / amax has no rounding to a power of two: amax has 8 bits.
APEX_TE_HD uint32_t held_exponent(uint32_t amax) {
  if (amax == 0u || amax >= 0x7F800000u) return 127;
  const uint32_t of_448 = 262u - (amax >> 23), exponent = of_448 - ((amax & 0x7FFFFFu) > 0x600000u);
  return exponent < 254u ? exponent : 254u;
}
APEX_TE_HD float held_scale(uint32_t exponent) { return bits_float(exponent << 23); }
APEX_TE_HD float held_inverse(uint32_t amax, uint32_t exponent) {
  const uint32_t inverse = exponent == 254u ? 0x00400000u : (254u - exponent) << 23;
  return bits_float(amax == 0x7F800000u ? amax : inverse);
}

// Reads eps and scales, in this order. scales: 0 for any numbers, 1 for powers of two, 2 for those
// of inference engines. dtype: of the matrix.
inline BlockRule check_block_rule(Args& args, DType fp8, DType dtype) {
  BlockRule rule{};
  rule.target = fp8 == DType::kE5M2 ? E5M2::kMax : E4M3::kMax;
  rule.eps = check_eps(args);
  const int64_t scales = args.integer();
  if (scales < 0 || scales > 2)
    fail(kApexTeValueError, "%s: scales must be 0, 1 or 2, got %lld", args.name(),
         static_cast<long long>(scales));
  rule.pow2 = scales == 1;
  rule.divides = scales == 2;
  if (rule.divides && rule.eps < BlockRule::kServerEps) rule.eps = BlockRule::kServerEps;
  if (dtype != DType::kFloat32)
    rule.largest_bits = dtype == DType::kFloat16 ? kLargestHalfBits : kLargestBFloat16Bits;
  return rule;
}

}  // namespace apex_te
