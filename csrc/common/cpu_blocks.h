// Row loops of CPU kernels that quantize in blocks with a scale each.
//
// Scales come from the amaxes of what they scale, so that products are within the format's range
// unless an amax is an infinity or NaN.
#pragma once

#include "common/cpu_vec.h"

namespace apex_te {

constexpr int64_t kPanel = 128;  // columns that encode_transposed takes at once

// Largest magnitude of elements as a float's bits, NaN above infinity; 16-bit types compare as they
// are.
APEX_TE_INLINE uint32_t amax_of_row(const float* x, int64_t n) { return amax_of(x, n); }
template <typename T>
APEX_TE_INLINE uint32_t amax_of_row(const T* x, int64_t n) {
  int16_t amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto a = static_cast<int16_t>(x[i].bits & 0x7FFF);
    amax = a > amax ? a : amax;
  }
  return float_bits(to_float(T{static_cast<uint16_t>(amax)}));
}

// Asks for a row that is due later: the rows of a block lie too far apart for the hardware to
// guess.
template <typename T>
APEX_TE_INLINE void prefetch_row(const T* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(x + i);
}

// A magnitude as an integer of the element's width that orders like the values.
template <typename T>
struct RawMagnitude {
  using Type = int16_t;
  static APEX_TE_INLINE Type of(T x) { return static_cast<Type>(x.bits & 0x7FFF); }
  static APEX_TE_INLINE uint32_t bits(Type a) {
    return float_bits(to_float(T{static_cast<uint16_t>(a)}));
  }
};
template <>
struct RawMagnitude<float> {
  using Type = int32_t;
  static APEX_TE_INLINE Type of(float x) { return static_cast<Type>(magnitude_bits(x)); }
  static APEX_TE_INLINE uint32_t bits(Type a) { return static_cast<uint32_t>(a); }
};

constexpr uint32_t kInfinityBits = 0x7F800000u;

// Raises the columns' magnitudes to those of one more row.
template <typename T>
APEX_TE_INLINE void fold_columns(const T* x, int64_t n, typename RawMagnitude<T>::Type* columns) {
  for (int64_t i = 0; i < n; ++i) {
    const auto a = RawMagnitude<T>::of(x[i]);
    columns[i] = a > columns[i] ? a : columns[i];
  }
}

#if defined(__x86_64__)
namespace avx2 {

// Largest of 16 raw magnitudes of 16 bits: minpos finds the smallest of their complements.
APEX_TE_AVX2_INLINE uint16_t largest_of(BFloat16, __m256i words) {
  const __m128i half =
      _mm_max_epu16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
  return static_cast<uint16_t>(~_mm_extract_epi16(least, 0));
}

template <typename T>
APEX_TE_AVX2_INLINE uint32_t amax_bits_of(__m256i amax) {
  if constexpr (sizeof(T) == 2)
    return float_bits(to_float(T{largest_of(BFloat16{}, amax)}));
  else
    return amax_bits(T{}, amax);
}

// Amaxes of n / kBlock blocks.
template <int64_t kBlock, typename T>
APEX_TE_AVX2 void block_amaxes(const T* x, int64_t n, uint32_t* amaxes) {
  constexpr int64_t kPerVector = 32 / static_cast<int64_t>(sizeof(T));
  const __m256i mask = sizeof(T) == 2 ? _mm256_set1_epi16(0x7FFF) : _mm256_set1_epi32(0x7FFFFFFF);
  for (int64_t b = 0; b < n / kBlock; ++b) {
    __m256i amax = _mm256_setzero_si256();
    for (int64_t i = 0; i < kBlock; i += kPerVector) {
      const __m256i a = _mm256_and_si256(load_words(x + b * kBlock + i), mask);
      amax = sizeof(T) == 2 ? _mm256_max_epu16(amax, a) : _mm256_max_epu32(amax, a);
    }
    amaxes[b] = amax_bits_of<T>(amax);
  }
}

template <typename Encoder, int64_t kBlock, typename T>
APEX_TE_AVX2 void encode_blocks(const T* x, int64_t n, const float* scales, uint8_t* codes) {
  __m256i amax = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                        encode32<Encoder>(x + i, _mm256_broadcast_ss(scales + i / kBlock), amax));
  if (i == n) return;
  T rest[kStep] = {};
  uint8_t rest_codes[kStep];
  memcpy(rest, x + i, (n - i) * sizeof(T));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rest_codes),
                      encode32<Encoder>(rest, _mm256_broadcast_ss(scales + i / kBlock), amax));
  memcpy(codes + i, rest_codes, n - i);
}

template <typename Format, int64_t kBlock, typename T>
APEX_TE_AVX2 void decode_blocks(const uint8_t* codes, int64_t n, const float* scales, T* y) {
  for (int64_t i = 0; i < n; i += 16) {
    const __m256 scale = _mm256_broadcast_ss(scales + i / kBlock);
    const Floats16 values = decode16<Format>(codes + i);
    narrow16({_mm256_mul_ps(values.low, scale), _mm256_mul_ps(values.high, scale)}, y + i);
  }
}

// scales: as in_load_order arranges them.
template <typename Encoder, typename T>
APEX_TE_AVX2_INLINE __m256i encode32_columns(const T* x, const float* scales) {
  __m256i amax = _mm256_setzero_si256(), codes[2], signs[2];
  for (int half = 0; half < 2; ++half) {
    Wide in = load_wide(x + half * kStep / 2, amax);
    in.a = _mm256_mul_ps(in.a, _mm256_loadu_ps(scales + half * kStep / 2));
    in.b = _mm256_mul_ps(in.b, _mm256_loadu_ps(scales + half * kStep / 2 + 8));
    codes[half] = Encoder::template codes_of<T>(in, _mm256_set1_ps(1.0f));
    signs[half] = in.signs;
  }
  const __m256i sign =
      _mm256_and_si256(_mm256_packs_epi16(signs[0], signs[1]), _mm256_set1_epi8(int8_t(0x80)));
  return in_order(T{}, _mm256_or_si256(_mm256_packus_epi16(codes[0], codes[1]), sign));
}
template <typename Encoder, typename T>
APEX_TE_AVX2 void encode_columns(const T* x, int64_t n, const float* scales, uint8_t* codes) {
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                        encode32_columns<Encoder>(x + i, scales + i));
  if (i == n) return;
  T rest[kStep] = {};
  uint8_t rest_codes[kStep];
  memcpy(rest, x + i, (n - i) * sizeof(T));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rest_codes),
                      encode32_columns<Encoder>(rest, scales + i));
  memcpy(codes + i, rest_codes, n - i);
}

// Load_wide gives the even and the odd elements of 16 bf16.
template <typename T>
inline void in_load_order(float* scales, int64_t n) {
  if (!std::is_same<T, BFloat16>::value) return;
  for (int64_t i = 0; i < n; i += 16) {
    float natural[16];
    memcpy(natural, scales + i, sizeof(natural));
    for (int64_t k = 0; k < 16; ++k) scales[i + k] = natural[k % 8 * 2 + k / 8];
  }
}

}  // namespace avx2
#endif

// Amaxes of a row's blocks of kBlock elements; the last may be short.
template <int64_t kBlock, typename T>
APEX_TE_INLINE void block_amaxes(const T* x, int64_t n, uint32_t* amaxes) {
  int64_t whole = 0;
#if defined(__x86_64__)
  if (use_avx2()) {
    whole = n / kBlock * kBlock;
    avx2::block_amaxes<kBlock>(x, whole, amaxes);
  }
#endif
  for (int64_t i = whole; i < n; i += kBlock)
    amaxes[i / kBlock] = amax_of_row(x + i, std::min(kBlock, n - i));
}

// FP8 codes of a row, each block of kBlock elements times its scale.
template <typename Format, int64_t kBlock, typename T>
APEX_TE_INLINE void encode_blocks(const T* x, int64_t n, const float* scales, bool is_finite,
                                  uint8_t* codes) {
#if defined(__x86_64__)
  if (is_finite && use_avx2())
    return avx2::encode_blocks<avx2::FP8Encoder<Format>, kBlock>(x, n, scales, codes);
#endif
  for (int64_t i = 0; i < n; ++i)
    codes[i] = encode_fp8<Format>(to_float(x[i]) * scales[i / kBlock]);
}

// A row of codes, each block of kBlock times its scale, in y's dtype.
template <typename Format, int64_t kBlock, typename T>
APEX_TE_INLINE void decode_blocks(const uint8_t* codes, int64_t n, const float* scales, T* y) {
  int64_t whole = 0;
#if defined(__x86_64__)
  if (use_avx2()) {
    whole = n / 16 * 16;
    avx2::decode_blocks<Format, kBlock>(codes, whole, scales, y);
  }
#endif
  for (int64_t i = whole; i < n; ++i)
    y[i] = from_float<T>(decode_fp8<Format>(codes[i]) * scales[i / kBlock]);
}

// FP8 codes of x [rows, cols <= kPanel], each column times the scale of its block of `block_rows`
// rows, to out[col * out_ld + row]. scales: [blocks][kPanel], which may be rearranged.
template <typename Format, typename T>
APEX_TE_INLINE void encode_transposed(const T* x, int64_t ld, int64_t rows, int64_t cols,
                                      int64_t block_rows, float* scales, bool is_finite,
                                      uint8_t* out, int64_t out_ld) {
  constexpr int64_t kMaxRows = 128;
  uint8_t codes[kMaxRows * kPanel];
#if defined(__x86_64__)
  const bool is_fast = is_finite && use_avx2();
  if (is_fast) avx2::in_load_order<T>(scales, (rows + block_rows - 1) / block_rows * kPanel);
#endif
  for (int64_t r = 0; r < rows; ++r) {
    if (r < cols) prefetch_row(out + r * out_ld, rows);
    const float* by = scales + r / block_rows * kPanel;
#if defined(__x86_64__)
    if (is_fast) {
      avx2::encode_columns<avx2::FP8Encoder<Format>>(x + r * ld, cols, by, codes + r * kPanel);
      continue;
    }
#endif
    for (int64_t c = 0; c < cols; ++c)
      codes[r * kPanel + c] = encode_fp8<Format>(to_float(x[r * ld + c]) * by[c]);
  }
  transpose_bytes(codes, kPanel, rows, cols, out, out_ld);
}

}  // namespace apex_te
