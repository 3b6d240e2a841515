// Largest magnitudes of the rows and the columns of a thread's 8 x 8 patch, and over lanes.
//
// Magnitudes are kept as integers of the element's own width, two in a word for 16-bit types:
// exact, ordered like the values, NaN above infinity.
#pragma once

#include "common/gpu/vec.h"

namespace apex_te {

template <typename T>
struct Magnitude {
  static constexpr int kPerWord = 4 / sizeof(T);
  static constexpr int kWords = kVec / kPerWord;  // words of 8 magnitudes

  static __device__ __forceinline__ uint32_t of(uint32_t word) {
    return word & (kPerWord == 1 ? 0x7FFFFFFFu : 0x7FFF7FFFu);
  }
  static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    return kPerWord == 1 ? max(a, b) : max_u16x2(a, b);
  }
  // The i-th magnitude of a word as a float's bits.
  static __device__ __forceinline__ uint32_t bits(uint32_t word, int i) {
    if (kPerWord == 1) return word;
    const auto half = static_cast<uint16_t>(i ? word >> 16 : word);
    if (std::is_same<T, Half>::value) return float_bits(to_float(Half{half}));
    return static_cast<uint32_t>(half) << 16;
  }
};

// Magnitude i of rows (columns) is that of the patch's row (column) i.
template <typename T>
__device__ __forceinline__ void patch_amax(const Vec8<T>* in, uint32_t* rows, uint32_t* cols) {
  using M = Magnitude<T>;
  uint32_t row[kVec];
#pragma unroll
  for (int w = 0; w < M::kWords; ++w) cols[w] = 0;
#pragma unroll
  for (int r = 0; r < kVec; ++r) {
    row[r] = 0;
#pragma unroll
    for (int w = 0; w < M::kWords; ++w) {
      const uint32_t a = M::of(in[r].words[w]);
      cols[w] = M::larger(cols[w], a);
      row[r] = M::larger(row[r], a);
    }
  }
#pragma unroll
  for (int w = 0; w < M::kWords; ++w) {
    if (M::kPerWord == 1) {
      rows[w] = row[w];
    } else {  // folds the two halves of two rows at once
      rows[w] = M::larger(__byte_perm(row[2 * w], row[2 * w + 1], 0x5410),
                          __byte_perm(row[2 * w], row[2 * w + 1], 0x7632));
    }
  }
}

// Maximum of words[kCount] over the lanes that differ in bits kStride, 2 kStride, ..., kEnd / 2 of
// their number. While there are two words or more a lane gives half of them away, so that it ends
// with the words from first_word on only, in words[0], words[1], ...
template <typename T, int kCount, int kStride, int kEnd>
__device__ __forceinline__ void lanes_amax(uint32_t* words) {
  using M = Magnitude<T>;
  if constexpr (kStride < kEnd) {
    constexpr int kKept = kCount > 1 ? kCount / 2 : 1;
    const bool upper = kCount > 1 && (threadIdx.x & kStride) != 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const uint32_t other = kCount > 1 ? words[i + kCount / 2] : words[i];
      const uint32_t kept = upper ? other : words[i];
      const uint32_t sent = upper ? words[i] : other;
      words[i] = M::larger(kept, __shfl_xor_sync(0xFFFFFFFFu, sent, kStride));
    }
    lanes_amax<T, kKept, 2 * kStride, kEnd>(words);
  }
}

// Index of the first of kCount words that a lane holds after lanes_amax from kStride on.
template <int kCount>
__device__ __forceinline__ int first_word(int lane_over_stride) {
  int first = 0;
#pragma unroll
  for (int half = kCount / 2, bit = 1; half; half /= 2, bit *= 2)
    first += lane_over_stride & bit ? half : 0;
  return first;
}

}  // namespace apex_te
