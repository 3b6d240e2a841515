// Stores past the caches, for outputs that do not fit in them: a line written as a whole need not
// be read first, which a third of a cast's traffic would be.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/cpu/isa.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace apex_te {

constexpr int64_t kLineBytes = 64;
// A smaller output stays in the caches, where what reads it next finds it.
constexpr int64_t kStreamedBytes = 4 << 20;

inline bool is_line_aligned(const void* p, int64_t stride = 0) {
  return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(stride)) % kLineBytes == 0;
}

// One line to an address that is_line_aligned.
APEX_TE_INLINE void stream_line(void* out, const void* in) {
#if defined(__SSE2__)
  for (int i = 0; i < 4; ++i)
    _mm_stream_si128(static_cast<__m128i*>(out) + i,
                     _mm_loadu_si128(static_cast<const __m128i*>(in) + i));
#else
  memcpy(out, in, kLineBytes);
#endif
}

// Copies bytes, whole lines past the caches where `out` is aligned for that.
APEX_TE_INLINE void stream_bytes(void* out, const void* in, int64_t n) {
  auto* to = static_cast<uint8_t*>(out);
  const auto* from = static_cast<const uint8_t*>(in);
  int64_t i = 0;
  if (is_line_aligned(to))
    for (; i + kLineBytes <= n; i += kLineBytes) stream_line(to + i, from + i);
  if (i < n) memcpy(to + i, from + i, n - i);
}

// After a thread's last streamed store, so that other threads see them all.
inline void finish_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace apex_te
