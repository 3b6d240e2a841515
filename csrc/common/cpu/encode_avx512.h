// FP8 codes in AVX-512: encode_row of vec.h, with an encoder for each format.
//
// Gives the bits of the portable loop of the same name; called only where use_avx512().
#pragma once

#include "common/cpu/avx2.h"
#include "common/cpu/avx512.h"

#if defined(__x86_64__)

namespace apex_te {
namespace avx512 {

constexpr int64_t kStep = 64;  // elements that a loop handles at once
// Masks for instructions that have a masked form only (see avx512.h).
constexpr __mmask64 kAll64 = ~__mmask64{0};
constexpr __mmask32 kAll32 = ~__mmask32{0};
constexpr __mmask16 kAll16 = static_cast<__mmask16>(~0);
constexpr __mmask8 kAll8 = static_cast<__mmask8>(~0);

APEX_TE_AVX512_INLINE __mmask64 first_lanes(int64_t n) {
  return n >= 64 ? kAll64 : (__mmask64{1} << n) - 1;
}
APEX_TE_AVX512_INLINE __m512i shift_left(__m512i words, int bits) {
  return _mm512_maskz_slli_epi32(kAll16, words, bits);
}
APEX_TE_AVX512_INLINE __m512i shift_right(__m512i words, int bits) {
  return _mm512_maskz_srli_epi32(kAll16, words, bits);
}
APEX_TE_AVX512_INLINE __m512i shift_right_words(__m512i words, int bits) {
  return _mm512_maskz_srli_epi16(kAll32, words, bits);
}

APEX_TE_AVX512_INLINE __m256i low_half(__m512i x) {
  return _mm512_maskz_extracti64x4_epi64(kAll8, x, 0);
}
APEX_TE_AVX512_INLINE __m256i high_half(__m512i x) {
  return _mm512_maskz_extracti64x4_epi64(kAll8, x, 1);
}

// Magnitudes of 32 elements: the even and the odd ones of bf16, else the first and the second half.
struct Wide {
  __m512 a, b;
};

// Elements whose lane is set, the others 0. Raises amax; sets the signs in the order of elements.
APEX_TE_AVX512_INLINE Wide load_wide(const BFloat16* x, __mmask32 lanes, __m512i& amax,
                                     __mmask32& signs) {
  const __m512i in = _mm512_maskz_loadu_epi16(lanes, x);
  const __m512i magnitude = _mm512_and_si512(in, _mm512_set1_epi16(0x7FFF));
  amax = _mm512_maskz_max_epu16(kAll32, amax, magnitude);
  signs = _mm512_movepi16_mask(in);
  const __m512i odd = _mm512_and_si512(magnitude, _mm512_set1_epi32(int(0xFFFF0000u)));
  return {_mm512_castsi512_ps(shift_left(magnitude, 16)), _mm512_castsi512_ps(odd)};
}
APEX_TE_AVX512_INLINE Wide load_wide(const Half* x, __mmask32 lanes, __m512i& amax,
                                     __mmask32& signs) {
  const __m512i in = _mm512_maskz_loadu_epi16(lanes, x);
  const __m512i magnitude = _mm512_and_si512(in, _mm512_set1_epi16(0x7FFF));
  amax = _mm512_maskz_max_epu16(kAll32, amax, magnitude);
  signs = _mm512_movepi16_mask(in);
  return {_mm512_maskz_cvtph_ps(kAll16, low_half(magnitude)),
          _mm512_maskz_cvtph_ps(kAll16, high_half(magnitude))};
}
APEX_TE_AVX512_INLINE Wide load_wide(const float* x, __mmask32 lanes, __m512i& amax,
                                     __mmask32& signs) {
  const __m512i mask = _mm512_set1_epi32(0x7FFFFFFF);
  const __m512i in_a = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(lanes), x);
  const __m512i in_b = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(lanes >> 16), x + 16);
  const __m512i a = _mm512_and_si512(in_a, mask), b = _mm512_and_si512(in_b, mask);
  amax = _mm512_maskz_max_epu32(kAll16, amax, _mm512_maskz_max_epu32(kAll16, a, b));
  signs = _mm512_kunpackw(_mm512_movepi32_mask(in_b), _mm512_movepi32_mask(in_a));
  return {_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)};
}

// A maximum of load_wide as a float's bits.
template <typename T>
APEX_TE_AVX512_INLINE uint32_t amax_bits(T, __m512i amax) {
  const __m256i low = low_half(amax), high = high_half(amax);
  return avx2::amax_bits(
      T{}, sizeof(T) == 2 ? _mm256_max_epu16(low, high) : _mm256_max_epu32(low, high));
}

// Two vectors of words, of which the low halves count, to 16-bit words in turns.
APEX_TE_AVX512_INLINE __m512i join(__m512i a, __m512i b) {
  return _mm512_mask_blend_epi16(0xAAAAAAAAu, a, shift_left(b, 16));
}
// Joins the upper halves.
APEX_TE_AVX512_INLINE __m512i join_upper(__m512i a, __m512i b) {
  return _mm512_mask_blend_epi16(0xAAAAAAAAu, shift_right(a, 16), b);
}

// Bytes that _mm512_packus_epi16 made of two results of join, in the order of elements.
APEX_TE_AVX512_INLINE __m512i in_order(BFloat16, __m512i bytes) {
  return _mm512_maskz_permutexvar_epi64(kAll8, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes);
}
template <typename T>
APEX_TE_AVX512_INLINE __m512i in_order(T, __m512i bytes) {
  const __m512i in_lanes = _mm512_maskz_shuffle_epi8(
      kAll64, bytes, _mm512_set4_epi32(0x0F0D0B09, 0x0E0C0A08, 0x07050301, 0x06040200));
  return _mm512_maskz_permutexvar_epi32(
      kAll16, _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), in_lanes);
}

// Codes without sign of 32 elements as 16-bit words in the order of join. The arithmetic of
// avx2::FP8Encoder: the sum has the steps in its low bits, the exponent in its upper ones. The
// multiplication by a power of two is exact, so that the sum is rounded once, fused or not.
template <typename Format>
struct FP8Encoder {
  static constexpr bool kZeroHasSign = true;

  static APEX_TE_AVX512_INLINE __m512i codes_of(const Wide& x, __m512 scale_a, __m512 scale_b) {
    return codes_of(_mm512_mul_ps(x.a, scale_a), _mm512_mul_ps(x.b, scale_b));
  }
  static APEX_TE_AVX512_INLINE __m512i codes_of(__m512 a, __m512 b) {
    constexpr int kBase = (int(Format::kMinNormalBits >> 23) + Format::kShift)
                          << (23 - Format::kShift);
    const __m512i codes = join(steps(a), steps(b));
    return _mm512_maskz_min_epi16(kAll32, _mm512_sub_epi16(codes, _mm512_set1_epi16(kBase)),
                                  _mm512_set1_epi16(avx2::FP8Encoder<Format>::kMaxCode));
  }
  template <typename T>
  static void encode_any(const T* x, int64_t n, float scale, uint8_t* codes) {
    encode_row_portable<Format>(x, n, scale, codes);
  }

 private:
  static APEX_TE_AVX512_INLINE __m512i steps(__m512 value) {
    const __m512i exponent = _mm512_maskz_max_epi32(
        kAll16, _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7F800000)),
        _mm512_set1_epi32(int(Format::kMinNormalBits)));
    const __m512i sum = _mm512_castps_si512(_mm512_fmadd_ps(
        _mm512_castsi512_ps(exponent), _mm512_set1_ps(float(1 << Format::kShift)), value));
    return _mm512_add_epi32(sum, shift_right(sum, Format::kShift));
  }
};

// FP8Encoder with scales that divide.
template <typename Format>
struct FP8Divider {
  static constexpr bool kZeroHasSign = true;
  static APEX_TE_AVX512_INLINE __m512i codes_of(const Wide& x, __m512 scale_a, __m512 scale_b) {
    return FP8Encoder<Format>::codes_of(_mm512_div_ps(x.a, scale_a), _mm512_div_ps(x.b, scale_b));
  }
};

// 64 elements: their magnitudes and which are negative.
struct Wide64 {
  Wide first, second;
  __mmask64 negative;
};
template <typename T>
APEX_TE_AVX512_INLINE Wide64 load_wide64(const T* x, __mmask64 lanes, __m512i& amax) {
  __mmask32 signs[2];
  Wide64 wide;
  wide.first = load_wide(x, static_cast<__mmask32>(lanes), amax, signs[0]);
  wide.second = load_wide(x + 32, static_cast<__mmask32>(lanes >> 32), amax, signs[1]);
  wide.negative = _mm512_kunpackd(signs[1], signs[0]);
  return wide;
}

// Codes of 64 elements of type T; scales: of the first 32's a and b, then of the second's.
template <typename Encoder, typename T>
APEX_TE_AVX512_INLINE __m512i encode64(const Wide64& x, const __m512* scales) {
  const __m512i codes =
      in_order(T{}, _mm512_packus_epi16(Encoder::codes_of(x.first, scales[0], scales[1]),
                                        Encoder::codes_of(x.second, scales[2], scales[3])));
  const __mmask64 negative =
      Encoder::kZeroHasSign ? x.negative : _mm512_mask_test_epi8_mask(x.negative, codes, codes);
  return _mm512_mask_add_epi8(codes, negative, codes, _mm512_set1_epi8(int8_t(0x80)));
}
template <typename Encoder, typename T>
APEX_TE_AVX512_INLINE __m512i encode64(const T* x, __mmask64 lanes, const __m512* scales,
                                       __m512i& amax) {
  return encode64<Encoder, T>(load_wide64(x, lanes, amax), scales);
}

// Codes of x * scale; returns the largest magnitude of x as bits, NaN above infinity.
template <typename Encoder, typename T>
APEX_TE_AVX512 uint32_t encode_row(const T* x, int64_t n, float scale, uint8_t* codes) {
  constexpr int64_t kChunk = 16 * kStep;
  constexpr uint32_t kLimit = uint32_t(127 + 100) << 23;
  const __m512 by = _mm512_set1_ps(scale), scales[4] = {by, by, by, by};
  uint32_t amax = 0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = n - begin < kChunk ? n : begin + kChunk;
    __m512i largest = _mm512_setzero_si512();
    int64_t i = begin;
    for (; i + kStep <= end; i += kStep)
      _mm512_storeu_si512(codes + i, encode64<Encoder>(x + i, kAll64, scales, largest));
    if (i < end) {
      const __mmask64 lanes = first_lanes(end - i);
      _mm512_mask_storeu_epi8(codes + i, lanes, encode64<Encoder>(x + i, lanes, scales, largest));
    }
    const uint32_t found = amax_bits(T{}, largest);
    // NaN, what overflows far and a negative scale are outside the fast way's domain.
    if (float_bits(bits_float(found) * scale) > kLimit || float_bits(scale) >> 31)
      Encoder::encode_any(x + begin, end - begin, scale, codes + begin);
    amax = found > amax ? found : amax;
  }
  return amax;
}

}  // namespace avx512
}  // namespace apex_te
#endif
