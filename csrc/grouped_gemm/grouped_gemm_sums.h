// The sums of a warpgroup: how stages are multiplied into them, and how they leave.
#pragma once

#include "common/gpu/wgmma.h"
#include "grouped_gemm/grouped_gemm_ring.h"

namespace apex_te {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Zeroes a stage from byte `used`, a multiple of 16, of each row on: what is there belongs to the
// next group and may be NaN. By all consumers.
__device__ __forceinline__ void zero_rest(uint32_t stage, uint32_t rows, int used) {
  for (uint32_t row = threadIdx.x; row < rows; row += kConsumers)
    for (uint32_t chunk = used / 16; chunk < kTileK / 16; ++chunk)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(stage + row * kTileK +
                                                                    (chunk ^ row % 8) * 16),
                   "r"(0)
                   : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

__device__ __forceinline__ float load_shared_scale(uint32_t at) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
  return value;
}

// Scales of two columns of a thread, of 8, and of those 8, 16, 24 behind them.
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

// 64 x kN sums of products: d[4 j + ..] as multiply_add has them. Unless kFast, those of a stage,
// 128 each, are made apart, half of the columns at a time, and added in float32, scaled or not.
template <typename A, typename B, Scaling kScaling>
struct Sums {
  static constexpr int kN = kTileN<kScaling>, kStagedN = kStagedColumns<kScaling>;
  static constexpr int kHalf = kN / 2;  // columns, of which a thread has as many sums in 2 rows
  using ThisRing = Ring<kScaling>;
  using Part = float[kHalf / 2];
  float d[kN / 2];

  // Makes the sums of a tile of `blocks` stages, from `place` on; of the last only `rest` bytes of
  // each row count, all if 0. Releases the stages.
  __device__ __forceinline__ void run(const ThisRing& ring, Place<kStages<kScaling>>* place,
                                      int warpgroup, int blocks, int rest, int tile_n) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) d[i] = 0.0f;
    const uint32_t own = warpgroup * (kBytesA / 2);
    if constexpr (kScaling == Scaling::kFast) {
      run_whole(ring, place, own, blocks, rest);
    } else if constexpr (kScaling == Scaling::kSplit) {
      if (blocks <= kWhole) return run_whole(ring, place, own, blocks, rest);
    }
    if constexpr (kScaling != Scaling::kFast) run_parts(ring, place, own, blocks, rest, tile_n);
  }

  static constexpr int kWhole = 4;  // stages whose sums kSplit leaves in the matrix units

  // Waits for a stage and returns where its tiles begin.
  static __device__ __forceinline__ uint32_t arrived(const ThisRing& ring,
                                                     const Place<kStages<kScaling>>& place,
                                                     int rest) {
    const uint32_t tiles = same_in_warp(ring.a(place.at));
    barrier_wait(&ring.control->full[place.at], place.phase);
    if (rest) zero_rest(tiles, kTileM + kN, rest);
    return tiles;
  }

  __device__ __forceinline__ void run_whole(const ThisRing& ring, Place<kStages<kScaling>>* place,
                                            uint32_t own, int blocks, int rest) {
    int last = 0;
    for (int i = 0; i < blocks; ++i, place->next()) {
      const uint32_t tiles = arrived(ring, *place, i == blocks - 1 ? rest : 0);
      const uint64_t a = matrix_at(tiles + own), b = matrix_at(tiles + kBytesA);
      products_begin();
#pragma unroll
      for (int k = 0; k < kTileK / 32; ++k) multiply_add(A{}, B{}, d, a + 2 * k, b + 2 * k, true);
      products_commit();
      products_wait<1>();
      if (i > 0) ring.release(last);
      last = place->at;
    }
    products_wait<0>();
    if (blocks > 0) ring.release(last);
  }

  __device__ __forceinline__ void run_parts(const ThisRing& ring, Place<kStages<kScaling>>* place,
                                            uint32_t own, int blocks, int rest, int tile_n) {
    Part left;
    for (int i = 0; i < blocks; ++i, place->next()) {
      const int stage = place->at;
      const uint32_t tiles = arrived(ring, *place, i == blocks - 1 ? rest : 0);
      const uint64_t a = matrix_at(tiles + own), b = matrix_at(tiles + kBytesA);
      if constexpr (kScaling == Scaling::kSplit) {
        // The other warpgroup multiplies while this one adds.
        multiply(left, a, b);
        products_wait<0>();
        add(d, left);
        multiply(left, a, b + half_of_b());
        products_wait<0>();
        ring.release(stage);
        add(d + kHalf / 2, left);
      } else {
        // One half is multiplied while the other is added. With products of two stages in flight
        // ptxas serializes all (C7514).
        Part right;
        multiply(left, a, b);
        multiply(right, a, b + half_of_b());
        products_wait<1>();
        add_scaled<0>(ring, stage, left, tile_n);
        products_wait<0>();
        add_scaled<1>(ring, stage, right, tile_n);
        release_read(ring, stage);
      }
    }
  }

  static constexpr __device__ __forceinline__ uint64_t half_of_b() {
    return kBytesB<kScaling> / 2 >> 4;
  }

  static __device__ __forceinline__ void multiply(Part& part, uint64_t a, uint64_t b) {
    products_begin();
#pragma unroll
    for (int k = 0; k < kTileK / 32; ++k) multiply_add(A{}, B{}, part, a + 2 * k, b + 2 * k, k > 0);
    products_commit();
  }

  static __device__ __forceinline__ void add(float* sums, const Part& part) {
#pragma unroll
    for (int j = 0; j < kHalf / 2; ++j) sums[j] += part[j];
  }

  // Adds the products of half of a stage's columns times their scales.
  template <int kRight>
  __device__ __forceinline__ void add_scaled(const ThisRing& ring, int stage, const Part& part,
                                             int tile_n) {
    float* const sums = d + kRight * (kHalf / 2);
    const uint32_t at = ring.scales_of(stage), lane = threadIdx.x % 32;
    const uint32_t row = at + (threadIdx.x / 32 * kBoxRows + lane / 4) * 4;
    const float x = load_shared_scale(row), x_8 = load_shared_scale(row + 8 * 4);
    if constexpr (kScaling == Scaling::kRowsAndColumns) {
      const uint32_t column = at + kScaleBytesA + (kRight * kHalf + lane % 4 * 2) * 4;
      ColumnScales next;
      next.load(column);
#pragma unroll
      for (int first = 0; first < kHalf / 8; first += 4) {
        const ColumnScales scales = next;
        if (first + 4 < kHalf / 8) next.load(column + (first + 4) * 8 * 4);
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
    } else {
      // A tile begins with a block of 128 columns, or 64 behind the begin of one.
      constexpr int kCut = kRight ? 4 : 8;  // of 8 columns
      const float first_block = load_shared_scale(at + kScaleBytesA);
      const float second_block = load_shared_scale(at + kScaleBytesA + 4);
      const float between = tile_n % 2 ? second_block : first_block;
      const float low = kRight ? between : first_block, high = kRight ? second_block : between;
      const float by[2][2] = {{x * low, x_8 * low}, {x * high, x_8 * high}};
#pragma unroll
      for (int j = 0; j < kHalf / 2; ++j) sums[j] += part[j] * by[j / 4 >= kCut][j % 4 / 2];
    }
  }

  // What was read by loads, not by products alone, was read by all lanes.
  static __device__ __forceinline__ void release_read(const ThisRing& ring, int stage) {
    if (kScaling == Scaling::kRowsAndColumns) finish_reads();
    __syncwarp();
    ring.release(stage);
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
    for (int first = 0; first < kN; first += kStagedN) {
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

  // Stores to a float32 out from registers, or adds to it, each element by one thread: 4 threads
  // write 32 bytes of a row.
  __device__ __forceinline__ void store_wide(const Params& p, int64_t row, int64_t end, int column,
                                             float factor) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int64_t own = row + lane / 4, first = column + lane % 4 * 2;
    float* const out = p.g.wide_out + own * p.g.n + first;
    const bool upper = own < end, lower = own + 8 < end;
    // Columns of 8 whose loads are in flight together.
    constexpr int kAtOnce = kHasBlockScales<kScaling> ? 4 : 8;
    float2 before[2 * kAtOnce] = {};
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const int place = j % kAtOnce * 2;
      if (p.g.accumulate && j % kAtOnce == 0) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const bool exists = first + (j + i) * 8 < p.g.n;
          const auto* from = reinterpret_cast<const float2*>(out + (j + i) * 8);
          if (exists && upper) before[2 * i] = __ldcs(from);
          if (exists && lower) before[2 * i + 1] = __ldcs(from + 4 * p.g.n);
        }
      }
      if (first + j * 8 >= p.g.n) break;
      const float* x = d + j * 4;
      auto* to = reinterpret_cast<float2*>(out + j * 8);
      float2 values[2] = {{x[0] * factor, x[1] * factor}, {x[2] * factor, x[3] * factor}};
      if (p.g.accumulate) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          values[i].x += before[place + i].x;
          values[i].y += before[place + i].y;
        }
      }
      if (upper) __stcs(to, values[0]);
      if (lower) __stcs(to + 4 * p.g.n, values[1]);
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

#endif

}  // namespace apex_te
