// Rows of any length at any address, such as those of an odd number of columns: in global memory
// whole aligned words of 16 bytes are read and written even so, and shared memory, where a row lies
// aligned for the kernel, is where they are shifted.
#pragma once

#include "common/gpu/shifted.h"
#include "common/norm/cuda.h"

namespace apex_te {

// Bytes of shared memory that a run of elements needs beyond its vectors: it is copied with the
// words at its ends.
constexpr int kRunMargin = 16;

// Bytes from the last multiple of 16 to p.
__device__ __forceinline__ int offset_of(const void* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) % 16);
}

// Makes the values from the n-th on `fill`.
__device__ __forceinline__ void fill_from(int n, float fill, float* values) {
  if (n >= kVec) return;
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = i < n ? values[i] : fill;
}

// The first n of 8 elements, zeros behind them.
template <typename T>
__device__ __forceinline__ void keep_first(int n, Vec8<T>* v) {
  if (n >= kVec) return;
  constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < static_cast<int>(2 * sizeof(T)); ++i) {
    const int left = n - i * kPerWord;
    if (left <= 0) v->words[i] = 0;
    if (kPerWord == 2 && left == 1) v->words[i] &= 0xFFFFu;
  }
}

// 16 bytes of shared memory from the i-th after p on, which is aligned to 8 bytes.
__device__ __forceinline__ uint4 bytes_at(const void* p, int i) {
  const uint2* from = static_cast<const uint2*>(p) + i / 8;
  const uint2 a = from[0], b = from[1], c = from[2];
  uint32_t words[6] = {a.x, a.y, b.x, b.y, c.x, c.y};
#pragma unroll
  for (int w = 0; w < 5; ++w) words[w] = i & 4 ? words[w + 1] : words[w];
#pragma unroll
  for (int w = 0; w < 4; ++w) words[w] = __funnelshift_r(words[w], words[w + 1], 8 * (i & 3));
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The words of 16 bytes around a run of `size` bytes at p. begin, end: the memory that may be read.
struct RunWords {
  const uint8_t* base;
  int shift, count;
  bool inside;

  __device__ __forceinline__ RunWords(const void* p, int size, const void* begin, const void* end)
      : base(static_cast<const uint8_t*>(p)), shift(offset_of(p)), count((shift + size + 15) / 16) {
    base -= shift;
    inside = base >= static_cast<const uint8_t*>(begin) &&
             base + 16 * count <= static_cast<const uint8_t*>(end);
  }
};

// Copies a run at the memory's ends, whose words are not all inside it, to where they would lie.
// `lane` of `lanes` does its share. A call, so that no kernel has code for it at each of its
// copies.
static __device__ __noinline__ void copy_end_run(uint8_t* words, const uint8_t* p, int size,
                                                 int lane, int lanes) {
  const int shift = offset_of(p);
  for (int i = 2 * lane; i < size; i += 2 * lanes)
    *reinterpret_cast<uint16_t*>(words + shift + i) = *reinterpret_cast<const uint16_t*>(p + i);
}

// By a whole warp: a run's words to a chunk of shared memory that this warp alone reads
// (copy_chunk).
__device__ __forceinline__ void copy_run(void* chunk, const void* p, int size, const void* begin,
                                         const void* end, uint64_t* barrier) {
  const RunWords words(p, size, begin, end);
  if (words.inside) return copy_chunk(chunk, words.base, 16 * words.count, barrier);
  const int lane = threadIdx.x % 32;
  copy_end_run(static_cast<uint8_t*>(chunk), static_cast<const uint8_t*>(p), size, lane, 32);
  __syncwarp();
  if (kCopyArrivals > 1 || lane == 0) barrier_arrive(barrier);
}

// By a whole warp: moves a run of `size` bytes that copy_run copied from p to the chunk's begin,
// with zeros up to `padded`.
static __device__ __noinline__ void align_run(void* chunk, const void* p, int size, int padded) {
  constexpr int kGroup = 4;
  const int lane = threadIdx.x % 32, shift = offset_of(p), count = padded / 16;
  uint4* words = static_cast<uint4*>(chunk);
#pragma unroll 1
  for (int first = 0; shift && first < count; first += 32 * kGroup) {
    uint4 bytes[kGroup];
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      const int w = first + g * 32 + lane;
      if (w < count) bytes[g] = bytes_at(chunk, 16 * w + shift);
    }
    __syncwarp();  // what these words hold now has been read
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      const int w = first + g * 32 + lane;
      if (w < count) words[w] = bytes[g];
    }
  }
  __syncwarp();
  if (lane < padded - size) static_cast<uint8_t*>(chunk)[size + lane] = 0;
  __syncwarp();
}

// By a whole warp: each `lanes` of its lanes, of which this is `lane`, store `size` bytes of shared
// memory, aligned to 8 bytes and written by them, at any address: kGroup words at a time. The words
// at both ends, whose other bytes are others', leave by bytes.
template <int kGroup>
__device__ __forceinline__ void store_words(const void* run, void* out, int size, int lane,
                                            int lanes) {
  const int shift = offset_of(out), end = shift + size;
  uint8_t* base = static_cast<uint8_t*>(out) - shift;
  __syncwarp();
#pragma unroll 1
  for (int first = lane + (shift ? 1 : 0); first < end / 16; first += kGroup * lanes) {
    uint4 bytes[kGroup];
#pragma unroll
    for (int g = 0; g < kGroup; ++g)
      if (first + g * lanes < end / 16) bytes[g] = bytes_at(run, 16 * (first + g * lanes) - shift);
#pragma unroll
    for (int g = 0; g < kGroup; ++g)
      if (first + g * lanes < end / 16)
        store_16(reinterpret_cast<uint4*>(base) + first + g * lanes, bytes[g]);
  }
#pragma unroll 1
  for (int i = lane; i < 32; i += lanes) {  // bytes of the first word and of the last
    const int at = i < 16 ? i : end / 16 * 16 + i - 16;
    if (at >= shift && at < end && (i < 16 ? shift != 0 || end < 16 : end >= 16))
      base[at] = static_cast<const uint8_t*>(run)[at - shift];
  }
  __syncwarp();
}
static __device__ __noinline__ void store_run(const void* run, void* out, int size) {
  store_words<4>(run, out, size, threadIdx.x % 32, 32);
}

// Widens `padded` columns of weight or bias from column col0 on into shared memory, zeros behind
// the last; 4 of each 8 go to one plane and 4 to another, `plane` after it. Ones if params is null.
template <typename T>
__device__ __forceinline__ void load_any_params(float4* planes, int plane, const void* params,
                                                bool is_fp32, float offset, int64_t col0,
                                                int padded, int64_t cols) {
#pragma unroll 1
  for (int i = threadIdx.x; i < padded; i += blockDim.x) {
    float value = 0.0f;
    if (col0 + i < cols)
      value = (params ? load_param<T>(params, is_fp32, col0 + i) : 1.0f) + offset;
    reinterpret_cast<float*>(planes + i / kVec + (i & 4 ? plane : 0))[i % 4] = value;
  }
}

}  // namespace apex_te
