// Row loops of CPU kernels that quantize in blocks with a scale each.
//
// Scales come from the amaxes of what they scale, so products are below twice the format's largest
// value unless an amax is an infinity or NaN.
#pragma once

#include <type_traits>

#include "common/cpu/blocks_avx512.h"
#include "common/cpu/scratch.h"
#include "common/cpu/vec.h"

namespace apex_te {

// What scales do to elements: multiply or divide them.
enum class ScaleKind { kFactors, kPowersOfTwo, kDivisors };
APEX_TE_INLINE float scaled(float x, float scale, bool divides) {
  return divides ? x / scale : x * scale;
}

constexpr int64_t kPanel = 128;      // columns that are encoded at once
constexpr int64_t kPanelRows = 128;  // at most

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

// Below it no scale is so small that 2^-8 of it were subnormal, and there is no NaN or infinity.
constexpr uint32_t kBoundBits = uint32_t(127 + 112) << 23;
// From it on a subnormal element of the block rounds to 0.
constexpr uint32_t kRegularBits = uint32_t(127 - 90) << 23;

// Raises the columns' magnitudes to those of one more row.
template <typename T>
APEX_TE_INLINE void fold_columns(const T* x, int64_t n, typename RawMagnitude<T>::Type* columns) {
  for (int64_t i = 0; i < n; ++i) {
    const auto a = RawMagnitude<T>::of(x[i]);
    columns[i] = a > columns[i] ? a : columns[i];
  }
}

// Copies a row of a tile to panels of kPanel columns with `rows` rows each. Rows of a matrix whose
// extent is a power of two share few sets of a cache, which would not hold a tile for a second
// pass.
template <typename T>
APEX_TE_INLINE void copy_to_panels(const T* x, int64_t n, int64_t row, int64_t rows, T* panels) {
  int64_t i = 0;
  for (T* to = panels + row * kPanel; i + kPanel <= n; i += kPanel, to += rows * kPanel)
    memcpy(to, x + i, kPanel * sizeof(T));
  if (i < n) memcpy(panels + i * rows + row * kPanel, x + i, (n - i) * sizeof(T));
}

#if defined(__x86_64__)
namespace avx2 {

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
    amaxes[b] = amax_bits(T{}, amax);
  }
}

// Codes of 32 elements; `scales`, of 8 elements each, in the order of load_wide.
template <typename Format, typename T, bool kDivides = false>
struct BlockEncoder {
  static constexpr float kScale = 1.0f;
  static APEX_TE_AVX2_INLINE __m256i encode(const T* x, const __m256* scales) {
    __m256i amax = _mm256_setzero_si256();
    return encode32<FP8Encoder<Format>, T, kDivides>(x, scales, amax);
  }
};

// Encoding with scales that are powers of two: the product has bf16's 8 significant bits. kScale
// puts the format's subnormals where fp16's are, so the codes are the upper bits of the fp16 words,
// which hold all but the last bits of values below the smallest step. These are rounded up: one
// above half a step stays above it, one below becomes half a step at most, a tie that goes to zero.
template <typename Format>
struct PowerOfTwoEncoder {
  static constexpr int kShift = Format::kShift - 13;
  static constexpr float kScale = Format::kBias == 15 ? 1.0f : 1.0f / 256.0f;  // 2^(bias - 15)
  static APEX_TE_AVX2_INLINE __m256i encode(const BFloat16* x, const __m256* scales) {
    const __m256i in[2] = {load_words(x), load_words(x + kStep / 2)};
    __m128i even[2], odd[2];
    for (int half = 0; half < 2; ++half) {
      const __m256i magnitude = _mm256_and_si256(in[half], _mm256_set1_epi16(0x7FFF));
      even[half] = to_half(_mm256_slli_epi32(magnitude, 16), scales[2 * half]);
      odd[half] = to_half(_mm256_and_si256(magnitude, _mm256_set1_epi32(int(0xFFFF0000u))),
                          scales[2 * half + 1]);
    }
    const __m256i codes =
        _mm256_or_si256(round(_mm256_set_m128i(even[1], even[0])),
                        _mm256_slli_epi16(round(_mm256_set_m128i(odd[1], odd[0])), 8));
    const __m256i signs =
        _mm256_permute4x64_epi64(_mm256_packs_epi16(in[0], in[1]), _MM_SHUFFLE(3, 1, 2, 0));
    return _mm256_or_si256(codes, _mm256_and_si256(signs, _mm256_set1_epi8(int8_t(0x80))));
  }

 private:
  static APEX_TE_AVX2_INLINE __m128i to_half(__m256i magnitude, __m256 scale) {
    return _mm256_cvtps_ph(_mm256_mul_ps(_mm256_castsi256_ps(magnitude), scale),
                           _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  }
  static APEX_TE_AVX2_INLINE __m256i round(__m256i half) {
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi16(half, kShift), _mm256_set1_epi16(1));
    const __m256i up = _mm256_set1_epi16((1 << (kShift - 1)) - 1);
    const __m256i sum = _mm256_add_epi16(_mm256_add_epi16(half, up), is_odd);
    return _mm256_min_epu16(_mm256_srli_epi16(sum, kShift),
                            _mm256_set1_epi16(FP8Encoder<Format>::kMaxCode));
  }
};

template <typename Encoder, int64_t kBlock, typename T>
APEX_TE_AVX2 void encode_blocks(const T* x, int64_t n, const float* scales, uint8_t* codes) {
  const auto encode = [&](const T* in, uint8_t* out, float scale) APEX_TE_TARGET_AVX2 {
    const __m256 s = _mm256_set1_ps(scale * Encoder::kScale);
    const __m256 all[4] = {s, s, s, s};
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), Encoder::encode(in, all));
  };
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) encode(x + i, codes + i, scales[i / kBlock]);
  if (i == n) return;
  T rest[kStep] = {};
  uint8_t rest_codes[kStep];
  memcpy(rest, x + i, (n - i) * sizeof(T));
  encode(rest, rest_codes, scales[i / kBlock]);
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

// scales: as prepare_columns leaves them.
template <typename Encoder, typename T>
APEX_TE_AVX2 void encode_columns(const T* x, int64_t n, const float* scales, uint8_t* codes) {
  const auto encode = [&](const T* in, uint8_t* out, const float* s) APEX_TE_TARGET_AVX2 {
    const __m256 by[4] = {_mm256_loadu_ps(s), _mm256_loadu_ps(s + 8), _mm256_loadu_ps(s + 16),
                          _mm256_loadu_ps(s + 24)};
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), Encoder::encode(in, by));
  };
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) encode(x + i, codes + i, scales + i);
  if (i == n) return;
  T rest[kStep] = {};
  uint8_t rest_codes[kStep];
  memcpy(rest, x + i, (n - i) * sizeof(T));
  encode(rest, rest_codes, scales + i);
  memcpy(codes + i, rest_codes, n - i);
}

// Scales as encode_columns reads them: load_wide gives the even and the odd elements of 16 bf16.
template <typename Encoder, typename T>
inline void prepare_columns(float* scales, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    float natural[16];
    for (int64_t k = 0; k < 16; ++k) natural[k] = scales[i + k] * Encoder::kScale;
    for (int64_t k = 0; k < 16; ++k)
      scales[i + k] = natural[std::is_same<T, BFloat16>::value ? k % 8 * 2 + k / 8 : k];
  }
}

template <typename Format, typename T, typename Use>
APEX_TE_INLINE void with_encoder(ScaleKind kind, const Use& use) {
  if constexpr (std::is_same<T, BFloat16>::value) {
    if (kind == ScaleKind::kPowersOfTwo) return use(PowerOfTwoEncoder<Format>{});
  }
  kind == ScaleKind::kDivisors ? use(BlockEncoder<Format, T, true>{})
                               : use(BlockEncoder<Format, T>{});
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

// A row of a tile: amaxes of its blocks of kBlock elements, columns raised to its magnitudes, a
// copy in panels of `rows` rows. What is null is left out.
template <int64_t kBlock, typename T>
APEX_TE_INLINE void scan_row(const T* x, int64_t n, int64_t row, int64_t rows, uint32_t* amaxes,
                             typename RawMagnitude<T>::Type* columns, T* panels) {
#if defined(__x86_64__)
  if (use_avx512())
    return avx512::scan_row<kBlock, kPanel>(
        x, n, amaxes, columns, panels ? panels + row * kPanel : nullptr, rows * kPanel);
#endif
  if (amaxes) block_amaxes<kBlock>(x, n, amaxes);
  if (columns) fold_columns(x, n, columns);
  if (panels) copy_to_panels(x, n, row, rows, panels);
}

// Range of the amaxes from which ScaleTraits are made.
struct AmaxRange {
  uint32_t largest = 0, least = ~uint32_t{0};  // least: less 1, so that 0 is passed over
  APEX_TE_INLINE void add(const uint32_t* amaxes, int64_t n) {
    uint32_t high = largest, low = least;
    for (int64_t i = 0; i < n; ++i) {
      high = amaxes[i] > high ? amaxes[i] : high;
      low = amaxes[i] - 1 < low ? amaxes[i] - 1 : low;
    }
    largest = high;
    least = low;
  }
  bool is_bounded() const { return largest < kBoundBits; }
  bool is_regular() const { return least >= kRegularBits; }
};

// Properties that all scales of a row or panel have.
struct ScaleTraits {
  bool is_bounded;  // their blocks' amaxes are below kBoundBits
  ScaleKind kind;
  bool is_regular = false;  // and none of the amaxes is below kRegularBits but 0
};

// FP8 codes of a row, each block of kBlock elements times its scale.
template <typename Format, int64_t kBlock, typename T>
APEX_TE_ONCE void encode_blocks(const T* x, int64_t n, const float* scales, ScaleTraits traits,
                                uint8_t* codes) {
#if defined(__x86_64__)
  if (traits.is_bounded && use_avx512())
    return (traits.kind == ScaleKind::kDivisors
                ? avx512::encode_blocks<avx512::FP8Divider<Format>, kBlock, T>
                : avx512::encode_blocks<avx512::FP8Encoder<Format>, kBlock, T>)(x, n, scales,
                                                                                codes);
  if (traits.is_bounded && use_avx2())
    return avx2::with_encoder<Format, T>(traits.kind, [&](auto encoder) {
      avx2::encode_blocks<decltype(encoder), kBlock>(x, n, scales, codes);
    });
#endif
  const bool divides = traits.kind == ScaleKind::kDivisors;
  for (int64_t i = 0; i < n; ++i)
    codes[i] = encode_fp8<Format>(scaled(to_float(x[i]), scales[i / kBlock], divides));
}

// A row of codes, each block of kBlock times its scale, in y's dtype.
template <typename Format, int64_t kBlock, typename T>
APEX_TE_ONCE void decode_blocks(const uint8_t* codes, int64_t n, const float* scales, T* y) {
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

// Codes of a panel before they are transposed.
struct PanelScratch {
  alignas(kLineBytes) uint8_t codes[kPanelRows * kPanel];
};

// FP8 codes of a panel, rows of kPanel elements, each column times the scale of its block of
// `block_rows` rows, to out[col * out_ld + row], past the caches if `streamed`. scales:
// [blocks][kPanel], which may be rearranged.
template <typename Format, typename T>
APEX_TE_ONCE void encode_transposed(const T* panel, int64_t rows, int64_t cols, int64_t block_rows,
                                    float* scales, ScaleTraits traits, uint8_t* out, int64_t out_ld,
                                    bool streamed) {
  uint8_t* const codes = thread_scratch<PanelScratch>().codes;
  const auto for_rows = [&](const auto& encode_row) {
    for (int64_t r = 0; r < rows; ++r) {
      if (r < cols && !streamed) prefetch_row(out + r * out_ld, rows);
      encode_row(panel + r * kPanel, scales + r / block_rows * kPanel, codes + r * kPanel);
    }
    transpose_bytes(codes, kPanel, rows, cols, out, out_ld, streamed);
  };
#if defined(__x86_64__)
  if (traits.is_bounded && use_avx2())
    return avx2::with_encoder<Format, T>(traits.kind, [&](auto encoder) {
      using Encoder = decltype(encoder);
      avx2::prepare_columns<Encoder, T>(scales, (rows + block_rows - 1) / block_rows * kPanel);
      for_rows([&](const T* row, const float* by, uint8_t* out_codes) {
        avx2::encode_columns<Encoder>(row, cols, by, out_codes);
      });
    });
#endif
  const bool divides = traits.kind == ScaleKind::kDivisors;
  for_rows([&](const T* row, const float* by, uint8_t* out_codes) {
    for (int64_t c = 0; c < cols; ++c)
      out_codes[c] = encode_fp8<Format>(scaled(to_float(row[c]), by[c], divides));
  });
}

// Destinations of a panel's FP8 data, at its first element; null where a copy is not wanted.
struct PanelCodes {
  uint8_t* rowwise;
  int64_t rowwise_ld;
  uint8_t* columnwise;
  int64_t transposed_ld;
  bool streamed;  // past the caches
};

// Codes of a panel: of row r, block b of kBlock elements times scales[r * scales_ld + b]; of each
// column as encode_transposed takes it. `next`: a panel of the matrix that is due next, or null; to
// ask for it now keeps memory busy.
template <typename Format, int64_t kBlock, typename T>
APEX_TE_ONCE void encode_panel(const T* panel, int64_t rows, int64_t cols, const float* scales,
                               int64_t scales_ld, float* column_scales, int64_t block_rows,
                               ScaleTraits traits, const PanelCodes& out, const T* next,
                               int64_t next_ld) {
#if defined(__x86_64__)
  if (traits.is_bounded && use_avx512()) {
    uint8_t* const codes = thread_scratch<PanelScratch>().codes;
    if (out.columnwise)
      avx512::order_scales<T>(column_scales, (rows + block_rows - 1) / block_rows * kPanel);
    const auto encode = traits.kind == ScaleKind::kDivisors
                            ? avx512::encode_panel<avx512::FP8Divider<Format>, kBlock, kPanel, T>
                        : traits.kind == ScaleKind::kPowersOfTwo && traits.is_regular
                            ? avx512::encode_panel_pow2<Format, kBlock, kPanel, T>
                            : avx512::encode_panel<avx512::FP8Encoder<Format>, kBlock, kPanel, T>;
    encode(panel, rows, cols, scales, scales_ld, out.rowwise, out.rowwise_ld, out.streamed,
           column_scales, block_rows, out.columnwise ? codes : nullptr, next, next_ld);
    if (out.columnwise)
      transpose_bytes(codes, kPanel, rows, cols, out.columnwise, out.transposed_ld, out.streamed);
    return;
  }
#endif
  for (int64_t r = 0; out.rowwise && r < rows; ++r) {
    alignas(kLineBytes) uint8_t buffer[kPanel];
    uint8_t* to = out.rowwise + r * out.rowwise_ld;
    encode_blocks<Format, kBlock>(panel + r * kPanel, cols, scales + r * scales_ld, traits,
                                  out.streamed ? buffer : to);
    if (out.streamed) stream_bytes(to, buffer, cols);
  }
  if (out.columnwise)
    encode_transposed<Format>(panel, rows, cols, block_rows, column_scales, traits, out.columnwise,
                              out.transposed_ld, out.streamed);
}

}  // namespace apex_te
