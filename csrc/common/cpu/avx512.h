// Row loops of vec.h in AVX-512: conversions between 16-bit formats and float.
//
// Each gives the bits of the portable loop of the same name and is called only where use_avx512().
#pragma once

#include "common/cpu/isa.h"
#include "common/numerics/codec.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define APEX_TE_AVX512 APEX_TE_TARGET_AVX512 APEX_TE_ONCE inline
#define APEX_TE_AVX512_INLINE APEX_TE_TARGET_AVX512 APEX_TE_INLINE

namespace apex_te {
namespace avx512 {

// Lanes of 16 for the elements from i on. Only masked forms of instructions follow: gcc 12 takes
// the others for uses of uninitialised values.
APEX_TE_AVX512_INLINE __mmask16 lanes_at(int64_t i, int64_t n) {
  return static_cast<__mmask16>(n - i >= 16 ? 0xFFFF : (1 << (n - i)) - 1);
}

APEX_TE_AVX512 void widen(const Half* x, int64_t n, float* values) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = lanes_at(i, n);
    const __m256i words = _mm256_maskz_loadu_epi16(lanes, x + i);
    _mm512_mask_storeu_ps(values + i, lanes, _mm512_maskz_cvtph_ps(lanes, words));
  }
}

APEX_TE_AVX512 void narrow(const float* values, int64_t n, Half* y) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = lanes_at(i, n);
    const __m512 in = _mm512_maskz_loadu_ps(lanes, values + i);
    const __m256i words =
        _mm512_maskz_cvtps_ph(lanes, in, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(in, in, _CMP_UNORD_Q);
    _mm256_mask_storeu_epi16(y + i, lanes,
                             _mm256_mask_blend_epi16(is_nan, words, _mm256_set1_epi16(0x7FFF)));
  }
}

// The compiler vectorizes this one as well as can be.
APEX_TE_AVX512 void narrow(const float* values, int64_t n, BFloat16* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = from_float<BFloat16>(values[i]);
}

// out[c * out_ld + r] = in[r * in_ld + c] for 64 rows and 16 columns of bytes: each lane of 16
// bytes takes 16 rows, four rounds of interleaving rows i and i + 8 make a column of them. With
// `streamed` the lines, which must be aligned, go past the caches.
APEX_TE_AVX512 void transpose_64x16(const uint8_t* in, int64_t in_ld, uint8_t* out, int64_t out_ld,
                                    bool streamed) {
  constexpr __mmask16 kAll = static_cast<__mmask16>(~0);
  constexpr __mmask64 kAllBytes = ~__mmask64{0};
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) {
    const auto row = [&](int r) APEX_TE_TARGET_AVX512 {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + r * in_ld));
    };
    a[i] = _mm512_maskz_broadcast_i32x4(kAll, row(i));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x00F0, row(16 + i));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x0F00, row(32 + i));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0xF000, row(48 + i));
  }
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = _mm512_maskz_unpacklo_epi8(kAllBytes, a[i], a[i + 8]);
      b[2 * i + 1] = _mm512_maskz_unpackhi_epi8(kAllBytes, a[i], a[i + 8]);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
  for (int i = 0; i < 16; ++i) {
    if (streamed)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i * out_ld), a[i]);
    else
      _mm512_storeu_si512(out + i * out_ld, a[i]);
  }
}

}  // namespace avx512
}  // namespace apex_te
#endif
