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

// By a whole warp: the words around a run of n elements at p to a chunk of shared memory that this
// warp alone reads (copy_chunk). begin, end: the memory that may be read; runs at its ends are
// copied by elements.
template <typename T>
__device__ __forceinline__ void copy_run(T* chunk, const T* p, int n, const T* begin, const T* end,
                                         uint64_t* barrier) {
  const int shift = offset_of(p), bytes = (shift + n * static_cast<int>(sizeof(T)) + 15) & ~15;
  const T* from = p - shift / static_cast<int>(sizeof(T));
  if (reinterpret_cast<uintptr_t>(from) >= reinterpret_cast<uintptr_t>(begin) &&
      reinterpret_cast<uintptr_t>(from) + bytes <= reinterpret_cast<uintptr_t>(end))
    return copy_chunk(chunk, from, bytes, barrier);
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = lane; i < n; i += 32) chunk[p - from + i] = p[i];
  __syncwarp();
  if (kCopyArrivals > 1 || lane == 0) barrier_arrive(barrier);
}

// By a whole warp: moves a run that copy_run copied from `p` to the chunk's begin, with zeros up to
// the end of its last vector.
template <typename T>
__device__ __forceinline__ void align_run(T* chunk, const void* p, int n) {
  constexpr int kGroup = 4, kPerWord = 16 / sizeof(T);
  const int lane = threadIdx.x % 32, shift = offset_of(p);
  uint4* words = reinterpret_cast<uint4*>(chunk);
  const int count = (n + kVec - 1) / kVec * (kVec / kPerWord);
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
  const int pad = count * kPerWord - n;
  if (lane < pad) chunk[n + lane] = T{};
  __syncwarp();
}

// By a whole warp: each `lanes` of its lanes, of which this is `lane`, store `size` bytes of shared
// memory, aligned to 8 bytes and written by them, at any address. The words at both ends, whose
// other bytes are others', leave by bytes.
__device__ __forceinline__ void store_run(const void* run, void* out, int size,
                                          int lane = threadIdx.x % 32, int lanes = 32) {
  const int shift = offset_of(out), end = shift + size;
  uint8_t* base = static_cast<uint8_t*>(out) - shift;
  __syncwarp();
#pragma unroll 4
  for (int w = lane + (shift ? 1 : 0); w < end / 16; w += lanes)
    store_16(reinterpret_cast<uint4*>(base) + w, bytes_at(run, 16 * w - shift));
  for (int i = lane; i < 32; i += lanes) {  // bytes of the first word and of the last
    const int at = i < 16 ? i : end / 16 * 16 + i - 16;
    if (at >= shift && at < end && (i < 16 ? shift != 0 || end < 16 : end >= 16))
      base[at] = static_cast<const uint8_t*>(run)[at - shift];
  }
  __syncwarp();
}

// Copies the 16 bytes at an aligned address, of which those from begin to end may be read.
__device__ __forceinline__ void copy_word(void* shared, const void* global, const void* begin,
                                          const void* end) {
  const auto at = reinterpret_cast<uintptr_t>(global);
  const auto first = reinterpret_cast<uintptr_t>(begin), past = reinterpret_cast<uintptr_t>(end);
  if (at >= first && at + 16 <= past) return copy_async16(shared, global);
#pragma unroll 1
  for (int i = 0; i < 16; i += 2)
    if (at + i >= first && at + i < past)
      *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(shared) + i) =
          *reinterpret_cast<const uint16_t*>(at + i);
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

// 8 values of weight or bias from column col on, zeros behind the last; of any alignment.
template <typename T>
__device__ __forceinline__ void load_any_params(const void* params, bool is_fp32, int64_t col,
                                                int64_t cols, float* values) {
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    values[i] = col + i < cols ? load_param<T>(params, is_fp32, col + i) : 0.0f;
}
template <typename T>
__device__ __forceinline__ void load_any_gamma(const NormParams& p, int64_t col, int64_t cols,
                                               float* gamma) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) gamma[i] = 1.0f;
  if (p.weight) load_any_params<T>(p.weight, p.is_fp32, col, cols, gamma);
#pragma unroll
  for (int i = 0; i < kVec; ++i) gamma[i] = col + i < cols ? gamma[i] + p.gamma_offset : 0.0f;
}

}  // namespace apex_te
