// Vectors of 8 elements or codes at addresses of any alignment, such as rows of an odd length:
// whole aligned words around them and shifts instead of an access for each element.
#pragma once

#include "common/gpu/vec.h"

namespace apex_te {

// out[i] = bytes shift + 4 i to shift + 4 i + 3 of the words, for a shift of less than 16.
template <int kOut>
__device__ __forceinline__ void shift_words(uint32_t (&words)[kOut + 4], unsigned shift,
                                            uint32_t* out) {
#pragma unroll
  for (int i = 0; i < kOut + 2; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < kOut + 1; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < kOut; ++i) out[i] = __funnelshift_r(words[i], words[i + 1], 8 * (shift & 3));
}

// The first n of 8 elements, zeros behind them. begin, end: the memory that may be read.
template <typename T>
__device__ __forceinline__ Vec8<T> load_shifted(const T* p, int64_t n, const T* begin,
                                                const T* end) {
  constexpr int kParts = sizeof(T) / 2, kWords = 4 * kParts;  // of 16 bytes, of 4 bytes
  const auto address = reinterpret_cast<uintptr_t>(p);
  const unsigned shift = address % 16;
  const uintptr_t base = address - shift;
  if (n <= 0) return Vec8<T>{};
  if (base < reinterpret_cast<uintptr_t>(begin) ||
      base + 16 * (kParts + 1) > reinterpret_cast<uintptr_t>(end))
    return load_partial(p, n);
  uint32_t words[kWords + 4];
#pragma unroll
  for (int i = 0; i <= kParts; ++i) {
    const uint4 part = reinterpret_cast<const uint4*>(base)[i];
    words[4 * i] = part.x, words[4 * i + 1] = part.y;
    words[4 * i + 2] = part.z, words[4 * i + 3] = part.w;
  }
  Vec8<T> v;
  shift_words<kWords>(words, shift, v.words);
  if (n < kVec) {
    constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int64_t left = n - i * kPerWord;
      if (left <= 0) v.words[i] = 0;
      if (kPerWord == 2 && left == 1) v.words[i] &= 0xFFFFu;
    }
  }
  return v;
}

// Writes the first n of 8 codes in the largest accesses that the address allows.
__device__ __forceinline__ void store_codes_shifted(uint8_t* out, uint2 codes, int64_t n) {
  if (n < kVec) return store_codes_partial(out, codes, n);
  uint64_t left = uint64_t{codes.y} << 32 | codes.x;
  const unsigned at = reinterpret_cast<uintptr_t>(out) % 4;
  if (at & 1) *out = static_cast<uint8_t>(left), left >>= 8, out += 1;
  if (at == 1 || at == 2)
    *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(left), left >>= 16, out += 2;
  *reinterpret_cast<uint32_t*>(out) = static_cast<uint32_t>(left), left >>= 32, out += 4;
  if (at == 0) *reinterpret_cast<uint32_t*>(out) = static_cast<uint32_t>(left);
  if (at == 2 || at == 3)
    *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(left), left >>= 16, out += 2;
  if (at & 1) *out = static_cast<uint8_t>(left);
}

}  // namespace apex_te
