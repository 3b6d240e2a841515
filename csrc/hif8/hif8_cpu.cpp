// CPU kernels of hif8. Portable: look-ups of the first 13 bits of the scaled floats.
#include "common/cpu/quantize.h"
#include "common/numerics/with_dtype.h"
#include "hif8/hif8.h"
#include "hif8/hif8_avx2.h"
#include "hif8/hif8_avx512.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr Hif8DecodeTable kDecode = hif8_decode_table();

// Magnitudes of codes as the upper halves of floats; the lower ones are 0.
struct Hif8Magnitudes {
  uint16_t words[128];
  constexpr Hif8Magnitudes() : words() {
    for (uint32_t i = 0; i < 128; ++i) words[i] = static_cast<uint16_t>(hif8_decode_bits(i) >> 16);
  }
};
[[maybe_unused]] constexpr Hif8Magnitudes kMagnitudes;

// The values of codes.
APEX_TE_INLINE void look_up(const uint8_t* codes, int64_t n, float* values) {
#if defined(__x86_64__)
  if (use_avx512()) return avx512::decode_hif8(codes, n, kMagnitudes.words, values);
#endif
  for (int64_t i = 0; i < n; ++i) values[i] = bits_float(kDecode.bits[codes[i]]);
}

constexpr int64_t kDecodeChunk = 1 << 14;
constexpr int64_t kDecodedAtOnce = 256;

// Codes of n elements; returns the bits of the largest magnitude of x.
template <bool kSaturate, typename T>
uint32_t encode_hif8(const T* x, int64_t n, float scale, uint8_t* codes) {
#if defined(__x86_64__)
  if (use_avx512()) return avx512::encode_row<avx512::Hif8Encoder<kSaturate>>(x, n, scale, codes);
  if (use_avx2()) return avx2::encode_row<avx2::Hif8Encoder<kSaturate>>(x, n, scale, codes);
#endif
  const uint8_t* table = kHif8Codes<kSaturate>.codes;
  for (int64_t i = 0; i < n; ++i)
    codes[i] = table[float_bits(to_float(x[i]) * scale) >> kHif8Shift];
  return amax_of_row(x, n);
}

// Returns the bits of the largest magnitude of x.
template <typename T>
uint32_t quantize(const Hif8Quantize& p, float scale) {
  const auto encode = p.saturate ? encode_hif8<true, T> : encode_hif8<false, T>;
  return quantize_all<T>(
      p.q, [=](const T* x, int64_t n, uint8_t* codes) { return encode(x, n, scale, codes); });
}

uint32_t quantize_any(const Hif8Quantize& p, float scale) {
  return with_dtype(p.q.x.dtype(), [&](auto zero) { return quantize<decltype(zero)>(p, scale); });
}

void quantize_current(const Hif8Quantize& p, uint32_t amax) {
  amax &= 0x7FFFFFFFu;
  const float scale = p.rule.scale_of(amax);
  *p.scale = scale;
  *p.scale_inv = p.rule.inverse_of(amax, scale);
  quantize_any(p, scale);
}

template <typename T>
APEX_TE_INLINE void decode_of(const uint8_t* codes, int64_t n, float scale_inv, bool streamed,
                              T* out) {
  alignas(kLineBytes) T buffer[kDecodedAtOnce];
  float values[kDecodedAtOnce];
  for (int64_t begin = 0; begin < n; begin += kDecodedAtOnce) {
    const int64_t count = std::min(kDecodedAtOnce, n - begin);
    look_up(codes + begin, count, values);
    for (int64_t i = 0; i < count; ++i) values[i] *= scale_inv;
    narrow(values, count, streamed ? buffer : out + begin);
    if (streamed) stream_bytes(out + begin, buffer, count * sizeof(T));
  }
  if (streamed) finish_stream();
}
template <typename T>
APEX_TE_TARGET_PORTABLE void decode_portable(const uint8_t* codes, int64_t n, float scale_inv,
                                             bool streamed, T* out) {
  decode_of(codes, n, scale_inv, streamed, out);
}
template <typename T>
APEX_TE_TARGET_AVX2 void decode_avx2(const uint8_t* codes, int64_t n, float scale_inv,
                                     bool streamed, T* out) {
  decode_of(codes, n, scale_inv, streamed, out);
}

template <typename T>
void decode(const Hif8Decode& p) {
  const float scale_inv = p.scale_inv ? *p.scale_inv : 1.0f;
  const uint8_t* codes = p.codes.data<const uint8_t>();
  T* out = p.out.data<T>();
  const int64_t numel = p.codes.numel();
  const auto decode_chunk = use_avx2() ? decode_avx2<T> : decode_portable<T>;
  parallel_for((numel + kDecodeChunk - 1) / kDecodeChunk, [&](int64_t i) {
    const int64_t begin = i * kDecodeChunk;
    decode_chunk(codes + begin, std::min(kDecodeChunk, numel - begin), scale_inv,
                 numel * static_cast<int64_t>(sizeof(T)) >= kStreamedBytes, out + begin);
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(hif8_quantize) {
  using namespace apex_te;
  const Hif8Quantize p = check_hif8_quantize(args);
  const float scale = p.given_scale ? *p.given_scale : 1.0f;
  const uint32_t amax = quantize_any(p, scale);
  if (p.amax) *p.amax = bits_float(std::max(amax, float_bits(*p.amax)));
  if (p.scale_inv) *p.scale_inv = 1.0f / scale;
}

APEX_TE_DEFINE(hif8_current) {
  using namespace apex_te;
  const Hif8Quantize p = check_hif8_current(args, true);
  const uint32_t amax = amax_of_tensor(p.q.x);
  *p.amax = bits_float(amax);
  quantize_current(p, amax);
}

APEX_TE_DEFINE(hif8_cast) {
  using namespace apex_te;
  const Hif8Quantize p = check_hif8_current(args, false);
  quantize_current(p, float_bits(*p.amax));
}

APEX_TE_DEFINE(hif8_decode) {
  using namespace apex_te;
  const Hif8Decode p = check_hif8_decode(args);
  with_dtype(p.out.dtype(), [&](auto zero) { decode<decltype(zero)>(p); });
}
