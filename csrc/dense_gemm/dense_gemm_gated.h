// Epilogue of the product that makes the input of a gated activation: it stores the rounded sums,
// and the activation's FP8 data.
#pragma once

#include "common/gpu/vec.h"
#include "dense_gemm/dense_gemm_store.h"
#include "swiglu/swiglu.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// What is left of a gated product when all tiles are done.
__device__ __forceinline__ void finish_gated(const Gated& gated, uint32_t amax) {
  amax = warp_max(amax);
  if (threadIdx.x % 32 == 0 && gated.amax && amax)
    atomicMax(reinterpret_cast<unsigned int*>(gated.amax), amax);
  if (blockIdx.x == 0 && threadIdx.x == 0 && gated.scale_inv)
    *gated.scale_inv = 1.0f / *gated.scale;
}

// Of four columns of a quad a thread has 0, 2, 4, 6 (even threads) or 1, 3, 5, 7, one in each byte,
// in two rows. The quad's pairs of threads exchange bytes: even ones then have 0 to 3, odd ones 4
// to 7 of both rows.
__device__ __forceinline__ void join_columns(uint32_t& row, uint32_t& row_8) {
  const bool is_odd = threadIdx.x & 1;
  const uint32_t sent = __byte_perm(row, row_8, is_odd ? 0x5410 : 0x7632);
  const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, sent, 1);
  row = __byte_perm(row, got, is_odd ? 0x3524 : 0x5140);
  row_8 = __byte_perm(row_8, got, is_odd ? 0x3726 : 0x7160);
}

template <typename V, Activation kAct>
struct GatedStore {
  static_assert(V::kColumns == 256, "rows of FP8 data in shared memory are 128 bytes");
  const Params& p;
  uint32_t staged;  // of the warp
  float scale;
  uint32_t amax = 0;

  __device__ __forceinline__ GatedStore(const Params& params, uint32_t all)
      : p(params), staged(all + threadIdx.x / 32 * V::kStagedBytes), scale(*params.gated.scale) {}

  static __device__ __forceinline__ void prefetch(const Params&, const Tile&) {}

  // FP8 data of 16 outputs in two rows, from the 32 sums of both.
  __device__ __forceinline__ void encode(const float* d, bool has_row, bool has_row_8,
                                         uint32_t (&codes)[2]) {
    float y[4], y_8[4];
    uint32_t largest = 0, largest_8 = 0;
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const uint32_t pair = bf16x2_of(d[4 * a], d[4 * a + 1]);
      const uint32_t pair_8 = bf16x2_of(d[4 * a + 2], d[4 * a + 3]);
      y[a] = gated<kAct, false>(low_of(pair), high_of(pair));
      y_8[a] = gated<kAct, false>(low_of(pair_8), high_of(pair_8));
      largest = max(largest, magnitude_bits(y[a]));
      largest_8 = max(largest_8, magnitude_bits(y_8[a]));
    }
    if (has_row) amax = max(amax, largest);
    if (has_row_8) amax = max(amax, largest_8);
    codes[0] = encode_fp8x2<E4M3>(y[0] * scale, y[1] * scale) |
               encode_fp8x2<E4M3>(y[2] * scale, y[3] * scale) << 16;
    codes[1] = encode_fp8x2<E4M3>(y_8[0] * scale, y_8[1] * scale) |
               encode_fp8x2<E4M3>(y_8[2] * scale, y_8[3] * scale) << 16;
    join_columns(codes[0], codes[1]);
  }

  __device__ __forceinline__ void store(float (&d)[kSums<V>], const Tile& tile, float factor) {
    constexpr int kGroups = V::kColumns / kGatedGroup;
    const Own own = own_of(p.g, tile);
    const int row = tile.row + static_cast<int>(threadIdx.x / 32) * kWarpRows;
#pragma unroll
    for (int i = 0; i < kSums<V>; ++i) d[i] *= factor;
    if (p.g.bias) add_bias(d, p.g, own);
    uint32_t codes[kGroups][2];
#pragma unroll
    for (int first = 0; first < V::kColumns; first += V::kStaged) {
      store_part<V>(d, p, staged, row, tile.column, first);
#pragma unroll
      for (int q = first / kGatedGroup; q < (first + V::kStaged) / kGatedGroup; ++q) {
        const bool exists = 4 * q < own.groups;
        encode(d + 16 * q, exists && own.row < p.g.m, exists && own.row + 8 < p.g.m, codes[q]);
      }
    }
    store_codes(codes, row, tile.column / 2);
  }

  template <int kGroups>
  __device__ __forceinline__ void store_codes(const uint32_t (&codes)[kGroups][2], int row,
                                              int column) {
    const MatrixRow own;
    const bool is_first = threadIdx.x % 32 == 0;
    if (is_first) stores_wait();
    __syncwarp();
#pragma unroll
    for (int q = 0; q < kGroups; q += 2)
      store_matrices(staged + own.row * 128 + ((q + own.right) ^ own.row % 8) * 16, codes[q][0],
                     codes[q][1], codes[q + 1][0], codes[q + 1][1]);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (is_first && row < p.g.m) {
      store_box(p.act, column, row, staged);
      stores_commit();
    }
  }

  __device__ __forceinline__ void finish() const {
    if (threadIdx.x % 32 == 0) stores_wait();
    finish_gated(p.gated, amax);
  }
};

template <typename V>
using SwigluStore = GatedStore<V, Activation::kSilu>;

#else

template <typename V>
struct SwigluStore;

#endif

}  // namespace apex_te
