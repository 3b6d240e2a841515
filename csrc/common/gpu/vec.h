// 8 consecutive elements of one thread: 16-byte loads and stores, conversions, magnitudes.
#pragma once

#include <type_traits>

#include "common/gpu/device.h"

namespace apex_te {

constexpr int kVec = 8;

// Elements as they lie in memory, in words: 16 bytes, 32 for float. Kept as words because a struct
// of elements makes the compiler pass them through local memory.
template <typename T>
struct Vec8 {
  uint32_t words[2 * sizeof(T)];
};

template <typename T>
__device__ __forceinline__ Vec8<T> load_vec(const T* p) {
  Vec8<T> v;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) {
    const uint4 w = reinterpret_cast<const uint4*>(p)[i];
    v.words[4 * i] = w.x;
    v.words[4 * i + 1] = w.y;
    v.words[4 * i + 2] = w.z;
    v.words[4 * i + 3] = w.w;
  }
  return v;
}

template <typename T>
using BitsOf = typename std::conditional<sizeof(T) == 4, uint32_t, uint16_t>::type;

// The first n of 8 elements, one by one; the rest are zero.
template <typename T>
__device__ __forceinline__ Vec8<T> load_partial(const T* p, int64_t n) {
  Vec8<T> v = {};
  const BitsOf<T>* bits = reinterpret_cast<const BitsOf<T>*>(p);
  constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (i < n) v.words[i / kPerWord] |= static_cast<uint32_t>(bits[i]) << 16 * (i % kPerWord);
  return v;
}

template <typename T>
__device__ __forceinline__ void store_vec(T* p, const Vec8<T>& v) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i)
    reinterpret_cast<uint4*>(p)[i] =
        make_uint4(v.words[4 * i], v.words[4 * i + 1], v.words[4 * i + 2], v.words[4 * i + 3]);
}

// The first n of 8 elements, one by one.
template <typename T>
__device__ __forceinline__ void store_partial(T* p, const Vec8<T>& v, int64_t n) {
  BitsOf<T>* bits = reinterpret_cast<BitsOf<T>*>(p);
  constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (i < n) bits[i] = static_cast<BitsOf<T>>(v.words[i / kPerWord] >> 16 * (i % kPerWord));
}

// Elements 2i and 2i + 1 as floats.
__device__ __forceinline__ float2 pair_of(const Vec8<float>& v, int i) {
  return make_float2(__uint_as_float(v.words[2 * i]), __uint_as_float(v.words[2 * i + 1]));
}
__device__ __forceinline__ float2 pair_of(const Vec8<BFloat16>& v, int i) {
  return make_float2(__uint_as_float(v.words[i] << 16), __uint_as_float(v.words[i] & 0xFFFF0000u));
}
__device__ __forceinline__ float2 pair_of(const Vec8<Half>& v, int i) {
  return make_float2(to_float(Half{static_cast<uint16_t>(v.words[i])}),
                     to_float(Half{static_cast<uint16_t>(v.words[i] >> 16)}));
}

template <typename T>
__device__ __forceinline__ void unpack(const Vec8<T>& v, float* values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = pair_of(v, i);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

// Rounds to nearest even.
__device__ __forceinline__ void pack(const float* values, Vec8<float>* v) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) v->words[i] = __float_as_uint(values[i]);
}
__device__ __forceinline__ void pack(const float* values, Vec8<BFloat16>* v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v->words[i] = bf16x2_of(values[2 * i], values[2 * i + 1]);
}
__device__ __forceinline__ void pack(const float* values, Vec8<Half>* v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v->words[i] = f16x2_of(values[2 * i], values[2 * i + 1]);
}

// 8 scaled values to 8 FP8 codes.
template <typename Format>
__device__ __forceinline__ uint2 encode_values(const float* values, float scale) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs[i] = encode_fp8x2<Format>(values[2 * i] * scale, values[2 * i + 1] * scale);
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Writes the first n of 8 codes, one by one.
__device__ __forceinline__ void store_codes_partial(uint8_t* out, uint2 codes, int64_t n) {
#pragma unroll
  for (int c = 0; c < kVec; ++c)
    if (c < n) out[c] = static_cast<uint8_t>((c < 4 ? codes.x : codes.y) >> 8 * (c % 4));
}

// The first n of 8 codes, zeros behind them.
__device__ __forceinline__ uint2 first_codes(uint2 codes, int64_t n) {
  if (n >= kVec) return codes;
  if (n <= 0) return make_uint2(0u, 0u);
  const uint64_t kept = (uint64_t{1} << 8 * n) - 1;
  return make_uint2(codes.x & static_cast<uint32_t>(kept),
                    codes.y & static_cast<uint32_t>(kept >> 32));
}

// 8 values that need no scaling any more.
template <typename Format>
__device__ __forceinline__ uint2 encode_values(const float* values) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = encode_fp8x2<Format>(values[2 * i], values[2 * i + 1]);
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// 8 FP8 codes to values.
template <typename Format>
__device__ __forceinline__ void decode_values(uint2 codes, float* values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = decode_fp8x2<Format>((i < 2 ? codes.x : codes.y) >> 16 * (i % 2));
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

// The first n of 8 codes, one by one; the rest are zero.
__device__ __forceinline__ uint2 load_codes_partial(const uint8_t* p, int64_t n) {
  uint32_t words[2] = {0u, 0u};
#pragma unroll
  for (int c = 0; c < kVec; ++c)
    if (c < n) words[c / 4] |= static_cast<uint32_t>(p[c]) << 8 * (c % 4);
  return make_uint2(words[0], words[1]);
}

// store_vec as whole stores of 16 bytes, for addresses at which nvcc splits those of store_vec.
template <typename T>
__device__ __forceinline__ void store_vec_whole(T* p, const Vec8<T>& v) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i)
    store_16(reinterpret_cast<uint4*>(p) + i, make_uint4(v.words[4 * i], v.words[4 * i + 1],
                                                         v.words[4 * i + 2], v.words[4 * i + 3]));
}

}  // namespace apex_te
