// The exponential for host loops: plain C++ that vectorizes, the same bits at any vector width.
#pragma once

#include "common/numerics/codec.h"

namespace apex_te {

// exp(x) within 1.5 ulp; NaN stays, overflow gives infinity, small results become subnormal and
// then 0. x = n ln 2 + r with ln 2 in two parts; e^r = 1 + r + r^2 q(r), where q is a minimax fit
// for |r| <= ln(2) / 2; 2^n in two factors, since 2^128 and 2^-149 are no normal numbers.
APEX_TE_HD float exp_fast(float x) {
  constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float low = x < -104.5f ? -104.5f : x;
  const float bounded = low > 89.0f ? 89.0f : low;  // NaN fails both comparisons and stays
  const float shifted = bounded * kLog2e + kRound;
  const float n = shifted - kRound;
  const float r = bounded - n * kLn2High - n * kLn2Low;
  float q = 0.0013814539f;
  q = q * r + 0.0083687454f;
  q = q * r + 0.041668389f;
  q = q * r + 0.16666521f;
  q = q * r + 0.49999994f;
  const float e = 1.0f + (r + r * r * q);
  const int32_t exponent = static_cast<int32_t>(float_bits(shifted) - float_bits(kRound));
  const int32_t half = exponent >> 1;
  const float first = bits_float(static_cast<uint32_t>(half + 127) << 23);
  const float second = bits_float(static_cast<uint32_t>(exponent - half + 127) << 23);
  const float result = e * first * second;
  return x != x ? x : result;
}

}  // namespace apex_te
