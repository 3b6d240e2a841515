// Loops of blocks.h in AVX-512, called only where use_avx512(); no bit differs.
#pragma once

#include <type_traits>

#include "common/cpu/encode_avx512.h"
#include "common/cpu/stream.h"

#if defined(__x86_64__)

namespace apex_te {
namespace avx512 {

// Codes of a row, each block of kBlock elements times its scale.
template <typename Encoder, int64_t kBlock, typename T>
APEX_TE_AVX512 void encode_blocks(const T* x, int64_t n, const float* scales, uint8_t* codes) {
  __m512i amax = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += kStep) {
    const int64_t second = i + 32 < n ? i + 32 : i;
    const __m512 a = _mm512_set1_ps(scales[i / kBlock]);
    const __m512 b = _mm512_set1_ps(scales[second / kBlock]);
    const __m512 by[4] = {a, a, b, b};
    const __mmask64 lanes = first_lanes(n - i);
    _mm512_mask_storeu_epi8(codes + i, lanes, encode64<Encoder>(x + i, lanes, by, amax));
  }
}

// n scales, a multiple of 32, in the order of load_wide.
template <typename T>
APEX_TE_AVX512 void order_scales(float* scales, int64_t n) {
  if (!std::is_same<T, BFloat16>::value) return;
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  for (int64_t i = 0; i < n; i += 32) {
    const __m512 low = _mm512_loadu_ps(scales + i), high = _mm512_loadu_ps(scales + i + 16);
    _mm512_storeu_ps(scales + i, _mm512_maskz_permutex2var_ps(kAll16, low, even, high));
    _mm512_storeu_ps(scales + i + 16, _mm512_maskz_permutex2var_ps(kAll16, low, odd, high));
  }
}

// Element-wise maximum of magnitudes.
template <typename T>
APEX_TE_AVX512_INLINE __m512i larger(__m512i a, __m512i b) {
  return sizeof(T) == 2 ? _mm512_maskz_max_epu16(kAll32, a, b)
                        : _mm512_maskz_max_epu32(kAll16, a, b);
}

// A row's blocks to their amaxes, its columns' magnitudes raised, its elements copied to panels of
// kPanelCols columns, `stride` elements from one to the next; what is null is left out.
template <int64_t kBlock, int64_t kPanelCols, typename T, typename Column>
APEX_TE_AVX512 void scan_row(const T* x, int64_t n, uint32_t* amaxes, Column* columns, T* panels,
                             int64_t stride) {
  constexpr int64_t kPerVector = 64 / static_cast<int64_t>(sizeof(T));
  const __m512i mask = sizeof(T) == 2 ? _mm512_set1_epi16(0x7FFF) : _mm512_set1_epi32(0x7FFFFFFF);
  for (int64_t block = 0; block < n; block += kBlock) {
    __m512i amax = _mm512_setzero_si512();
    for (int64_t i = block; i < block + kBlock; i += kPerVector) {
      __m512i in;
      if (i + kPerVector <= n)
        in = _mm512_loadu_si512(x + i);
      else if (i >= n)
        break;
      else
        in = _mm512_maskz_loadu_epi8((__mmask64{1} << ((n - i) * sizeof(T))) - 1, x + i);
      if (panels) _mm512_storeu_si512(panels + i / kPanelCols * stride + i % kPanelCols, in);
      const __m512i magnitude = _mm512_and_si512(in, mask);
      if (columns)
        _mm512_storeu_si512(columns + i, larger<T>(magnitude, _mm512_loadu_si512(columns + i)));
      amax = larger<T>(magnitude, amax);
    }
    if (amaxes) amaxes[block / kBlock] = amax_bits(T{}, amax);
  }
}

// A panel of kPanelCols columns, each row's blocks of kBlock elements times their scales to
// `rowwise`, each column times its scale to `codes`, rows of kPanelCols; what is null is left out.
// Meanwhile asks for a panel of a matrix that is due next, if `next` is not null.
template <typename Encoder, int64_t kBlock, int64_t kPanelCols, typename T>
APEX_TE_AVX512 void encode_panel(const T* panel, int64_t rows, int64_t cols, const float* scales,
                                 int64_t scales_ld, uint8_t* rowwise, int64_t rowwise_ld,
                                 bool streamed, const float* column_scales, int64_t block_rows,
                                 uint8_t* codes, const T* next, int64_t next_ld) {
  streamed = streamed && is_line_aligned(rowwise, rowwise_ld);
  __m512i amax = _mm512_setzero_si512();
  for (int64_t c = 0; c < cols; c += kStep) {
    const __mmask64 lanes = first_lanes(cols - c);
    const int64_t first = c / kBlock, second = c + 32 < cols ? (c + 32) / kBlock : first;
    for (int64_t r0 = 0; r0 < rows; r0 += block_rows) {
      __m512 by_column[4] = {};
      if (codes)
        for (int k = 0; k < 4; ++k)
          by_column[k] = _mm512_loadu_ps(column_scales + r0 / block_rows * kPanelCols + c + 16 * k);
      const int64_t end = r0 + block_rows < rows ? r0 + block_rows : rows;
      for (int64_t r = r0; r < end; ++r) {
        if (next)
          for (int64_t i = 0; i < kStep; i += kLineBytes / static_cast<int64_t>(sizeof(T)))
            __builtin_prefetch(next + r * next_ld + c + i, 0, 2);
        const Wide64 x = load_wide64(panel + r * kPanelCols + c, kAll64, amax);
        if (rowwise) {
          const __m512 a = _mm512_set1_ps(scales[r * scales_ld + first]);
          const __m512 b = _mm512_set1_ps(scales[r * scales_ld + second]);
          const __m512 by[4] = {a, a, b, b};
          const __m512i out = encode64<Encoder, T>(x, by);
          if (streamed && lanes == kAll64)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(rowwise + r * rowwise_ld + c), out);
          else
            _mm512_mask_storeu_epi8(rowwise + r * rowwise_ld + c, lanes, out);
        }
        if (codes)
          _mm512_storeu_si512(codes + r * kPanelCols + c, encode64<Encoder, T>(x, by_column));
      }
    }
  }
}

// 32 elements as bf16 words in the order of join. What they lack of a longer mantissa sets their
// last bit, so that they round as the elements do to any format two bits shorter.
APEX_TE_AVX512_INLINE __m512i join_sticky(__m512i a, __m512i b) {
  const __m512i one = _mm512_set1_epi16(1);
  return _mm512_or_si512(join_upper(a, b), join(_mm512_maskz_min_epu16(kAll32, a, one),
                                                _mm512_maskz_min_epu16(kAll32, b, one)));
}
APEX_TE_AVX512_INLINE __m512i bf16_words(const BFloat16* x) { return _mm512_loadu_si512(x); }
APEX_TE_AVX512_INLINE __m512i bf16_words(const float* x) {
  return join_sticky(_mm512_loadu_si512(x), _mm512_loadu_si512(x + 16));
}
APEX_TE_AVX512_INLINE __m512i bf16_words(const Half* x) {
  const __m512i in = _mm512_loadu_si512(x);
  return join_sticky(_mm512_castps_si512(_mm512_maskz_cvtph_ps(kAll16, low_half(in))),
                     _mm512_castps_si512(_mm512_maskz_cvtph_ps(kAll16, high_half(in))));
}
// Codes of 64 elements times powers of two, in bytes: a mantissa is rounded whatever the scale, and
// a scale's exponent is added. Elements are 0, or amaxes of blocks are at least kLeastAmax.
template <typename Format>
struct ScaledByExponent {
  static constexpr int kDropped = Format::kShift - 16;  // of bf16's 7 bits
  static constexpr int kSubnormals = 8 - kDropped;      // exponents of them, and of what rounds up
  static constexpr int kFirst = int(Format::kMinNormalBits >> 23) - kSubnormals - 1;
  static constexpr int kMaxCode = avx2::FP8Encoder<Format>::kMaxCode;

  __m512i exponents, mantissas, signs;

  static APEX_TE_AVX512_INLINE __m512i bytes(int value) {
    return _mm512_set1_epi8(static_cast<int8_t>(value));
  }
  template <typename T>
  APEX_TE_AVX512_INLINE explicit ScaledByExponent(const T* x) {
    const __m512i first = bf16_words(x), second = bf16_words(x + 32);
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF), low = _mm512_set1_epi16(0x7F);
    exponents = _mm512_packus_epi16(shift_right_words(_mm512_and_si512(first, magnitude), 7),
                                    shift_right_words(_mm512_and_si512(second, magnitude), 7));
    const __m512i m =
        _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low));
    const __m512i odd = _mm512_and_si512(shift_right_words(m, kDropped), bytes(1));
    const __m512i sum = _mm512_add_epi8(_mm512_add_epi8(m, bytes((1 << (kDropped - 1)) - 1)), odd);
    mantissas =
        _mm512_and_si512(shift_right_words(sum, kDropped), bytes((1 << (8 - kDropped)) - 1));
    signs = _mm512_packs_epi16(first, second);  // in the top bits
  }
  // Number to subtract from exponents; `scale` has the bits of a power of two.
  static APEX_TE_AVX512_INLINE uint8_t offset(float scale) {
    const int offset = kFirst + 127 - static_cast<int>(float_bits(scale) >> 23);
    return static_cast<uint8_t>(offset > 0 ? offset : 0);
  }
  // Offsets of 64 columns' scales, in the order of load_wide.
  static APEX_TE_AVX512_INLINE __m512i offsets(const float* scales) {
    __m512i exponent[4];
    for (int k = 0; k < 4; ++k) exponent[k] = shift_right(_mm512_loadu_si512(scales + 16 * k), 23);
    const __m512i packed =
        _mm512_packus_epi16(join(exponent[0], exponent[1]), join(exponent[2], exponent[3]));
    return _mm512_maskz_subs_epu8(kAll64, bytes(kFirst + 127), packed);
  }
  // Codes in order; false if one is subnormal, which this does not compute.
  template <typename T>
  APEX_TE_AVX512_INLINE bool encode(T, __m512i offset, __m512i* codes) const {
    const __m512i exponent = _mm512_maskz_subs_epu8(kAll64, exponents, offset);
    const __mmask64 some = _mm512_test_epi8_mask(exponent, exponent);
    const __mmask64 subnormal =
        _mm512_cmplt_epu8_mask(_mm512_add_epi8(exponent, bytes(-1)), bytes(kSubnormals));
    const __m512i base = _mm512_maskz_slli_epi16(
        kAll32, _mm512_maskz_subs_epu8(kAll64, exponent, bytes(kSubnormals)), 7 - kDropped);
    const __m512i code =
        _mm512_maskz_min_epu8(some, _mm512_add_epi8(base, mantissas), bytes(kMaxCode));
    *codes = in_order(T{}, _mm512_ternarylogic_epi32(code, signs, bytes(0x80), 0xF8));
    return subnormal == 0;
  }
};

// encode_panel for scales that are powers of two.
template <typename Format, int64_t kBlock, int64_t kPanelCols, typename T>
APEX_TE_AVX512 void encode_panel_pow2(const T* panel, int64_t rows, int64_t cols,
                                      const float* scales, int64_t scales_ld, uint8_t* rowwise,
                                      int64_t rowwise_ld, bool streamed, const float* column_scales,
                                      int64_t block_rows, uint8_t* codes, const T* next,
                                      int64_t next_ld) {
  using Scaled = ScaledByExponent<Format>;
  streamed = streamed && is_line_aligned(rowwise, rowwise_ld);
  __m512i amax = _mm512_setzero_si512();
  for (int64_t c = 0; c < cols; c += kStep) {
    const __mmask64 lanes = first_lanes(cols - c);
    const int64_t first = c / kBlock, second = c + 32 < cols ? (c + 32) / kBlock : first;
    for (int64_t r0 = 0; r0 < rows; r0 += block_rows) {
      const float* by_column = column_scales + r0 / block_rows * kPanelCols + c;
      __m512i column_offsets = _mm512_setzero_si512();
      if (codes) column_offsets = Scaled::offsets(by_column);
      const int64_t end = r0 + block_rows < rows ? r0 + block_rows : rows;
      for (int64_t r = r0; r < end; ++r) {
        if (next)
          for (int64_t i = 0; i < kStep; i += kLineBytes / static_cast<int64_t>(sizeof(T)))
            __builtin_prefetch(next + r * next_ld + c + i, 0, 2);
        const T* in = panel + r * kPanelCols + c;
        const Scaled x(in);
        __m512i out;
        if (rowwise) {
          const float a = scales[r * scales_ld + first], b = scales[r * scales_ld + second];
          const __m512i offset = _mm512_mask_blend_epi64(0xAA, Scaled::bytes(Scaled::offset(a)),
                                                         Scaled::bytes(Scaled::offset(b)));
          if (__builtin_expect(!x.encode(T{}, offset, &out), 0)) {
            const __m512 by[4] = {_mm512_set1_ps(a), _mm512_set1_ps(a), _mm512_set1_ps(b),
                                  _mm512_set1_ps(b)};
            out = encode64<FP8Encoder<Format>>(in, kAll64, by, amax);
          }
          if (streamed && lanes == kAll64)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(rowwise + r * rowwise_ld + c), out);
          else
            _mm512_mask_storeu_epi8(rowwise + r * rowwise_ld + c, lanes, out);
        }
        if (codes) {
          if (__builtin_expect(!x.encode(T{}, column_offsets, &out), 0)) {
            const __m512 by[4] = {_mm512_loadu_ps(by_column), _mm512_loadu_ps(by_column + 16),
                                  _mm512_loadu_ps(by_column + 32), _mm512_loadu_ps(by_column + 48)};
            out = encode64<FP8Encoder<Format>>(in, kAll64, by, amax);
          }
          _mm512_storeu_si512(codes + r * kPanelCols + c, out);
        }
      }
    }
  }
}

}  // namespace avx512
}  // namespace apex_te
#endif
