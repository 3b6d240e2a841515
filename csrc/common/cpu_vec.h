// Row loops of CPU kernels: widening, narrowing, FP8 encoding and byte transposition.
//
// All are always-inline templates that the compiler vectorizes for whichever instruction set the
// calling function has (cpu.h); none changes a bit between them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "common/codec.h"
#include "common/cpu.h"

namespace apex_te {

template <typename T>
APEX_TE_INLINE void widen(const T* x, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = to_float(x[i]);
}

template <typename T>
APEX_TE_INLINE void narrow(const float* values, int64_t n, T* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = from_float<T>(values[i]);
}

// Largest magnitude as bits; NaN counts above infinity.
APEX_TE_INLINE uint32_t amax_of(const float* values, int64_t n) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t a = magnitude_bits(values[i]);
    amax = a > amax ? a : amax;
  }
  return amax;
}

template <typename Format>
APEX_TE_INLINE void encode_row(const float* values, int64_t n, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = encode_fp8<Format>(values[i] * scale);
}

#if defined(__SSE2__)
// 16 x 16 bytes: four rounds of interleaving rows i and i + 8.
APEX_TE_INLINE void transpose_16x16(const uint8_t* in, int64_t in_ld, uint8_t* out,
                                    int64_t out_ld) {
  __m128i a[16], b[16];
  for (int i = 0; i < 16; ++i)
    a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i * in_ld));
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
      b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
    }
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
  for (int i = 0; i < 16; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * out_ld), a[i]);
}
#endif

// out[c * out_ld + r] = in[r * in_ld + c].
APEX_TE_INLINE void transpose_bytes(const uint8_t* in, int64_t in_ld, int64_t rows, int64_t cols,
                                    uint8_t* out, int64_t out_ld) {
  int64_t whole_rows = 0, whole_cols = 0;
#if defined(__SSE2__)
  whole_rows = rows / 16 * 16;
  whole_cols = cols / 16 * 16;
  for (int64_t c = 0; c < whole_cols; c += 16)
    for (int64_t r = 0; r < whole_rows; r += 16)
      transpose_16x16(in + r * in_ld + c, in_ld, out + c * out_ld + r, out_ld);
#endif
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t r = c < whole_cols ? whole_rows : 0; r < rows; ++r)
      out[c * out_ld + r] = in[r * in_ld + c];
}

// Folds a chunk's amax (bits) into a total that several threads share.
inline void fold_amax(std::atomic<uint32_t>& total, uint32_t found) {
  uint32_t seen = total.load(std::memory_order_relaxed);
  while (found > seen && !total.compare_exchange_weak(seen, found, std::memory_order_relaxed)) {
  }
}

}  // namespace apex_te
