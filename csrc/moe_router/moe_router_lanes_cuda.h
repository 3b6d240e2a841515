// A lane's V consecutive experts of a row: loads, stores, sums and maxima.
#pragma once

#include "common/gpu/device.h"
#include "moe_router/moe_router.h"

namespace apex_te {
namespace {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

template <int V>
__device__ __forceinline__ bool has_expert(int i, int experts) {
  return static_cast<int>(threadIdx.x % 32) * V + i < experts;
}

// Whether groups are whole lanes, a power of 2 of them.
APEX_TE_HD bool has_groups_of_lanes(const Router& p, int each) {
  const int width = p.group_size / each;
  return p.group_size % each == 0 && (width & (width - 1)) == 0;
}

__device__ __forceinline__ uint32_t max_of(uint32_t a, uint32_t b) { return a > b ? a : b; }
template <int V>
__device__ __forceinline__ uint32_t largest(const uint32_t* keys) {
  uint32_t key = keys[0];
#pragma unroll
  for (int i = 1; i < V; ++i) key = max_of(key, keys[i]);
  return key;
}

// Makes the first key of a value 0, and returns its place.
template <int V>
__device__ __forceinline__ int remove(uint32_t* keys, uint32_t key) {
  int slot = 0;
#pragma unroll
  for (int i = V - 1; i >= 0; --i)
    if (keys[i] == key) slot = i;
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (i == slot) keys[i] = 0;
  return slot;
}

template <int V>
__device__ __forceinline__ float sum_experts(const float* values) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < V; ++i) sum += values[i];
  return warp_sum(sum);
}

// Words in accesses of 16 bytes, or of all there are.
template <int W>
__device__ __forceinline__ void load_words(const void* p, uint32_t* words) {
  if constexpr (W % 4 == 0) {
#pragma unroll
    for (int i = 0; i < W / 4; ++i) {
      const uint4 w = static_cast<const uint4*>(p)[i];
      words[4 * i] = w.x, words[4 * i + 1] = w.y, words[4 * i + 2] = w.z, words[4 * i + 3] = w.w;
    }
  } else if constexpr (W == 2) {
    const uint2 w = *static_cast<const uint2*>(p);
    words[0] = w.x, words[1] = w.y;
  } else {
    words[0] = *static_cast<const uint32_t*>(p);
  }
}
template <int W>
__device__ __forceinline__ void store_words(const uint32_t* words, void* p) {
  if constexpr (W % 4 == 0) {
#pragma unroll
    for (int i = 0; i < W / 4; ++i)
      static_cast<uint4*>(p)[i] =
          make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  } else if constexpr (W == 2) {
    *static_cast<uint2*>(p) = make_uint2(words[0], words[1]);
  } else {
    *static_cast<uint32_t*>(p) = words[0];
  }
}

__device__ __forceinline__ float element_of(float, const uint32_t* words, int i) {
  return __uint_as_float(words[i]);
}
__device__ __forceinline__ float element_of(BFloat16, const uint32_t* words, int i) {
  return __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
}
__device__ __forceinline__ float element_of(Half, const uint32_t* words, int i) {
  return to_float(Half{static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2))});
}
__device__ __forceinline__ uint32_t word_of(BFloat16, float low, float high) {
  return bf16x2_of(low, high);
}
__device__ __forceinline__ uint32_t word_of(Half, float low, float high) {
  return f16x2_of(low, high);
}

// Values of a lane's experts of a row, 0 where there is none. is_whole: of each lane all or none
// exist, at addresses for whole accesses.
template <int V, typename T>
__device__ __forceinline__ void load_experts(const T* row, int experts, bool is_whole,
                                             float* values) {
  const int first = threadIdx.x % 32 * V;
  if constexpr (V * sizeof(T) >= 4) {
    if (is_whole) {
      constexpr int W = V * sizeof(T) / 4;
      uint32_t words[W];
#pragma unroll
      for (int i = 0; i < W; ++i) words[i] = 0;
      if (first < experts) load_words<W>(row + first, words);
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] = element_of(T{}, words, i);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < V; ++i) values[i] = first + i < experts ? to_float(row[first + i]) : 0.0f;
}

template <int V, typename T>
__device__ __forceinline__ void store_experts(const float* values, int experts, bool is_whole,
                                              T* row) {
  const int first = threadIdx.x % 32 * V;
  if constexpr (V * sizeof(T) >= 4) {
    if (is_whole) {
      if (first >= experts) return;
      constexpr int W = V * sizeof(T) / 4;
      uint32_t words[W];
#pragma unroll
      for (int i = 0; i < W; ++i) {
        if constexpr (sizeof(T) == 4)
          words[i] = __float_as_uint(values[i]);
        else
          words[i] = word_of(T{}, values[2 * i], values[2 * i + 1]);
      }
      return store_words<W>(words, row + first);
    }
  }
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (first + i < experts) row[first + i] = from_float<T>(values[i]);
}

template <int V>
__device__ __forceinline__ void store_flags(const uint8_t* flags, int experts, bool is_whole,
                                            uint8_t* row) {
  const int first = threadIdx.x % 32 * V;
  if constexpr (V >= 4) {
    if (is_whole) {
      if (first >= experts) return;
      uint32_t words[V / 4];
#pragma unroll
      for (int i = 0; i < V / 4; ++i)
        words[i] = flags[4 * i] | flags[4 * i + 1] << 8 | flags[4 * i + 2] << 16 |
                   static_cast<uint32_t>(flags[4 * i + 3]) << 24;
      return store_words<V / 4>(words, row + first);
    }
  }
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (first + i < experts) row[first + i] = flags[i];
}

}  // namespace
}  // namespace apex_te
