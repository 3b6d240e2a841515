// HiF8 codes in AVX2, for avx2::encode_row (common/cpu/avx2.h): the arithmetic of hif8_encode
// (common/numerics/hif8.h) on 16 elements at a time.
#pragma once

#include "common/cpu/avx2.h"
#include "common/numerics/hif8.h"

namespace apex_te {

template <bool kSaturate>
constexpr Hif8EncodeTable kHif8Codes = hif8_encode_table(kSaturate);

#if defined(__x86_64__)
namespace avx2 {

template <bool kSaturate>
struct Hif8Encoder {
  // Codes without sign.
  template <typename T>
  static APEX_TE_AVX2_INLINE __m256i codes_of(const Wide& x, __m256 scale) {
    return encode16(
        join(T{}, indices(_mm256_mul_ps(x.a, scale)), indices(_mm256_mul_ps(x.b, scale))));
  }
  // A zero has no sign.
  static APEX_TE_AVX2_INLINE __m256i with_signs(__m256i codes, __m256i signs) {
    const __m256i is_zero = _mm256_cmpeq_epi8(codes, _mm256_setzero_si256());
    return _mm256_or_si256(codes, _mm256_andnot_si256(is_zero, signs));
  }
  template <typename T>
  static APEX_TE_ONCE void encode_any(const T* x, int64_t n, float scale, uint8_t* codes) {
    const uint8_t* table = kHif8Codes<kSaturate>.codes;
    for (int64_t i = 0; i < n; ++i)
      codes[i] = table[float_bits(to_float(x[i]) * scale) >> kHif8Shift];
  }

 private:
  static APEX_TE_AVX2_INLINE __m256i words(int value) {
    return _mm256_set1_epi16(static_cast<int16_t>(value));
  }
  static APEX_TE_AVX2_INLINE __m256i indices(__m256 value) {
    return _mm256_srli_epi32(_mm256_castps_si256(value), kHif8Shift);
  }
  // Entry `at` (below 16) of a table of bytes as the low or the high byte of a word.
  static APEX_TE_AVX2_INLINE __m256i low_byte(__m128i table, __m256i at) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table),
                               _mm256_or_si256(at, words(0x8000)));
  }
  static APEX_TE_AVX2_INLINE __m256i high_byte(__m128i table, __m256i at) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table),
                               _mm256_or_si256(_mm256_slli_epi16(at, 8), words(0x0080)));
  }

  // index: exponent and 4 bits of mantissa of a magnitude.
  static APEX_TE_AVX2_INLINE __m256i encode16(__m256i index) {
    // Half of the last place that stays: 1, 2, 4 or, where only powers of two are left, 8.
    __m256i e = _mm256_abs_epi16(_mm256_sub_epi16(_mm256_srli_epi16(index, 4), words(127)));
    const __m256i from4 = _mm256_cmpgt_epi16(e, words(3));
    const __m256i from8 = _mm256_slli_epi16(_mm256_cmpgt_epi16(e, words(7)), 1);
    const __m256i from16 = _mm256_slli_epi16(_mm256_cmpgt_epi16(e, words(15)), 2);
    const __m256i half =
        _mm256_sub_epi16(words(1), _mm256_add_epi16(from4, _mm256_add_epi16(from8, from16)));
    const __m256i rounded = _mm256_add_epi16(index, half);
    const __m256i exponent = _mm256_srli_epi16(rounded, 4);  // with the float's bias
    e = _mm256_abs_epi16(_mm256_sub_epi16(exponent, words(127)));
    // The mantissa loses 1, 2 or 3 of its 4 bits: times 2^15, 2^14 or 2^13, over 2^16.
    const __m256i factor = high_byte(
        _mm_setr_epi8(-128, -128, -128, -128, 64, 64, 64, 64, 32, 32, 32, 32, 32, 32, 32, 32), e);
    const __m256i mantissa = _mm256_mulhi_epu16(_mm256_and_si256(rounded, words(15)), factor);
    const __m256i base = low_byte(_mm_setr_epi8(0x08, 0x10, 0x20, 0x28, 0x40, 0x44, 0x48, 0x4C,
                                                0x60, 0x62, 0x64, 0x66, 0x68, 0x6A, 0x6C, 0x6E),
                                  e);
    const __m256i sign =
        low_byte(_mm_setr_epi8(0, 8, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16), e);
    const __m256i negative = _mm256_and_si256(_mm256_cmpgt_epi16(words(127), exponent), sign);
    __m256i codes = _mm256_add_epi16(_mm256_add_epi16(base, negative), mantissa);
    // 2^-22 to 2^-16 are codes 1 to 7; from 2^-23 on a magnitude is at least 2^-22.
    const __m256i is_some = _mm256_cmpgt_epi16(index, words((127 - 23) * 16 - 1));
    const __m256i small = _mm256_max_epi16(_mm256_subs_epu16(exponent, words(127 - 23)),
                                           _mm256_srli_epi16(is_some, 15));
    codes = _mm256_blendv_epi8(codes, small, _mm256_cmpgt_epi16(words(127 - 15), exponent));
    const __m256i is_large = _mm256_cmpgt_epi16(index, words((127 + 15) * 16 + 3));
    return _mm256_blendv_epi8(codes, words(kSaturate ? 0x6E : 0x6F), is_large);
  }
};

}  // namespace avx2
#endif

}  // namespace apex_te
