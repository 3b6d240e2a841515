// Memory in words of 16 bytes where rows do not begin at multiples of 16: reads take two words and
// shift. What is read never lies beyond the words that the wanted bytes lie in, within which no
// allocation ends.
#pragma once

#include "common/gpu/vec.h"

namespace apex_te {
namespace {

__device__ __forceinline__ int misalignment(const void* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16);
}

// 16 bytes from byte `shift` (0 to 15) of two words on.
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, int shift) {
  const uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  uint32_t by_two[6], by_one[5];
#pragma unroll
  for (int i = 0; i < 6; ++i) by_two[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) by_one[i] = shift & 4 ? by_two[i + 1] : by_two[i];
  const int bits = shift % 4 * 8;
  return make_uint4(
      __funnelshift_r(by_one[0], by_one[1], bits), __funnelshift_r(by_one[1], by_one[2], bits),
      __funnelshift_r(by_one[2], by_one[3], bits), __funnelshift_r(by_one[3], by_one[4], bits));
}

// Bytes [first, last) of a word at `to`, a multiple of 16, in the fewest stores.
__device__ __forceinline__ void store_range(char* to, const uint4& w, int first, int last) {
  if (first >= last) return;
  if (first == 0 && last == 16) return store_16(reinterpret_cast<uint4*>(to), w);
  const uint32_t words[4] = {w.x, w.y, w.z, w.w};
  const auto word_of = [&](int at) {
    const uint32_t low = at & 4 ? words[1] : words[0], high = at & 4 ? words[3] : words[2];
    return at & 8 ? high : low;
  };
  for (int at = first; at < last;) {
    // the largest power of two that divides the address and does not go too far
    if (at % 8 == 0 && at + 8 <= last) {
      *reinterpret_cast<uint2*>(to + at) = at ? make_uint2(w.z, w.w) : make_uint2(w.x, w.y);
      at += 8;
    } else if (at % 4 == 0 && at + 4 <= last) {
      *reinterpret_cast<uint32_t*>(to + at) = word_of(at);
      at += 4;
    } else if (at % 2 == 0 && at + 2 <= last) {
      *reinterpret_cast<uint16_t*>(to + at) = static_cast<uint16_t>(word_of(at) >> at % 4 * 8);
      at += 2;
    } else {
      to[at] = static_cast<char>(word_of(at) >> at % 4 * 8);
      at += 1;
    }
  }
}

// Elements [at, at + 8) of a row of `cols`, at any address of an element; those that are not of the
// row may be anything. The words are kept as they were read until all of a thread's are on their
// way.
template <typename T>
struct Window {
  static constexpr int kWordsOf = sizeof(T) / 2;
  uint4 w[kWordsOf + 1];
  int shift;

  __device__ __forceinline__ void load(const T* row, int64_t at, int64_t cols) {
    const T* p = row + at;
    shift = misalignment(p);
    const char* from = reinterpret_cast<const char*>(p) - shift;
    const char *begin = reinterpret_cast<const char*>(row),
               *end = reinterpret_cast<const char*>(row + cols);
#pragma unroll
    for (int i = 0; i <= kWordsOf; ++i) {
      w[i] = make_uint4(0u, 0u, 0u, 0u);
      if (from + 16 * i + 16 > begin && from + 16 * i < end && (i < kWordsOf || shift))
        w[i] = *reinterpret_cast<const uint4*>(from + 16 * i);
    }
  }

  __device__ __forceinline__ Vec8<T> elements() const {
    Vec8<T> v;
#pragma unroll
    for (int i = 0; i < kWordsOf; ++i) {
      const uint4 word = shifted(w[i], w[i + 1], shift);
      v.words[4 * i] = word.x;
      v.words[4 * i + 1] = word.y;
      v.words[4 * i + 2] = word.z;
      v.words[4 * i + 3] = word.w;
    }
    return v;
  }
};

// The inverse, where `row + at` is a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ void store_window(T* row, const Vec8<T>& v, int64_t at, int64_t cols) {
  constexpr int kWordsOf = sizeof(T) / 2, kSize = static_cast<int>(sizeof(T));
  if (at + kVec <= 0 || at >= cols) return;
  if (at >= 0 && at + kVec <= cols) return store_vec_whole(row + at, v);
  const int first = static_cast<int>(max(int64_t{0}, -at)) * kSize;
  const int last = static_cast<int>(min(int64_t{kVec}, cols - at)) * kSize;
#pragma unroll
  for (int i = 0; i < kWordsOf; ++i)
    store_range(
        reinterpret_cast<char*>(row + at) + 16 * i,
        make_uint4(v.words[4 * i], v.words[4 * i + 1], v.words[4 * i + 2], v.words[4 * i + 3]),
        max(0, first - 16 * i), min(16, last - 16 * i));
}

}  // namespace
}  // namespace apex_te
