// Row loops of CPU kernels: widening, narrowing, FP8 encoding and decoding, byte transposition.
//
// Always-inline templates that the compiler vectorizes for whichever instruction set the calling
// function has (isa.h), or calls to loops written for AVX2 (avx2.h) or AVX-512 (avx512.h);
// no bit differs between them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "common/cpu/avx2.h"
#include "common/cpu/avx512.h"
#include "common/cpu/encode_avx512.h"
#include "common/cpu/isa.h"
#include "common/cpu/portable.h"
#include "common/cpu/stream.h"
#include "common/numerics/codec.h"

namespace apex_te {

// Asks for a row that is due later: the rows of a block lie too far apart for the hardware to
// guess.
template <typename T>
APEX_TE_INLINE void prefetch_row(const T* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(x + i);
}

template <typename T>
APEX_TE_INLINE void widen(const T* x, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = to_float(x[i]);
}

template <>
APEX_TE_INLINE void widen<Half>(const Half* x, int64_t n, float* values) {
#if defined(__x86_64__)
  if (use_avx512()) return avx512::widen(x, n, values);
  if (use_avx2()) return avx2::widen(x, n, values);
#endif
  widen_portable(x, n, values);
}

template <typename T>
APEX_TE_INLINE void narrow(const float* values, int64_t n, T* y) {
#if defined(__x86_64__)
  if (use_avx512()) return avx512::narrow(values, n, y);
  if (use_avx2()) return avx2::narrow(values, n, y);
#endif
  narrow_portable(values, n, y);
}
template <>
APEX_TE_INLINE void narrow<float>(const float* values, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = values[i];
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

// Sum in fp32 by 64 lanes: the same order of additions whatever the instruction set, and enough
// lanes that no addition waits for the one before.
APEX_TE_INLINE float sum_of(const float* values, int64_t n) {
  constexpr int64_t kLanes = 64;
  float lanes[kLanes] = {};
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t k = 0; k < kLanes; ++k) lanes[k] += values[i + k];
  for (int64_t i = whole; i < n; ++i) lanes[i - whole] += values[i];
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  return lanes[0];
}

// Largest value; a NaN is passed over, since no comparison with it holds.
APEX_TE_INLINE float max_of(const float* values, int64_t n) {
  constexpr int64_t kLanes = 32;  // enough that no comparison waits for the one before
  float lanes[kLanes];
  for (float& lane : lanes) lane = -std::numeric_limits<float>::infinity();
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t k = 0; k < kLanes; ++k)
      lanes[k] = values[i + k] > lanes[k] ? values[i + k] : lanes[k];
  for (int64_t i = whole; i < n; ++i)
    lanes[i - whole] = values[i] > lanes[i - whole] ? values[i] : lanes[i - whole];
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t k = 0; k < width; ++k)
      lanes[k] = lanes[k + width] > lanes[k] ? lanes[k + width] : lanes[k];
  return lanes[0];
}

// FP8 codes of x * scale; returns the largest magnitude of x as amax_of does.
template <typename Format, typename T>
APEX_TE_INLINE uint32_t encode_row(const T* x, int64_t n, float scale, uint8_t* codes) {
#if defined(__x86_64__)
  if constexpr (!Format::kIsFNUZ) {
    if (use_avx512()) return avx512::encode_row<avx512::FP8Encoder<Format>>(x, n, scale, codes);
    if (use_avx2()) return avx2::encode_row<avx2::FP8Encoder<Format>>(x, n, scale, codes);
  }
#endif
  return encode_row_portable<Format>(x, n, scale, codes);
}

// FP8 codes to the values they stand for, exactly.
template <typename Format>
APEX_TE_INLINE void decode_row(const uint8_t* codes, int64_t n, float* values) {
#if defined(__x86_64__)
  if constexpr (!Format::kIsFNUZ) {
    if (use_avx2()) return avx2::decode_row<Format>(codes, n, values);
  }
#endif
  decode_row_portable<Format>(codes, n, values);
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

// out[c * out_ld + r] = in[r * in_ld + c]. With `streamed`, whole lines go past the caches; call
// finish_stream() in the end.
APEX_TE_ONCE inline void transpose_bytes(const uint8_t* in, int64_t in_ld, int64_t rows,
                                         int64_t cols, uint8_t* out, int64_t out_ld,
                                         bool streamed = false) {
  int64_t whole_rows = 0, whole_cols = 0;
#if defined(__SSE2__)
  // 64 rows at a time, so that whole cache lines are written: the columns of a matrix whose extent
  // is a power of two lie in the same set of a cache, which holds fewer than 16 of them.
  constexpr int64_t kLine = kLineBytes;
  streamed = streamed && is_line_aligned(out, out_ld);
  whole_rows = rows / 16 * 16;
  whole_cols = cols / 16 * 16;
  for (int64_t c = 0; c < whole_cols; c += 16)
    for (int64_t r = 0; r < whole_rows; r += kLine) {
      const int64_t height = std::min(kLine, whole_rows - r);
#if defined(__x86_64__)
      if (height == kLine && use_avx512()) {
        avx512::transpose_64x16(in + r * in_ld + c, in_ld, out + c * out_ld + r, out_ld, streamed);
        continue;
      }
#endif
      alignas(64) uint8_t lines[16 * kLine];
      for (int64_t part = 0; part < height; part += 16)
        transpose_16x16(in + (r + part) * in_ld + c, in_ld, lines + part, kLine);
      for (int64_t i = 0; i < 16; ++i) {
        uint8_t* line = out + (c + i) * out_ld + r;
        if (streamed && height == kLine)
          stream_line(line, lines + i * kLine);
        else if (height == kLine)
          memcpy(line, lines + i * kLine, kLine);
        else
          memcpy(line, lines + i * kLine, height);
      }
    }
#endif
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t r = c < whole_cols ? whole_rows : 0; r < rows; ++r)
      out[c * out_ld + r] = in[r * in_ld + c];
}

// Zeroes what lies behind `rows` bytes in each of `cols` rows that are `ld` bytes long: the padding
// of a columnwise copy (common/numerics/columnwise.h).
inline void zero_padding(uint8_t* columnwise, int64_t cols, int64_t rows, int64_t ld) {
  if (rows == ld) return;
  for (int64_t c = 0; c < cols; ++c) std::fill_n(columnwise + c * ld + rows, ld - rows, uint8_t{0});
}

// Folds a chunk's amax (bits) into a total that several threads share.
inline void fold_amax(std::atomic<uint32_t>& total, uint32_t found) {
  uint32_t seen = total.load(std::memory_order_relaxed);
  while (found > seen && !total.compare_exchange_weak(seen, found, std::memory_order_relaxed)) {
  }
}

}  // namespace apex_te
