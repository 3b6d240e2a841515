// Bit-exact conversions between float and bf16, fp16 and the FP8 formats, for host and device.
//
// Rounding is to nearest even. FP8 encoding saturates: a finite overflow or an infinity gives the
// largest finite value; NaN of either sign gives 0x7F. A NaN becomes 0x7FFF in bf16 and fp16, as
// the GPU's cvt gives it. Formats: OCP OFP8 1.0 (e4m3fn, e5m2), and e4m3fnuz, e5m2fnuz of AMD's
// gfx94x, which have one code for all NaN, 0x80, and neither an infinity nor a negative zero.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define APEX_TE_HD __host__ __device__ __forceinline__
#else
#define APEX_TE_HD inline __attribute__((always_inline))
#endif

namespace apex_te {

APEX_TE_HD uint32_t float_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

APEX_TE_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

APEX_TE_HD float to_float(float x) { return x; }
APEX_TE_HD float to_float(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }
APEX_TE_HD float to_float(Half x) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7FFFu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  // A subnormal is normalised by a subtraction that is exact (no denormal operand: DAZ-safe).
  const uint32_t subnormal =
      float_bits(bits_float((magnitude << 13) + (113u << 23)) - bits_float(113u << 23));
  // A signalling NaN becomes quiet, as every conversion instruction makes it.
  const uint32_t special =
      ((magnitude << 13) + (224u << 23)) | (magnitude > 0x7C00u ? 0x00400000u : 0u);
  const uint32_t bits = magnitude >= 0x7C00u ? special : (magnitude < 0x0400u ? subnormal : normal);
  return bits_float(sign | bits);
#endif
}

template <typename T>
APEX_TE_HD T from_float(float value);
template <>
APEX_TE_HD float from_float<float>(float value) {
  return value;
}
template <>
APEX_TE_HD BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return BFloat16{static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded)};
}
template <>
APEX_TE_HD Half from_float<Half>(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t a = bits & 0x7FFFFFFFu;
  const uint32_t normal = (a - (112u << 23) + 0x0FFFu + ((a >> 13) & 1u)) >> 13;
  // 0.5 has an ulp of 2^-24, fp16's smallest subnormal: the addition rounds to nearest even.
  const uint32_t subnormal = float_bits(bits_float(a) + 0.5f) - float_bits(0.5f);
  uint32_t result = a < 0x38800000u ? subnormal : normal;
  result = a >= 0x477FF000u ? 0x7C00u : result;
  return Half{static_cast<uint16_t>(a > 0x7F800000u ? 0x7FFFu : sign | result)};
}

struct E4M3 {
  static constexpr uint32_t kMaxBits = 0x43E00000u;        // 448
  static constexpr uint32_t kMinNormalBits = 0x3C800000u;  // 2^-6
  static constexpr uint32_t kMagicBits = 141u << 23;       // 2^14, ulp 2^-9
  static constexpr int kShift = 20;
  static constexpr int kBias = 7;
  static constexpr float kMax = 448.0f;
  static constexpr bool kIsFNUZ = false;
};
struct E5M2 {
  static constexpr uint32_t kMaxBits = 0x47600000u;        // 57344
  static constexpr uint32_t kMinNormalBits = 0x38800000u;  // 2^-14
  static constexpr uint32_t kMagicBits = 134u << 23;       // 2^7, ulp 2^-16
  static constexpr int kShift = 21;
  static constexpr int kBias = 15;
  static constexpr float kMax = 57344.0f;
  static constexpr bool kIsFNUZ = false;
};
struct E4M3FNUZ {
  static constexpr uint32_t kMaxBits = 0x43700000u;        // 240
  static constexpr uint32_t kMinNormalBits = 0x3C000000u;  // 2^-7
  static constexpr uint32_t kMagicBits = 140u << 23;       // 2^13, ulp 2^-10
  static constexpr int kShift = 20;
  static constexpr int kBias = 8;
  static constexpr float kMax = 240.0f;
  static constexpr bool kIsFNUZ = true;
};
struct E5M2FNUZ {
  static constexpr uint32_t kMaxBits = 0x47600000u;        // 57344
  static constexpr uint32_t kMinNormalBits = 0x38000000u;  // 2^-15
  static constexpr uint32_t kMagicBits = 133u << 23;       // 2^6, ulp 2^-17
  static constexpr int kShift = 21;
  static constexpr int kBias = 16;
  static constexpr float kMax = 57344.0f;
  static constexpr bool kIsFNUZ = true;
};

// The integer form of the cast; the device code may use the cvt instruction instead
// (common/gpu/device.h), which gives the same bits.
template <typename Format>
APEX_TE_HD uint8_t encode_fp8(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t a = magnitude < Format::kMaxBits ? magnitude : Format::kMaxBits;
  const uint32_t half = (1u << (Format::kShift - 1)) - 1u;
  const uint32_t odd = (a >> Format::kShift) & 1u;
  const uint32_t bias = static_cast<uint32_t>(127 - Format::kBias) << 23;
  const uint32_t normal = (a - bias + half + odd) >> Format::kShift;
  const uint32_t subnormal =
      float_bits(bits_float(a) + bits_float(Format::kMagicBits)) - Format::kMagicBits;
  const uint32_t unsigned_code = a < Format::kMinNormalBits ? subnormal : normal;
  if constexpr (Format::kIsFNUZ) {
    const uint32_t code = unsigned_code == 0u ? 0u : unsigned_code | sign;
    return static_cast<uint8_t>(magnitude > 0x7F800000u ? 0x80u : code);
  } else {
    return static_cast<uint8_t>(magnitude > 0x7F800000u ? 0x7Fu : unsigned_code | sign);
  }
}

// The bits of a finite code's magnitude, in a format with kShift and kBias.
template <typename Format>
APEX_TE_HD uint32_t decode_finite(uint32_t magnitude) {
  constexpr uint32_t kLeast = static_cast<uint32_t>(128 - Format::kBias) << 23;
  const uint32_t normal =
      (magnitude << Format::kShift) + (static_cast<uint32_t>(127 - Format::kBias) << 23);
  // A subnormal is normalised by a subtraction that is exact.
  const uint32_t subnormal =
      float_bits(bits_float((magnitude << Format::kShift) + kLeast) - bits_float(kLeast));
  return magnitude < (1u << (23 - Format::kShift)) ? subnormal : normal;
}

template <typename Format>
APEX_TE_HD float decode_fp8(uint8_t code) {
  static_assert(Format::kIsFNUZ, "the other formats have their own");
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t finite = decode_finite<Format>(code & 0x7Fu);
  return bits_float(code == 0x80u ? 0x7FC00000u : sign | finite);
}
template <>
APEX_TE_HD float decode_fp8<E5M2>(uint8_t code) {
  return to_float(Half{static_cast<uint16_t>(code << 8)});
}
template <>
APEX_TE_HD float decode_fp8<E4M3>(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t finite = decode_finite<E4M3>(magnitude);
  return bits_float(sign | (magnitude == 0x7Fu ? 0x7FC00000u : finite));
}

// |x| as an integer that orders like |x| and puts NaN above infinity.
APEX_TE_HD uint32_t magnitude_bits(float value) { return float_bits(value) & 0x7FFFFFFFu; }

}  // namespace apex_te
