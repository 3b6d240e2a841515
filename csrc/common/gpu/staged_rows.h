// Rows of 16-bit elements and of FP8 codes at addresses of any alignment, for half-warps of which a
// lane has 8 columns of some rows.
//
// Loads: the aligned words around a row's 128 columns are copied to shared memory, all of them in
// flight and without a register, and a lane reads the two around its own. Stores: a lane takes what
// its aligned word needs from its neighbour; what is left at the ends leaves by element.
#pragma once

#include "common/gpu/shifted.h"

namespace apex_te {

constexpr int kStagedLanes = 16;  // of one row
constexpr int kStagedCols = kStagedLanes * kVec;

// The first n of 8 elements into shared memory, zeros behind them; only these are read.
__device__ __forceinline__ void copy_async_first(uint4* shared, const uint16_t* global, int n) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(global)), "r"(2 * n)
               : "memory");
#else
  for (int i = 0; i < kVec; ++i)
    reinterpret_cast<uint16_t*>(shared)[i] = i < n ? global[i] : uint16_t{0};
#endif
}

// kRows rows of a half-warp in shared memory, and in their place, once read, FP8 codes made of them.
template <int kRows>
struct StagedRows {
  static_assert(kRows <= kStagedLanes, "a lane for the last word of each row");
  uint4 words[kRows][kStagedLanes + 1];

  __device__ __forceinline__ uint2& codes(int r, int lane) {
    return reinterpret_cast<uint2*>(words[r])[lane];
  }
};

// By all lanes of a warp, before they read what they fetched.
__device__ __forceinline__ void finish_fetches() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && !defined(APEX_TE_PORTABLE)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  __syncwarp();
}

// Stores a row of a half-warp, 8 elements of Bits for each lane, from p on, of which `length`
// exist. All lanes of a warp call it.
template <typename Bits, int kWords>
__device__ __forceinline__ void store_staged(Bits* p, const uint32_t (&own)[kWords], unsigned length,
                                             unsigned lane) {
  constexpr unsigned kBytes = 4 * kWords, kPerWord = 4 / sizeof(Bits);
  static_assert(kBytes == kVec * sizeof(Bits), "8 elements");
  constexpr uint32_t kAll = 0xFFFFFFFFu;
  const unsigned gap = (0u - static_cast<unsigned>(reinterpret_cast<uintptr_t>(p))) % kBytes;
  const unsigned head = min(gap / static_cast<unsigned>(sizeof(Bits)), length);
  uint32_t words[2 * kWords], out[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = own[i];
    words[kWords + i] = __shfl_down_sync(kAll, own[i], 1, kStagedLanes);
  }
  const unsigned skipped = head * static_cast<unsigned>(sizeof(Bits));
  if constexpr (kWords == 4) {
    shift_words<4>(words, skipped, out);
  } else {
    const bool upper = skipped & 4;
#pragma unroll
    for (int i = 0; i < 3; ++i) words[i] = upper ? words[i + 1] : words[i];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      out[i] = __funnelshift_r(words[i], words[i + 1], 8 * (skipped & 3));
  }
  const unsigned vectors = (length - head) / kVec;  // whole words
  if (lane < vectors) {
    if constexpr (kWords == 4)
      store_16(reinterpret_cast<uint4*>(p + head + lane * kVec),
               make_uint4(out[0], out[1], out[2], out[3]));
    else
      *reinterpret_cast<uint2*>(p + head + lane * kVec) = make_uint2(out[0], out[1]);
  }
  // Fewer than 16 elements are left before and behind them.
  const unsigned i = lane < head ? lane : lane + vectors * kVec;
  uint32_t word = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint32_t there = __shfl_sync(kAll, own[w], i / kVec, kStagedLanes);
    if (i % kVec / kPerWord == w) word = there;
  }
  if (lane < length - vectors * kVec)
    p[i] = static_cast<Bits>(word >> 8 * sizeof(Bits) * (i % kPerWord));
}

// Where a half-warp's rows lie in matrices, whose rows are `ld` elements apart.
struct StagedPlace {
  int64_t row, col;  // the first
  int rows, cols;    // that exist from there on, of 128 columns
  int lane;

  __device__ __forceinline__ StagedPlace(int64_t first_row, int64_t first_col, int64_t rows_left,
                                         int64_t cols_left)
      : row(first_row),
        col(first_col),
        rows(static_cast<int>(rows_left < 0              ? 0
                              : rows_left < kStagedLanes ? rows_left
                                                         : kStagedLanes)),
        cols(static_cast<int>(cols_left < kStagedCols ? cols_left : kStagedCols)),
        lane(threadIdx.x % kStagedLanes) {}

  template <typename T>
  __device__ __forceinline__ T* address(T* matrix, int64_t ld, int r) const {
    return matrix + (row + r) * ld + col;
  }
  // Columns of row r that exist.
  __device__ __forceinline__ int length(int r) const { return r < rows ? cols : 0; }

  // Copies kRows rows of 16-bit elements.
  template <int kRows>
  __device__ __forceinline__ void fetch(const void* matrix, int64_t ld,
                                        StagedRows<kRows>& to) const {
#pragma unroll 2
    for (int r = 0; r < kRows; ++r) fetch_word(matrix, ld, r, lane, &to.words[r][lane]);
    if (lane < kRows) fetch_word(matrix, ld, lane, kStagedLanes, &to.words[lane][kStagedLanes]);
  }
  // The 8 elements of a lane, zeros where the matrix has none, after finish_fetches.
  template <int kRows>
  __device__ __forceinline__ Vec8<BFloat16> read(const void* matrix, int64_t ld,
                                                 const StagedRows<kRows>& from, int r) const {
    const uint4 a = from.words[r][lane], b = from.words[r][lane + 1];
    uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    Vec8<BFloat16> out;
    shift_words<4>(words, shift_of(matrix, ld, r), out.words);
    return out;
  }

 private:
  // Bytes before row r in its first aligned word.
  __device__ __forceinline__ unsigned shift_of(const void* matrix, int64_t ld, int r) const {
    const unsigned first = static_cast<unsigned>(reinterpret_cast<uintptr_t>(matrix)) +
                           2u * (static_cast<unsigned>(row) * static_cast<unsigned>(ld) +
                                 static_cast<unsigned>(col));
    return (first + 2u * static_cast<unsigned>(r) * static_cast<unsigned>(ld)) % 16;
  }
  // Copies word i of row r, whose elements before the matrix, if any, are not read.
  __device__ __forceinline__ void fetch_word(const void* matrix, int64_t ld, int r, int i,
                                             uint4* to) const {
    const int before = static_cast<int>(shift_of(matrix, ld, r)) / 2;
    const uint16_t* from =
        address(static_cast<const uint16_t*>(matrix), ld, r) - before + kVec * i;
    const int left = (r < rows ? cols + before : 0) - kVec * i;
    const int n = left < 0 ? 0 : left < kVec ? left : kVec;
    if (from >= matrix) return copy_async_first(to, from, n);
#pragma unroll 1
    for (int k = before; k < kVec; ++k)
      reinterpret_cast<uint16_t*>(to)[k] = k < n ? from[k] : uint16_t{0};
  }
};

}  // namespace apex_te
