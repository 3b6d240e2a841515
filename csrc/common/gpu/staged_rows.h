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

// kRows rows of a half-warp in shared memory, and in their place, once read, FP8 codes made of
// them.
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
__device__ __forceinline__ void store_staged(Bits* p, const uint32_t (&own)[kWords],
                                             unsigned length, unsigned lane) {
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
    for (int i = 0; i < 2; ++i) out[i] = __funnelshift_r(words[i], words[i + 1], 8 * (skipped & 3));
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

// Keeps a value in a register: the compiler would compute it anew in each round of a loop.
__device__ __forceinline__ int kept(int value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : APEX_TE_REGISTER(value));
#endif
  return value;
}

// The rows of a half-warp in a matrix, from the first of its columns on, `ld` elements apart.
template <typename Bits>
struct StagedMatrix {
  Bits* first;
  int64_t ld;

  __device__ __forceinline__ Bits* row(int r) const { return first + r * ld; }
  // Elements before row r in its first aligned 16 bytes, of 16-bit ones.
  __device__ __forceinline__ unsigned before(int r) const {
    return (static_cast<unsigned>(reinterpret_cast<uintptr_t>(first)) / 2 +
            static_cast<unsigned>(r) * static_cast<unsigned>(ld)) %
           kVec;
  }
};

// What rows and columns of matrices a half-warp has.
struct StagedPlace {
  int64_t row, col;  // the first
  int rows, cols;    // that exist from there on, of 128 columns
  int lane;

  __device__ __forceinline__ StagedPlace(int64_t first_row, int64_t first_col, int64_t rows_left,
                                         int64_t cols_left)
      : row(first_row),
        col(first_col),
        rows(kept(static_cast<int>(rows_left < kStagedLanes ? rows_left : kStagedLanes))),
        cols(kept(static_cast<int>(cols_left < kStagedCols ? cols_left : kStagedCols))),
        lane(threadIdx.x % kStagedLanes) {}

  template <typename Bits>
  __device__ __forceinline__ StagedMatrix<Bits> of(Bits* matrix, int64_t ld) const {
    return {matrix + row * ld + col, ld};
  }
  __device__ __forceinline__ StagedMatrix<const uint16_t> of_16_bits(const void* matrix,
                                                                     int64_t ld) const {
    return of(static_cast<const uint16_t*>(matrix), ld);
  }
  // Columns of row r that exist.
  __device__ __forceinline__ int length(int r) const { return r < rows ? cols : 0; }

  // Copies kRows rows. `matrix`: the memory's begin, before which nothing is read.
  template <int kRows>
  __device__ __forceinline__ void fetch(const StagedMatrix<const uint16_t>& m, const void* matrix,
                                        StagedRows<kRows>& to) const {
    if (m.row(0) - m.before(0) + kVec * lane < matrix) return fetch_elements(m, to);
#pragma unroll
    for (int r = 0; r < kRows; ++r) fetch_word(m, r, lane, &to.words[r][lane]);
    if (lane < kRows) fetch_word(m, lane, kStagedLanes, &to.words[lane][kStagedLanes]);
  }
  // The 8 elements of a lane, zeros where the matrix has none, after finish_fetches.
  template <typename T = BFloat16, int kRows>
  __device__ __forceinline__ Vec8<T> read(const StagedMatrix<const uint16_t>& m,
                                          const StagedRows<kRows>& from, int r) const {
    const uint4 a = from.words[r][lane], b = from.words[r][lane + 1];
    uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    Vec8<T> out;
    shift_words<4>(words, 2 * m.before(r), out.words);
    return out;
  }

 private:
  // Copies word i of row r.
  __device__ __forceinline__ void fetch_word(const StagedMatrix<const uint16_t>& m, int r, int i,
                                             uint4* to) const {
    const int before = static_cast<int>(m.before(r));
    const int left = (r < rows ? cols + before : 0) - kVec * i;
    copy_async_first(to, m.row(r) - before + kVec * i, left < 0 ? 0 : left < kVec ? left : kVec);
  }
  // A lane's words of kRows rows by element, where the first of them begins before the matrix.
  template <int kRows>
  __device__ __forceinline__ void fetch_elements(const StagedMatrix<const uint16_t>& m,
                                                 StagedRows<kRows>& to) const {
#pragma unroll 1
    for (int i = 0; i < 2 * kRows * kVec; ++i) {
      const int is_last = i / (kRows * kVec), r = i / kVec % kRows;
      const int word = is_last ? kStagedLanes : lane;
      const int c = kVec * word + i % kVec - static_cast<int>(m.before(r));
      if (is_last && lane != r) continue;
      reinterpret_cast<uint16_t*>(&to.words[r][word])[i % kVec] =
          r < rows && c >= 0 && c < cols ? m.row(r)[c] : uint16_t{0};
    }
  }
};

}  // namespace apex_te
