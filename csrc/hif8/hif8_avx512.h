// HiF8 codes in AVX-512, for avx512::encode_row (common/cpu/encode_avx512.h): the arithmetic of
// hif8_encode (common/numerics/hif8.h) on 32 elements at a time, with tables by exponent.
#pragma once

#include "common/cpu/encode_avx512.h"
#include "hif8/hif8_avx2.h"

#if defined(__x86_64__)

namespace apex_te {
namespace avx512 {

// Entries are exponents from kFirst, where every code is 0, to kLast, where all are too large.
template <bool kSaturate>
struct Hif8Tables {
  static constexpr int kFirst = -24, kLast = 16;
  uint16_t half[64];  // of the last place that stays of a 4-bit mantissa
  uint16_t code[64];  // of the power of two, and in the upper byte how many bits a mantissa loses

  constexpr Hif8Tables() : half(), code() {
    for (int e = kFirst; e <= kLast; ++e) {
      const int at = e - kFirst, lost = 4 - hif8_mantissa_bits(e);
      const int whole = 4;  // all of a mantissa is lost
      if (e == kFirst) {
        half[at] = 0;
        code[at] = whole << 8;
      } else if (e <= -16) {
        half[at] = 8;
        code[at] = static_cast<uint16_t>(whole << 8 | (e == -23 ? 1 : e + 23));
      } else if (e <= 14) {
        half[at] = static_cast<uint16_t>(1 << (lost - 1));
        code[at] = static_cast<uint16_t>(lost << 8 | hif8_code(e, 0));
      } else if (e == 15) {  // from 1.25 on too large
        half[at] = 12;
        code[at] = static_cast<uint16_t>(whole << 8 | hif8_code(e, 0));
      } else {
        half[at] = 0;
        code[at] = whole << 8 | (kSaturate ? 0x6E : 0x6F);
      }
    }
  }
};
template <bool kSaturate>
alignas(64) constexpr Hif8Tables<kSaturate> kHif8Tables;

template <bool kSaturate>
struct Hif8Encoder {
  static constexpr bool kZeroHasSign = false;

  // Codes without sign in the order of join.
  static APEX_TE_AVX512_INLINE __m512i codes_of(const Wide& x, __m512 scale_a, __m512 scale_b) {
    using Tables = Hif8Tables<kSaturate>;
    const Tables& tables = kHif8Tables<kSaturate>;
    const __m512i words = join_upper(_mm512_castps_si512(_mm512_mul_ps(x.a, scale_a)),
                                     _mm512_castps_si512(_mm512_mul_ps(x.b, scale_b)));
    // Exponent, from kFirst on, and 4 bits of mantissa.
    const __m512i index = _mm512_maskz_min_epu16(
        kAll32,
        _mm512_maskz_subs_epu16(kAll32, shift_right_words(words, 3),
                                _mm512_set1_epi16((127 + Tables::kFirst) << 4)),
        _mm512_set1_epi16((Tables::kLast - Tables::kFirst) << 4));
    const __m512i rounded =
        _mm512_add_epi16(index, look_up(tables.half, shift_right_words(index, 4)));
    const __m512i entry = look_up(tables.code, shift_right_words(rounded, 4));
    const __m512i mantissa = _mm512_and_si512(rounded, _mm512_set1_epi16(15));
    return _mm512_add_epi16(_mm512_and_si512(entry, _mm512_set1_epi16(0xFF)),
                            _mm512_maskz_srlv_epi16(kAll32, mantissa, shift_right_words(entry, 8)));
  }
  template <typename T>
  static void encode_any(const T* x, int64_t n, float scale, uint8_t* codes) {
    avx2::Hif8Encoder<kSaturate>::encode_any(x, n, scale, codes);
  }

 private:
  static APEX_TE_AVX512_INLINE __m512i look_up(const uint16_t* table, __m512i at) {
    return _mm512_maskz_permutex2var_epi16(kAll32, _mm512_loadu_si512(table), at,
                                           _mm512_loadu_si512(table + 32));
  }
};

// Values of codes. All are bf16 numbers, so a table of those without sign fits in four vectors.
APEX_TE_AVX512 void decode_hif8(const uint8_t* codes, int64_t n, const uint16_t* magnitudes,
                                float* values) {
  __m512i table[4];
  for (int k = 0; k < 4; ++k) table[k] = _mm512_loadu_si512(magnitudes + 32 * k);
  for (int64_t i = 0; i < n; i += 32) {
    const __mmask32 lanes = static_cast<__mmask32>(first_lanes(n - i));
    const __m512i code =
        _mm512_maskz_cvtepu8_epi16(lanes, _mm256_maskz_loadu_epi8(lanes, codes + i));
    const __m512i low = _mm512_maskz_permutex2var_epi16(kAll32, table[0], code, table[1]);
    const __m512i high = _mm512_maskz_permutex2var_epi16(kAll32, table[2], code, table[3]);
    const __mmask32 is_high = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
    const __m512i sign = _mm512_and_si512(_mm512_maskz_slli_epi16(kAll32, code, 8),
                                          _mm512_set1_epi16(int16_t(0x8000)));
    const __m512i value = _mm512_or_si512(_mm512_mask_blend_epi16(is_high, low, high), sign);
    // Code 0x80 is NaN.
    const __m512i words = _mm512_mask_blend_epi16(
        _mm512_cmpeq_epi16_mask(code, _mm512_set1_epi16(0x80)), value, _mm512_set1_epi16(0x7FC0));
    const auto lanes_a = static_cast<__mmask16>(lanes),
               lanes_b = static_cast<__mmask16>(lanes >> 16);
    _mm512_mask_storeu_epi32(values + i, lanes_a,
                             shift_left(_mm512_maskz_cvtepu16_epi32(kAll16, low_half(words)), 16));
    _mm512_mask_storeu_epi32(values + i + 16, lanes_b,
                             shift_left(_mm512_maskz_cvtepu16_epi32(kAll16, high_half(words)), 16));
  }
}

}  // namespace avx512
}  // namespace apex_te
#endif
