// Row loops of vec.h in AVX2 and F16C, for conversions that a compiler vectorizes poorly.
//
// Each gives the bits of the portable loop of the same name and is called only where use_avx2().
#pragma once

#include "common/cpu/isa.h"
#include "common/cpu/portable.h"
#include "common/numerics/codec.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define APEX_TE_AVX2 APEX_TE_TARGET_AVX2 APEX_TE_ONCE inline
#define APEX_TE_AVX2_INLINE APEX_TE_TARGET_AVX2 APEX_TE_INLINE

namespace apex_te {
namespace avx2 {

constexpr int kStep = 32;  // elements that a loop handles at once

APEX_TE_AVX2_INLINE __m256i load_words(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

// 16 elements as two vectors of float magnitudes, in whichever order join() undoes, and 16 words
// whose top bits are the signs, in the order of join()'s result.
struct Wide {
  __m256 a, b;
  __m256i signs;
};

APEX_TE_AVX2_INLINE Wide load_wide(const BFloat16* x, __m256i& amax) {
  const __m256i in = load_words(x);
  const __m256i magnitude = _mm256_and_si256(in, _mm256_set1_epi16(0x7FFF));
  amax = _mm256_max_epu16(amax, magnitude);
  const __m256i odd = _mm256_and_si256(magnitude, _mm256_set1_epi32(int(0xFFFF0000u)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 16)), _mm256_castsi256_ps(odd), in};
}
APEX_TE_AVX2_INLINE Wide load_wide(const Half* x, __m256i& amax) {
  const __m256i in = load_words(x);
  const __m256i magnitude = _mm256_and_si256(in, _mm256_set1_epi16(0x7FFF));
  amax = _mm256_max_epu16(amax, magnitude);
  // The order of packs_epi32, which joins a and b: a's low half, b's low half, then the high ones.
  const __m256i order = _mm256_permute4x64_epi64(in, _MM_SHUFFLE(3, 1, 2, 0));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(magnitude)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(magnitude, 1)), order};
}
APEX_TE_AVX2_INLINE Wide load_wide(const float* x, __m256i& amax) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  const __m256i in_a = load_words(x), in_b = load_words(x + 8);
  const __m256i a = _mm256_and_si256(in_a, mask), b = _mm256_and_si256(in_b, mask);
  amax = _mm256_max_epu32(amax, _mm256_max_epu32(a, b));
  return {_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), _mm256_packs_epi32(in_a, in_b)};
}

// Two vectors of words below 2^15 to one of 16-bit words, in the order of load_wide's signs.
APEX_TE_AVX2_INLINE __m256i join(BFloat16, __m256i a, __m256i b) {
  return _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xAA);
}
APEX_TE_AVX2_INLINE __m256i join(Half, __m256i a, __m256i b) { return _mm256_packs_epi32(a, b); }
APEX_TE_AVX2_INLINE __m256i join(float, __m256i a, __m256i b) { return _mm256_packs_epi32(a, b); }

// Bytes of two vectors of 16-bit words in the order of the elements they came from.
APEX_TE_AVX2_INLINE __m256i in_order(BFloat16, __m256i bytes) {
  return _mm256_permute4x64_epi64(bytes, _MM_SHUFFLE(3, 1, 2, 0));
}
APEX_TE_AVX2_INLINE __m256i in_order(Half, __m256i bytes) {
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
APEX_TE_AVX2_INLINE __m256i in_order(float, __m256i bytes) { return in_order(Half{}, bytes); }

APEX_TE_AVX2_INLINE uint32_t largest(__m256i words) {
  alignas(32) uint32_t values[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(values), words);
  uint32_t result = 0;
  for (uint32_t v : values) result = v > result ? v : result;
  return result;
}
// A maximum of load_wide as a float's bits.
APEX_TE_AVX2_INLINE uint32_t amax_bits(float, __m256i amax) { return largest(amax); }
APEX_TE_AVX2_INLINE uint32_t largest_half_word(__m256i amax) {
  const __m128i half =
      _mm_max_epu16(_mm256_castsi256_si128(amax), _mm256_extracti128_si256(amax, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
  return 0xFFFFu - static_cast<uint32_t>(_mm_extract_epi16(least, 0));
}
APEX_TE_AVX2_INLINE uint32_t amax_bits(BFloat16, __m256i amax) {
  return largest_half_word(amax) << 16;
}
APEX_TE_AVX2_INLINE uint32_t amax_bits(Half, __m256i amax) {
  return float_bits(to_float(Half{static_cast<uint16_t>(largest_half_word(amax))}));
}

// Codes without sign of 16 elements. `value` is a magnitude of at most 2^100. Adding the power of
// two whose ulp is the format's step at `value` leaves the number of steps, rounded to nearest
// even, in the sum's mantissa; the steps and the exponent make the code, kBase too large. A value
// above the largest gives more than the largest code.
template <typename Format>
struct FP8Encoder {
  static constexpr int kBase = int(Format::kMinNormalBits >> Format::kShift);
  static constexpr int kMaxCode =
      int((Format::kMaxBits - (uint32_t(127 - Format::kBias) << 23)) >> Format::kShift);

  template <typename T>
  static APEX_TE_AVX2_INLINE __m256i codes_of(const Wide& x, __m256 scale) {
    const __m256i codes =
        join(T{}, steps(_mm256_mul_ps(x.a, scale)), steps(_mm256_mul_ps(x.b, scale)));
    return _mm256_min_epi16(_mm256_sub_epi16(codes, _mm256_set1_epi16(kBase)),
                            _mm256_set1_epi16(kMaxCode));
  }
  // Codes with the signs in the top bits of `signs`.
  static APEX_TE_AVX2_INLINE __m256i with_signs(__m256i codes, __m256i signs) {
    return _mm256_or_si256(codes, signs);
  }
  template <typename T>
  static void encode_any(const T* x, int64_t n, float scale, uint8_t* codes) {
    encode_row_portable<Format>(x, n, scale, codes);
  }

 private:
  static APEX_TE_AVX2_INLINE __m256i steps(__m256 value) {
    const __m256i exponent = _mm256_max_epi32(
        _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7F800000)),
        _mm256_set1_epi32(int(Format::kMinNormalBits)));
    const __m256i magic = _mm256_add_epi32(exponent, _mm256_set1_epi32(Format::kShift << 23));
    const __m256i sum = _mm256_castps_si256(_mm256_add_ps(value, _mm256_castsi256_ps(magic)));
    return _mm256_add_epi32(_mm256_sub_epi32(sum, magic),
                            _mm256_srli_epi32(exponent, Format::kShift));
  }
};

// scales: of 8 elements each, in the order of load_wide, which multiply or divide them.
template <typename Encoder, typename T, bool kDivides = false>
APEX_TE_AVX2_INLINE __m256i encode32(const T* x, const __m256* scales, __m256i& amax) {
  const __m256 one = _mm256_set1_ps(1.0f);
  __m256i codes[2], signs[2];
  for (int half = 0; half < 2; ++half) {
    Wide in = load_wide(x + half * kStep / 2, amax);
    const __m256 a = scales[2 * half], b = scales[2 * half + 1];
    in.a = kDivides ? _mm256_div_ps(in.a, a) : _mm256_mul_ps(in.a, a);
    in.b = kDivides ? _mm256_div_ps(in.b, b) : _mm256_mul_ps(in.b, b);
    codes[half] = Encoder::template codes_of<T>(in, one);
    signs[half] = in.signs;
  }
  const __m256i sign =
      _mm256_and_si256(_mm256_packs_epi16(signs[0], signs[1]), _mm256_set1_epi8(int8_t(0x80)));
  return in_order(T{}, Encoder::with_signs(_mm256_packus_epi16(codes[0], codes[1]), sign));
}
template <typename Encoder, typename T>
APEX_TE_AVX2_INLINE __m256i encode32(const T* x, __m256 scale, __m256i& amax) {
  const __m256 scales[4] = {scale, scale, scale, scale};
  return encode32<Encoder>(x, scales, amax);
}

// Codes of x * scale; returns the largest magnitude of x as bits, NaN above infinity.
template <typename Encoder, typename T>
APEX_TE_AVX2 uint32_t encode_row(const T* x, int64_t n, float scale, uint8_t* codes) {
  constexpr int64_t kChunk = 16 * kStep;
  constexpr uint32_t kLimit = uint32_t(127 + 100) << 23;
  uint32_t amax = 0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = n - begin < kChunk ? n : begin + kChunk;
    __m256i largest = _mm256_setzero_si256();
    int64_t i = begin;
    for (; i + kStep <= end; i += kStep)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                          encode32<Encoder>(x + i, _mm256_set1_ps(scale), largest));
    if (i < end) {
      T rest[kStep] = {};
      uint8_t rest_codes[kStep];
      memcpy(rest, x + i, (end - i) * sizeof(T));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rest_codes),
                          encode32<Encoder>(rest, _mm256_set1_ps(scale), largest));
      memcpy(codes + i, rest_codes, end - i);
    }
    const uint32_t found = amax_bits(T{}, largest);
    // NaN, what overflows far and a negative scale are outside the fast way's domain.
    if (float_bits(bits_float(found) * scale) > kLimit || float_bits(scale) >> 31)
      Encoder::encode_any(x + begin, end - begin, scale, codes + begin);
    amax = found > amax ? found : amax;
  }
  return amax;
}

// FP8 codes as the bits of fp16 numbers, 2^kExponent times too small.
template <typename Format>
struct FP8Decoder;
template <>
struct FP8Decoder<E5M2> {
  static constexpr float kScale = 1.0f;
  static APEX_TE_AVX2_INLINE __m256i to_half(__m256i codes) { return _mm256_slli_epi16(codes, 8); }
};
template <>
struct FP8Decoder<E4M3> {
  static constexpr float kScale = 256.0f;
  static APEX_TE_AVX2_INLINE __m256i to_half(__m256i codes) {
    const __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(codes, 7), 15);
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7F));
    const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F));
    const __m256i half =
        _mm256_blendv_epi8(_mm256_slli_epi16(magnitude, 7), _mm256_set1_epi16(0x7E00), is_nan);
    return _mm256_or_si256(half, sign);
  }
};

struct Floats16 {
  __m256 low, high;
};
template <typename Format>
APEX_TE_AVX2_INLINE Floats16 decode16(const uint8_t* codes) {
  const __m256i half = FP8Decoder<Format>::to_half(
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
  const __m256 scale = _mm256_set1_ps(FP8Decoder<Format>::kScale);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), scale),
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), scale)};
}
template <typename Format>
APEX_TE_AVX2_INLINE void decode16(const uint8_t* codes, float* values) {
  const Floats16 decoded = decode16<Format>(codes);
  _mm256_storeu_ps(values, decoded.low);
  _mm256_storeu_ps(values + 8, decoded.high);
}

template <typename Format>
APEX_TE_AVX2 void decode_row(const uint8_t* codes, int64_t n, float* values) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) decode16<Format>(codes + i, values + i);
  if (i == n) return;
  uint8_t rest[16] = {};
  float rest_values[16];
  memcpy(rest, codes + i, n - i);
  decode16<Format>(rest, rest_values);
  memcpy(values + i, rest_values, (n - i) * sizeof(float));
}

APEX_TE_AVX2 void widen(const Half* x, int64_t n, float* values) {
  const int64_t whole = n / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8)
    _mm256_storeu_ps(values + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  if (whole < n) widen_portable(x + whole, n - whole, values + whole);
}

// 16 values rounded to nearest even.
APEX_TE_AVX2_INLINE void narrow16(const Floats16& in, float* y) {
  _mm256_storeu_ps(y, in.low);
  _mm256_storeu_ps(y + 8, in.high);
}
APEX_TE_AVX2_INLINE __m256i is_nan(__m256 values) {
  return _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
}
// Words of 16 bits in the order that packs_epi32 gives two vectors; a NaN becomes 0x7FFF.
APEX_TE_AVX2_INLINE void store_words(__m256i words, const Floats16& in, void* y) {
  if (_mm256_movemask_ps(_mm256_cmp_ps(in.low, in.high, _CMP_UNORD_Q))) {
    const __m256i nan = _mm256_packs_epi32(is_nan(in.low), is_nan(in.high));
    words = _mm256_blendv_epi8(words, _mm256_set1_epi16(0x7FFF), nan);
  }
  _mm256_storeu_si256(static_cast<__m256i*>(y),
                      _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0)));
}
APEX_TE_AVX2_INLINE void narrow16(const Floats16& in, Half* y) {
  constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m256i words =
      _mm256_set_m128i(_mm256_cvtps_ph(in.high, kRounding), _mm256_cvtps_ph(in.low, kRounding));
  store_words(_mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0)), in, y);
}
APEX_TE_AVX2_INLINE __m256i round_to_bf16(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
}
APEX_TE_AVX2_INLINE void narrow16(const Floats16& in, BFloat16* y) {
  store_words(_mm256_packus_epi32(round_to_bf16(in.low), round_to_bf16(in.high)), in, y);
}

template <typename T>
APEX_TE_AVX2 void narrow(const float* values, int64_t n, T* y) {
  const int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16)
    narrow16({_mm256_loadu_ps(values + i), _mm256_loadu_ps(values + i + 8)}, y + i);
  if (whole < n) narrow_portable(values + whole, n - whole, y + whole);
}

}  // namespace avx2
}  // namespace apex_te
#endif
