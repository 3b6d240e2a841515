// How a warp's 16 rows of a tile leave: bias and what is added, rounding, copies to global memory.
#pragma once

#include "dense_gemm/dense_gemm_sums.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where the thread's sums lie: d[4 j + {0, 1}] at `row` and column + 8 j + {0, 1}, d[4 j + {2, 3}]
// eight rows below; those from j = `groups` on are behind the last column.
struct Own {
  int64_t row, column;
  int groups;
};

__device__ __forceinline__ float2 pair_at(const float* p) {
  return *reinterpret_cast<const float2*>(p);
}
__device__ __forceinline__ float2 pair_at(const uint16_t* p) {
  const uint32_t word = *reinterpret_cast<const uint32_t*>(p);
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
}

template <int kSize>
__device__ __forceinline__ void add_bias(float (&d)[kSize], const DenseGemm& g, const Own& own) {
#pragma unroll
  for (int j = 0; j < kSize / 4; ++j) {
    if (j >= own.groups) break;
    const float2 v = pair_at(g.bias + own.column + 8 * j);
    d[4 * j] += v.x;
    d[4 * j + 1] += v.y;
    d[4 * j + 2] += v.x;
    d[4 * j + 3] += v.y;
  }
}

// Adds rows of a matrix like out, some loads at a time. Sums outside of the matrix are not stored:
// to them something is added that exists.
template <typename T, int kSize>
__device__ __forceinline__ void add_rows(float (&d)[kSize], const T* added, const DenseGemm& g,
                                         const Own& own) {
  constexpr int kAtOnce = kSize % 32 == 0 ? 8 : 4;
  const int64_t last = g.m - 1;
  const T* p = added + min(own.row, last) * g.n + own.column;
  const T* p_8 = added + min(own.row + 8, last) * g.n + own.column;
  if (own.groups <= 0) return;
#pragma unroll
  for (int first = 0; first < kSize / 4; first += kAtOnce) {
    float2 v[kAtOnce], v_8[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = min(first + i, own.groups - 1) * 8;
      v[i] = pair_at(p + at);
      v_8[i] = pair_at(p_8 + at);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int j = first + i;
      d[4 * j] += v[i].x;
      d[4 * j + 1] += v[i].y;
      d[4 * j + 2] += v_8[i].x;
      d[4 * j + 3] += v_8[i].y;
    }
    __syncwarp();  // or the compiler makes all loads at once, for which there are no registers
  }
}

// The lane's row of four 8x8 matrices that a warp stores: 8 rows below for odd matrices, and for
// the last two one chunk of 16 bytes right.
struct MatrixRow {
  uint32_t row, right;
  __device__ __forceinline__ MatrixRow()
      : row(threadIdx.x % 32 % 16), right(threadIdx.x % 32 / 16) {}
};

// Writes kStaged columns from `first` of the tile on of the warp's rows, which begin at `row` of
// out, through `staged` in shared memory. The copy leaves out what is behind the matrix's end.
template <typename V>
__device__ __forceinline__ void store_part(const float (&d)[kSums<V>], const Params& p,
                                           uint32_t staged, int row, int column, int first) {
  const uint32_t lane = threadIdx.x % 32;
  const MatrixRow own;
  const uint32_t swizzle = V::kBox == 64 ? own.row % 8 : own.row / 2 % 4;
  if (lane == 0) stores_wait();
  __syncwarp();
#pragma unroll
  for (int j = 0; j < V::kStaged / 8; j += 2) {
    const float* x = d + (first / 8 + j) * 4;
    const uint32_t chunk = j % (V::kBox / 8) + own.right;
    const uint32_t at = staged + j / (V::kBox / 8) * V::kBoxBytes + own.row * (V::kBox * 2) +
                        (chunk ^ swizzle) * 16;
    store_matrices(at, bf16x2_of(x[0], x[1]), bf16x2_of(x[2], x[3]), bf16x2_of(x[4], x[5]),
                   bf16x2_of(x[6], x[7]));
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (lane == 0 && row < p.g.m) {
#pragma unroll
    for (int i = 0; i < V::kStaged / V::kBox; ++i)
      if (column + first + i * V::kBox < p.g.n)
        store_box(p.out, column + first + i * V::kBox, row, staged + i * V::kBoxBytes);
    stores_commit();
  }
}

// Stores to a float32 out from registers: 4 threads write 32 bytes of a row.
template <int kSize>
__device__ __forceinline__ void store_wide(const float (&d)[kSize], const DenseGemm& g,
                                           const Own& own) {
  float* out = g.wide_out + own.row * g.n + own.column;
#pragma unroll
  for (int j = 0; j < kSize / 4; ++j) {
    if (j >= own.groups) break;
    if (own.row < g.m)
      *reinterpret_cast<float2*>(out + 8 * j) = make_float2(d[4 * j], d[4 * j + 1]);
    if (own.row + 8 < g.m)
      *reinterpret_cast<float2*>(out + 8 * g.n + 8 * j) = make_float2(d[4 * j + 2], d[4 * j + 3]);
  }
}

// Where the thread's sums of a tile lie.
__device__ __forceinline__ Own own_of(const DenseGemm& g, const Tile& tile) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  return {tile.row + warp * kWarpRows + lane / 4, tile.column + lane % 4 * 2,
          static_cast<int>((g.n - tile.column) / 8)};
}

// Epilogue of the plain product.
template <typename V>
struct PlainStore {
  const Params& p;
  uint32_t staged;  // of the warp

  __device__ __forceinline__ PlainStore(const Params& params, uint32_t all)
      : p(params), staged(all + threadIdx.x / 32 * V::kStagedBytes) {}

  static __device__ __forceinline__ void prefetch(const Params& p, const Tile& tile) {
    if (p.g.added || p.g.wide_added) prefetch_box(p.added, tile.column, tile.row);
  }

  __device__ __forceinline__ void store(float (&d)[kSums<V>], const Tile& tile, float factor) {
    const Own own = own_of(p.g, tile);
#pragma unroll
    for (int i = 0; i < kSums<V>; ++i) d[i] *= factor;
    if (p.g.bias) add_bias(d, p.g, own);
    if (p.g.added) add_rows(d, p.g.added, p.g, own);
    if (p.g.wide_added) add_rows(d, p.g.wide_added, p.g, own);
    if (p.g.wide_out) {
      store_wide(d, p.g, own);
      return;
    }
    const int row = tile.row + static_cast<int>(threadIdx.x / 32) * kWarpRows;
#pragma unroll
    for (int first = 0; first < V::kColumns; first += V::kStaged)
      store_part<V>(d, p, staged, row, tile.column, first);
  }

  __device__ __forceinline__ void finish() const {
    if (threadIdx.x % 32 == 0) stores_wait();
  }
};

#else

template <typename V>
struct PlainStore;

#endif

}  // namespace apex_te
