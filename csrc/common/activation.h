// Activation functions and their derivatives in fp32, for host and device.
//
// kGelu is the tanh form of Hendrycks and Gimpel (arXiv 1606.08415) written as x * sigmoid(2 u),
// u = sqrt(2/pi) (x + 0.044715 x^3); kGeluErf is the exact form.
#pragma once

#include <cmath>

#include "common/codec.h"

namespace apex_te {

enum class Activation : int32_t {
  kGelu = 0,
  kGeluErf = 1,
  kQuickGelu = 2,
  kRelu = 3,
  kSquaredRelu = 4,
  kSilu = 5,
  kSigmoid = 6,
};

APEX_TE_HD float sigmoid(float x) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.0f, 1.0f + __expf(-x));
#else
  return 1.0f / (1.0f + expf(-x));
#endif
}

// The value; *derivative receives f'(x) where it is not null.
template <Activation kAct>
APEX_TE_HD float activate(float x, float* derivative = nullptr) {
  constexpr float kSqrt2OverPi = 0.7978845608028654f, kCubic = 0.044715f;
  constexpr float kSqrtHalf = 0.7071067811865476f, kInvSqrt2Pi = 0.3989422804014327f;
  if (kAct == Activation::kGelu) {
    const float square = x * x;
    const float s = sigmoid(2.0f * kSqrt2OverPi * x * (1.0f + kCubic * square));
    const float slope = 2.0f * kSqrt2OverPi * (1.0f + 3.0f * kCubic * square);
    if (derivative) *derivative = s + x * s * (1.0f - s) * slope;
    return x * s;
  }
  if (kAct == Activation::kGeluErf) {
    const float cdf = 0.5f * (1.0f + erff(x * kSqrtHalf));
    if (derivative) *derivative = cdf + x * kInvSqrt2Pi * expf(-0.5f * x * x);
    return x * cdf;
  }
  if (kAct == Activation::kQuickGelu) {
    const float s = sigmoid(1.702f * x);
    if (derivative) *derivative = s + 1.702f * x * s * (1.0f - s);
    return x * s;
  }
  if (kAct == Activation::kRelu) {
    if (derivative) *derivative = x > 0.0f ? 1.0f : x != x ? x : 0.0f;
    return x > 0.0f || x != x ? x : 0.0f;
  }
  if (kAct == Activation::kSquaredRelu) {
    const float r = x > 0.0f || x != x ? x : 0.0f;
    if (derivative) *derivative = 2.0f * r;
    return r * r;
  }
  const float s = sigmoid(x);
  if (kAct == Activation::kSilu) {
    if (derivative) *derivative = s + x * s * (1.0f - s);
    return x * s;
  }
  if (derivative) *derivative = s * (1.0f - s);
  return s;
}

}  // namespace apex_te
