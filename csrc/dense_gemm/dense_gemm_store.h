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
        store_box(p.out, column + first + i * V::kBox, row, staged + i * V::kBoxBytes, p.keep_out);
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
  static constexpr int kSteps = 0;
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

// The rounded sums of a tile, kept in registers and stored while the next tile is multiplied.
template <typename V>
struct Rounded {
  int row = 1 << 30, column = 0;  // of the warp's part; before the first tile behind the matrix
  uint32_t words[kSums<V> / 2] = {};

  // `bias(j)` is added to the sums of column group j before rounding.
  template <typename Bias>
  __device__ __forceinline__ void take(const float (&d)[kSums<V>], const Tile& tile, float factor,
                                       bool has_bias, const Bias& bias) {
    row = tile.row + static_cast<int>(threadIdx.x / 32) * kWarpRows;
    column = V::kGated ? tile.column / 2 : tile.column;
    if (has_bias)
      round(d, factor, bias);
    else
      round(d, factor, [](int) { return make_float2(-0.0f, -0.0f); });
  }
  template <typename Bias>
  __device__ __forceinline__ void round(const float (&d)[kSums<V>], float factor,
                                        const Bias& bias) {
#pragma unroll
    for (int j = 0; j < kSums<V> / 4; ++j) {
      const float2 v = bias(j);
      // Two roundings, as where something else is added.
      words[2 * j] =
          bf16x2_of(__fmul_rn(d[4 * j], factor) + v.x, __fmul_rn(d[4 * j + 1], factor) + v.y);
      words[2 * j + 1] =
          bf16x2_of(__fmul_rn(d[4 * j + 2], factor) + v.x, __fmul_rn(d[4 * j + 3], factor) + v.y);
      asm volatile(""
                   : "+r"(words[2 * j]), "+r"(words[2 * j + 1]));  // now: the next products write d
    }
  }
  // Writes 16 columns, the words from 4 * pair on, to the chunk of 16 bytes `chunk` of a row.
  __device__ __forceinline__ void stage(uint32_t to, int pair, uint32_t chunk) const {
    const MatrixRow own;
    const uint32_t* w = words + 4 * pair;
    store_matrices(to + own.row * 128 + ((chunk + own.right) ^ own.row % 8) * 16, w[0], w[1], w[2],
                   w[3]);
  }
};

// Epilogue of the plain product to bfloat16, beside the products of the next tile.
template <typename V>
struct LateStore {
  static constexpr int kSteps = V::kColumns / 64;
  static constexpr uint32_t kBytes = kWarpRows * 128;
  static_assert(V::kStagedBytes >= 2 * kBytes, "room for two boxes");
  const Params& p;
  uint32_t staged;  // of the warp
  Rounded<V> last;

  __device__ __forceinline__ LateStore(const Params& params, uint32_t all)
      : p(params), staged(all + threadIdx.x / 32 * V::kStagedBytes) {}

  static __device__ __forceinline__ void prefetch(const Params&, const Tile&) {}

  __device__ __forceinline__ void take(float (&d)[kSums<V>], const Tile& tile, float factor) {
    const Own own = own_of(p.g, tile);
    last.take(d, tile, factor, p.g.bias, [&](int j) {
      return j < own.groups ? pair_at(p.g.bias + own.column + 8 * j) : make_float2(0.0f, 0.0f);
    });
  }

  template <int kStep>
  __device__ __forceinline__ void step() {
    const bool is_first = threadIdx.x % 32 == 0;
    const uint32_t to = staged + kStep % 2 * kBytes;
    if (is_first) stores_wait<1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) last.stage(to, 4 * kStep + i, 2 * i);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (is_first) {
      if (last.row < p.g.m && last.column + kStep * 64 < p.g.n)
        store_box(p.out, last.column + kStep * 64, last.row, to, p.keep_out);
      stores_commit();  // without a store, too, for the count of those before
    }
  }

  __device__ __forceinline__ void finish() {
    all_steps(*this, std::make_integer_sequence<int, kSteps>{});
    if (threadIdx.x % 32 == 0) stores_wait();
  }
};

#else

template <typename V>
struct PlainStore;
template <typename V>
struct LateStore;

#endif

}  // namespace apex_te
