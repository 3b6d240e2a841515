// Activation functions and their derivatives in fp32, for host and device.
//
// kGelu is the tanh form of Hendrycks and Gimpel (arXiv 1606.08415) written as x * sigmoid(2 u),
// u = sqrt(2/pi) (x + 0.044715 x^3); kGeluErf is the exact form.
//
// All rest on e^y or 2^z and a division. On the host these are polynomials that the compiler
// vectorizes and the division of floats, without a branch and with the same bits for every
// instruction set; on the device special-function instructions, or, where a result is kept in
// float32 (kFine), the math library's e^y and erf and the division, since results of 16 and 8 bits
// need no more.
//
// silu, quick gelu and sigmoid take e^-x, within 1.5 ulp: their values are within 3 ulp. gelu takes
// 2^z, within 1.2 ulp on the host, 2 on the device; powers below 2^-126 are 0. Rounding z, the
// exponent, adds |z| / 2 ulp to the digits of the negative tail: gelu is within 40 ulp at -5, the
// absolute error within 1e-6 of the larger of 1 and |f(x)| everywhere.
//
// NaN gives NaN, in value and derivative. At an infinity they are what PyTorch's formulas give in
// float64: at -Inf the value is NaN unless it is relu's, squared relu's or sigmoid's; the
// derivatives of all but those are NaN at both. At a finite x neither is NaN (PyTorch's derivative
// of gelu is in float32, from 1.9e19 on), and infinite only where squared relu overflows.
#pragma once

#include <cmath>

#include "common/numerics/codec.h"
#include "common/numerics/exp.h"

namespace apex_te {

enum class Activation : int32_t {
  kGelu = 0,
  kGeluErf = 1,
  kQuickGelu = 2,
  kRelu = 3,
  kSquaredRelu = 4,
  kSilu = 5,
  kSigmoid = 6,
  kSwish = 7,  // x sigmoid(alpha x)
};

// a * b + c, in one instruction on the device.
APEX_TE_HD float mul_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// 2^z for -127 <= z <= 128 or NaN: 0 at -127, infinity from 127.5 on.
APEX_TE_HD float power_of_two_within(float z) {
#if defined(__CUDA_ARCH__) && !defined(APEX_TE_PORTABLE)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(z));
  return result;
#else
  // 2^n (1 + r q(r)), n = round(z), |r| <= 1/2; q minimizes the largest relative error, 2.0e-9.
  // Adding 1.5 * 2^23 + 127 rounds to an integer and leaves the exponent n + 127 in the low bits.
  constexpr float kRound = 12582912.0f + 127.0f;
  const float shifted = z + kRound;
  const float r = z - (shifted - kRound);
  float q = 1.5353362e-4f;
  q = q * r + 1.33988739e-3f;
  q = q * r + 9.61843692e-3f;
  q = q * r + 5.55033237e-2f;
  q = q * r + 2.40226477e-1f;
  q = q * r + 6.93147182e-1f;
  return (q * r + 1.0f) * bits_float(float_bits(shifted) << 23);
#endif
}

// 2^z for z <= 128 or NaN: 0 below 2^-126.
APEX_TE_HD float power_of_two_capped(float z) {
#if !defined(__CUDA_ARCH__) || defined(APEX_TE_PORTABLE)
  z = z < -127.0f ? -127.0f : z;  // NaN fails the comparison and stays
#endif
  return power_of_two_within(z);
}

// 2^z: 0 below 2^-126, infinity above 2^127.5.
APEX_TE_HD float power_of_two(float z) {
#if !defined(__CUDA_ARCH__) || defined(APEX_TE_PORTABLE)
  z = z > 128.0f ? 128.0f : z;
#endif
  return power_of_two_capped(z);
}

// 1 / y for y >= 1, infinity and NaN included.
APEX_TE_HD float reciprocal(float y) {
#if defined(__CUDA_ARCH__) && !defined(APEX_TE_PORTABLE)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(y));
  return result;
#else
  return 1.0f / y;
#endif
}

constexpr float kLog2E = 1.442695041f;

// e^y: 0 below 2^-126 or less, infinity above 2^127.5.
template <bool kFine>
APEX_TE_HD float power_of_e(float y) {
#if defined(__CUDA_ARCH__)
  return kFine ? expf(y) : power_of_two(kLog2E * y);
#else
  return exp_fast(y);
#endif
}

// x / y for y >= 1, infinity and NaN included.
template <bool kFine>
APEX_TE_HD float ratio(float x, float y) {
#if defined(__CUDA_ARCH__)
  return kFine ? x / y : x * reciprocal(y);
#else
  return x / y;
#endif
}

// x / (1 + power) for power >= 0, or with is_lower x power / (1 + power). Where the result is
// nearly x it is the difference to x that is rounded: half an ulp, where 1 + power would bring
// another half.
template <bool kFine>
APEX_TE_HD float gated_value(float x, float power, bool is_lower = false) {
#if defined(__CUDA_ARCH__)
  if (!kFine) return ratio<kFine>(x, 1.0f + power);
#endif
  const bool is_near = !is_lower && power < 0.5f && power > 0.0f;  // none from an infinite x
  const float quotient = ratio<kFine>(is_near || is_lower ? x * power : x, 1.0f + power);
  return is_near ? x - quotient : quotient;
}

// s + y s (1 - s), the derivative of x s, for either s or rest = 1 - s with all its digits, the
// smaller of the two: little is added to 1, or 1 + y has most of the sum.
APEX_TE_HD float gated_derivative(float y, float s, float rest, bool is_lower) {
  const float upper = mul_add(rest, mul_add(y, s, -1.0f), 1.0f);
  const float lower = s * mul_add(-y, s, 1.0f + y);
  return is_lower ? lower : upper;
}

// s = 1 / (1 + power), or with is_lower 1 - 1 / (1 + power), for power <= 1; s (1 - s) without the
// cancellation of 1 - s; and x s.
struct Logistic {
  float s, rest, product, value;
};
template <bool kFine>
APEX_TE_HD Logistic logistic(float x, float power, bool is_lower) {
  const float sum = 1.0f + power;
  const float larger = ratio<kFine>(1.0f, sum);
  const float smaller = power * larger;
  const float s = is_lower ? smaller : larger;
#if defined(__CUDA_ARCH__)
  if (!kFine) return Logistic{s, is_lower ? larger : smaller, smaller * larger, x * s};
#endif
  const float value = gated_value<kFine>(x, power, is_lower);
  // The difference is exact, so that in the product its error and that of `larger` nearly cancel; a
  // small one would have few digits.
  const float product = (power > 0.0625f ? 1.0f - larger : smaller) * larger;
  return Logistic{s, is_lower ? larger : smaller, product, value};
}

constexpr float kTwoSqrt2OverPi = 1.595769122f, kCubic = 0.044715f;  // of gelu's tanh form

// P(X <= x) of a normal distribution. *with_density, where it is not null, receives that plus
// x exp(-x^2 / 2) / sqrt(2 pi), the derivative of x P(X <= x).
template <bool kFine>
APEX_TE_HD float normal_cdf(float x, float* with_density = nullptr) {
  constexpr float kInvSqrt2Pi = 0.3989422804f;
#if defined(__CUDA_ARCH__)
  // Nothing cancels in the sum from here on, and below a tail's relative error matters little.
  if (kFine && x > -1.0f) {
    constexpr float kSqrtHalf = 0.7071067812f;
    const float cdf = 0.5f * (1.0f + erff(x * kSqrtHalf));
    if (with_density) *with_density = fmaf(x, kInvSqrt2Pi * expf(-0.5f * x * x), cdf);
    return cdf;
  }
#endif
  // exp(-x^2 / 2) times a polynomial in t = 1 / (1 + 0.295 |x|), fitted over |x| <= 14 for the
  // smallest relative error, 3.7e-8.
  const float t = reciprocal(mul_add(0.295f, fabsf(x), 1.0f));
  const float bell = power_of_two_capped(x * x * (-0.5f * kLog2E));
  float m = 0.0394211709f;
  m = mul_add(m, t, -0.183406264f);
  m = mul_add(m, t, 0.271016777f);
  m = mul_add(m, t, -0.117071271f);
  m = mul_add(m, t, 0.166289076f);
  m = mul_add(m, t, 0.0847447664f);
  m = mul_add(m, t, 0.1216994f);
  m = mul_add(m, t, 0.117289342f);
  m = mul_add(m, t, 1.7006998e-05f);
  if (with_density) {
    const float tail = bell * mul_add(-kInvSqrt2Pi, fabsf(x), m);
    *with_density = x > 0.0f ? 1.0f - tail : tail;
  }
  const float tail = bell * m;
  return x > 0.0f ? 1.0f - tail : tail;
}

// a * b + c, but a where c is 0: far below 0, where c has underflowed, the sum's sign is a's.
APEX_TE_HD float sum_with_tail(float a, float b, float c) {
  const float sum = mul_add(a, b, c);
  return c == 0.0f ? a : sum;
}

// The value; *derivative receives f'(x) where it is not null. alpha is swish's.
template <Activation kAct, bool kFine = true>
APEX_TE_HD float activate(float x, float* derivative = nullptr, float alpha = 1.0f) {
  if (kAct == Activation::kGelu) {
    constexpr float kA = -kLog2E * kTwoSqrt2OverPi, kB = kA * kCubic;
    const float square = x * x;
    if (!derivative) return gated_value<kFine>(x, power_of_two(x * mul_add(kB, square, kA)));
    // Beyond, s is 0 or 1, and 0 times the slope must not become 0 times infinity.
    const float bounded = square < 1e4f ? square : 1e4f;
    const float z = x * mul_add(kB, bounded, kA);
    const Logistic g = logistic<kFine>(x, power_of_two_capped(-fabsf(z)), !(z < 0.0f));
    const float slope = mul_add(3.0f * kTwoSqrt2OverPi * kCubic, bounded, kTwoSqrt2OverPi);
    *derivative = sum_with_tail(x * g.product, slope, g.s);
    return g.value;
  }
  if (kAct == Activation::kGeluErf) {
    return x * normal_cdf<kFine>(x, derivative);
  }
  if (kAct == Activation::kRelu || kAct == Activation::kSquaredRelu) {
    const float y = x <= 0.0f ? 0.0f : x;  // NaN stays
    if (kAct == Activation::kSquaredRelu) {
      if (derivative) *derivative = 2.0f * y;
      return y * y;
    }
    const float slope = x <= 0.0f ? 0.0f : 1.0f;
    if (derivative) *derivative = x != x ? x : slope;
    return y;
  }
  const float factor = kAct == Activation::kQuickGelu ? 1.702f
                       : kAct == Activation::kSwish   ? alpha
                                                      : 1.0f;
  constexpr bool kIsSigmoid = kAct == Activation::kSigmoid;
  const float y = -factor * x;
  if (!derivative) return ratio<kFine>(kIsSigmoid ? 1.0f : x, 1.0f + power_of_e<kFine>(y));
  const float power = power_of_e<kFine>(-fabsf(y));
  const bool is_lower = !(y < 0.0f);
  const Logistic g = logistic<kFine>(x, power, is_lower);
  if (kIsSigmoid)
    *derivative = g.product;
  else if (kFine && kAct == Activation::kSilu)
    *derivative = gated_derivative(x, g.s, g.rest, is_lower);
  else
    *derivative = sum_with_tail(x * g.product, factor, g.s);
  return kIsSigmoid ? g.s : g.value;
}

// f'(x) of x sigmoid(g(x)), in fewer operations than with the value. Beyond the bounds, where it is
// 0 or 1 to within 2e-36, it is that of a bound: so 2^z is finite and 0 is met by no infinity.
template <Activation kAct, bool kFine>
APEX_TE_HD float bounded_derivative(float x) {
  constexpr bool kIsGelu = kAct == Activation::kGelu;
  constexpr float kFactor = kAct == Activation::kQuickGelu ? 1.702f : 1.0f;
  constexpr float kBound = kIsGelu ? 10.0f : 87.0f / kFactor;
  const float above = x > -kBound ? x : -kBound;
  const float bounded = above < kBound ? above : kBound;
  float power, slope;
  if (kIsGelu) {
    const float square = bounded * bounded;
    power = power_of_two_within(
        bounded * mul_add(-kLog2E * kTwoSqrt2OverPi * kCubic, square, -kLog2E * kTwoSqrt2OverPi));
    slope = mul_add(3.0f * kTwoSqrt2OverPi * kCubic, square, kTwoSqrt2OverPi);
  } else {
    power = power_of_e<kFine>(-kFactor * bounded);
    slope = kFactor;
  }
  const float s = ratio<kFine>(1.0f, 1.0f + power);
  const float derivative = kFine ? gated_derivative(bounded * slope, s, power * s, power > 1.0f)
                                 : mul_add(bounded, slope * (power * s * s), s);
  return mul_add(x, 0.0f, derivative);  // NaN where x is NaN or infinite
}

// dy f'(x). Where relu's derivative is 0 the result is 0, whatever dy is.
template <Activation kAct, bool kFine = true>
APEX_TE_HD float activation_gradient(float x, float dy) {
  if (kAct == Activation::kGelu || kAct == Activation::kQuickGelu || kAct == Activation::kSilu)
    return dy * bounded_derivative<kAct, kFine>(x);
  float derivative;
  activate<kAct, kFine>(x, &derivative);
  const float result = dy * derivative;
  if (kAct != Activation::kRelu && kAct != Activation::kSquaredRelu) return result;
  return derivative == 0.0f ? 0.0f : result;
}

}  // namespace apex_te
