// The sums of a warpgroup: how stages are multiplied into them, and how they leave.
#pragma once

#include "common/gpu/wgmma.h"
#include "grouped_gemm/grouped_gemm_ring.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float load_shared_scale(uint32_t at) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
  return value;
}

// Scales of 8 columns, of which a thread has two, from `at` on and of those 8, 16, 24 behind.
struct ColumnScales {
  float2 of[4];
  __device__ __forceinline__ void load(uint32_t at) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(of[j].x), "=f"(of[j].y)
                   : "r"(at + j * 8 * 4)
                   : "memory");
  }
};

// 64 x kTileN sums of products: d[4 j + ..] as multiply_add has them. Unless kFast, those of a
// stage, 128 each, are made apart and added in float32, scaled or not.
template <typename A, typename B, Scaling kScaling>
struct Sums {
  static constexpr int kStagedN = kStagedColumns<kScaling>;
  float d[kTileN / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) d[i] = 0.0f;
  }

  // Adds the products of stage i of a tile, which begins at `tiles`, all of which are in d after
  // finish(), and releases what was read.
  __device__ __forceinline__ void add(const Ring& ring, int stage, uint32_t tiles, int warpgroup,
                                      bool is_first) {
    const uint64_t a = matrix_at(tiles + warpgroup * (kBytesA / 2));
    const uint64_t b = matrix_at(tiles + kBytesA);
    if constexpr (kScaling == Scaling::kFast) {
      products_begin();
#pragma unroll
      for (int k = 0; k < kTileK / 32; ++k) multiply_add(A{}, B{}, d, a + 2 * k, b + 2 * k, true);
      products_commit();
      products_wait<1>();
      if (!is_first) ring.release(stage ? stage - 1 : kStages - 1);
    } else {
      // Half of the columns at a time, for registers: the other warpgroup multiplies while this one
      // adds.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part[kTileN / 4];
        products_begin();
#pragma unroll
        for (int k = 0; k < kTileK / 32; ++k)
          multiply_add(A{}, B{}, part, a + 2 * k, b + half * (kBytesB / 2 >> 4) + 2 * k, k > 0);
        products_commit();
        float* const sums = d + half * (kTileN / 4);
        if constexpr (kHasBlockScales<kScaling>) {
          const uint32_t at = ring.template scales_of<kScaling>(stage), lane = threadIdx.x % 32;
          const uint32_t row = at + (threadIdx.x / 32 * kBoxRows + lane / 4) * 4;
          const float x = load_shared_scale(row), x_8 = load_shared_scale(row + 8 * 4);
          if constexpr (kScaling == Scaling::kRowsAndColumns)
            add_scaled(sums, part, x, x_8, at + kScaleBytesA + half * (kTileN / 2) * 4);
          else
            add_scaled(sums, part, x, x_8, load_shared_scale(at + kScaleBytesA + half * 4));
          // What was read by loads, not by products alone, was read by all lanes.
          if (half) {
            if (kScaling == Scaling::kRowsAndColumns) finish_reads();
            __syncwarp();
            ring.release(stage);
          }
        } else {
          products_wait<0>();
          if (half) ring.release(stage);
#pragma unroll
          for (int j = 0; j < kTileN / 4; ++j) sums[j] += part[j];
        }
      }
    }
  }
  // Waits for the products of half a tile's columns and adds them times the scales of both rows and
  // of the block.
  static __device__ __forceinline__ void add_scaled(float* sums, const float* part, float x,
                                                    float x_8, float of_block) {
    x *= of_block;
    x_8 *= of_block;
    products_wait<0>();
#pragma unroll
    for (int j = 0; j < kTileN / 4; ++j) sums[j] += part[j] * (j % 4 < 2 ? x : x_8);
  }
  // The same with a scale for each column, those of the half's first at `columns`.
  static __device__ __forceinline__ void add_scaled(float* sums, const float* part, float x,
                                                    float x_8, uint32_t columns) {
    columns += threadIdx.x % 4 * 2 * 4;
    ColumnScales next;
    next.load(columns);
    products_wait<0>();
#pragma unroll
    for (int first = 0; first < kTileN / 16; first += 4) {
      const ColumnScales scales = next;
      if (first + 4 < kTileN / 16) next.load(columns + (first + 4) * 8 * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 y = scales.of[j];
        const float* from = part + 4 * (first + j);
        float* to = sums + 4 * (first + j);
        to[0] += from[0] * (x * y.x);
        to[1] += from[1] * (x * y.y);
        to[2] += from[2] * (x_8 * y.x);
        to[3] += from[3] * (x_8 * y.y);
      }
    }
  }
  __device__ __forceinline__ void finish(const Ring& ring, int stage, bool any) {
    if constexpr (kScaling == Scaling::kFast) {
      products_wait<0>();
      if (any) ring.release(stage);
    }
  }

  // Writes the warp's 16 rows from `row` of out on, those below `end`, the thread's two times their
  // factors, through `staged` in shared memory.
  __device__ __forceinline__ void store(const Params& p, uint32_t staged, int64_t row, int64_t end,
                                        int column, float factor, float factor_8) const {
    const uint32_t lane = threadIdx.x % 32;
    // The lane's row of a matrix: 8 rows below for odd matrices, 8 columns right for the last two.
    const uint32_t own_row = lane % 16, right = lane / 16;
    const bool whole = row + kBoxRows <= end;
#pragma unroll
    for (int first = 0; first < kTileN; first += kStagedN) {
      if (lane == 0) stores_wait();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kStagedN / 8; j += 2) {
        const float* x = d + (first / 8 + j) * 4;
        const uint32_t chunk = j % 8 + right;
        const uint32_t at = staged + j / 8 * kBoxBytes + own_row * 128 + (chunk ^ own_row % 8) * 16;
        store_matrices(at, bf16x2_of(x[0] * factor, x[1] * factor),
                       bf16x2_of(x[2] * factor_8, x[3] * factor_8),
                       bf16x2_of(x[4] * factor, x[5] * factor),
                       bf16x2_of(x[6] * factor_8, x[7] * factor_8));
      }
      if (whole)
        store_boxes(p, staged, static_cast<int>(row), column + first);
      else
        store_rows(p, staged, row, end, column + first);
    }
  }

  // Stores to a float32 out from registers: 4 threads write 32 bytes of a row.
  __device__ __forceinline__ void store_wide(const Params& p, int64_t row, int64_t end, int column,
                                             float factor) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int64_t own = row + lane / 4, first = column + lane % 4 * 2;
    float* out = p.g.wide_out + own * p.g.n + first;
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      if (first + j * 8 >= p.g.n) break;
      const float* x = d + j * 4;
      if (own < end)
        *reinterpret_cast<float2*>(out + j * 8) = make_float2(x[0] * factor, x[1] * factor);
      if (own + 8 < end)
        *reinterpret_cast<float2*>(out + 8 * p.g.n + j * 8) =
            make_float2(x[2] * factor, x[3] * factor);
    }
  }

  static __device__ __forceinline__ void store_boxes(const Params& p, uint32_t staged, int row,
                                                     int column) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int i = 0; i < kStagedN / kBoxN; ++i)
      if (column + i * kBoxN < p.g.n)
        store_box(p.out, column + i * kBoxN, row, staged + i * kBoxBytes);
    stores_commit();
  }

  // Stores row by row, for a box with rows of another group or of none.
  static __device__ __forceinline__ void store_rows(const Params& p, uint32_t staged, int64_t row,
                                                    int64_t end, int column) {
    __syncwarp();
    for (uint32_t i = threadIdx.x % 32; i < kStagedN / 8 * kBoxRows; i += 32) {
      const uint32_t chunk = i % 8, r = i / 8 % kBoxRows, box = i / (8 * kBoxRows);
      const int64_t x = column + static_cast<int>(box * 8 + chunk) * 8;
      if (row + r >= end || x >= p.g.n) continue;
      uint4 v;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(staged + box * kBoxBytes + r * 128 + (chunk ^ r % 8) * 16)
                   : "memory");
      store_16(reinterpret_cast<uint4*>(p.g.out + (row + r) * p.g.n + x), v);
    }
  }
};

// Zeroes a stage from byte `used`, a multiple of 16, of each row on: what is there belongs to the
// next group and may be NaN. By all consumers.
__device__ __forceinline__ void zero_rest(uint32_t stage, int used) {
  for (uint32_t row = threadIdx.x; row < kTileM + kTileN; row += kConsumers)
    for (uint32_t chunk = used / 16; chunk < kTileK / 16; ++chunk)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(stage + row * kTileK +
                                                                    (chunk ^ row % 8) * 16),
                   "r"(0)
                   : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

#endif

}  // namespace apex_te
