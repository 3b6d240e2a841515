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

__device__ __forceinline__ void store_pair(uint32_t at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ float load_shared_scale(uint32_t at) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
  return value;
}

// Scales of a stage for a thread's sums of kN columns, by which the products are multiplied as they
// are added: in one instruction, which the compiler may not choose by itself.
template <Scaling kScaling, int kN>
struct Scales;

// Scales of parts of 64 columns, of which a block of 128 has two.
template <int kN>
struct PartScales {
  static_assert(kN == 192, "three parts of 64 columns");
  float by[3][2];  // of a part and one of the thread's two rows
  __device__ __forceinline__ void set(uint32_t row, float first, float second, float third) {
    const float x[2] = {load_shared_scale(row), load_shared_scale(row + 8 * 4)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      by[0][i] = x[i] * first;
      by[1][i] = x[i] * second;
      by[2][i] = x[i] * third;
    }
  }
  __device__ __forceinline__ void add(float (&sums)[kN / 2], const float (&part)[kN / 2]) const {
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) sums[j] = __fmaf_rn(part[j], by[j / 32][j % 4 / 2], sums[j]);
  }
};

// A tile begins with a block of 128 columns, or 64 behind the begin of one.
template <int kN>
struct Scales<Scaling::kRowsAndBlocks, kN> : PartScales<kN> {
  __device__ __forceinline__ Scales(uint32_t at, uint32_t row, int tile_n) {
    const float first = load_shared_scale(at + kScaleBytesA);
    const float last = load_shared_scale(at + kScaleBytesA + 4);
    this->set(row, first, tile_n % 2 ? last : first, last);
  }
};

template <int kN>
struct Scales<Scaling::kRowsAndColumnBlocks, kN> : PartScales<kN> {
  __device__ __forceinline__ Scales(uint32_t at, uint32_t row, int) {
    const uint32_t columns = at + kScaleBytesA;
    this->set(row, load_shared_scale(columns), load_shared_scale(columns + 64 * 4),
              load_shared_scale(columns + 128 * 4));
  }
};

template <int kN>
struct Scales<Scaling::kRowsAndColumns, kN> {
  float x[2];
  uint32_t at;
  float2 next[4];  // of the thread's two columns of 8, and of those 8, 16, 24 behind them
  __device__ __forceinline__ Scales(uint32_t at, uint32_t row, int)
      : x{load_shared_scale(row), load_shared_scale(row + 8 * 4)},
        at(at + kScaleBytesA + threadIdx.x % 4 * 8) {
    load(0);
  }
  __device__ __forceinline__ void add(float (&sums)[kN / 2], const float (&part)[kN / 2]) {
#pragma unroll
    for (int first = 0; first < kN / 8; first += 4) {
      const float2 y[4] = {next[0], next[1], next[2], next[3]};
      if (first + 4 < kN / 8) load(first + 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* from = part + 4 * (first + j);
        float* to = sums + 4 * (first + j);
        to[0] = __fmaf_rn(from[0], x[0] * y[j].x, to[0]);
        to[1] = __fmaf_rn(from[1], x[0] * y[j].y, to[1]);
        to[2] = __fmaf_rn(from[2], x[1] * y[j].x, to[2]);
        to[3] = __fmaf_rn(from[3], x[1] * y[j].y, to[3]);
      }
    }
  }

 private:
  __device__ __forceinline__ void load(int first) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(next[j].x), "=f"(next[j].y)
                   : "r"(at + (first + j) * 8 * 4)
                   : "memory");
  }
};

// 64 x kN sums of products: d[4 j + ..] as multiply_add has them. Unless kFast, those of a stage,
// 128 each, are made apart and added in float32, scaled or not.
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

  struct Operands {
    uint64_t a, b;
  };

  // Waits for a stage and returns its operands, of a the warpgroup's half.
  static __device__ __forceinline__ Operands arrived(const ThisRing& ring,
                                                     const Place<kStages<kScaling>>& place,
                                                     uint32_t own, int rest) {
    const uint32_t tiles = same_in_warp(ring.a(place.at));
    ring.wait(place);
    if (rest) zero_rest(tiles, kTileM + kN, rest);
    return {matrix_at(tiles + own), matrix_at(tiles + kBytesA)};
  }

  __device__ __forceinline__ void run_whole(const ThisRing& ring, Place<kStages<kScaling>>* place,
                                            uint32_t own, int blocks, int rest) {
    int last = 0;
    for (int i = 0; i < blocks; ++i, place->next()) {
      const Operands x = arrived(ring, *place, own, i == blocks - 1 ? rest : 0);
      multiply(d, x, true);
      products_wait<1>();
      if (i > 0) ring.release(last);
      last = place->at;
    }
    products_wait<0>();
    if (blocks > 0) ring.release(last);
  }

  // While products run, what the next ones need is found and what the sums need is loaded; the
  // other warpgroup multiplies while this one adds.
  __device__ __forceinline__ void run_parts(const ThisRing& ring, Place<kStages<kScaling>>* place,
                                            uint32_t own, int blocks, int rest, int tile_n) {
    if (blocks == 0) return;
    Operands next = arrived(ring, *place, own, blocks == 1 ? rest : 0);
    for (int i = 0; i < blocks; ++i) {
      const int stage = place->at;
      const Operands x = next;
      place->next();
      const auto find_next = [&] {
        if (i + 1 < blocks) next = arrived(ring, *place, own, i + 2 == blocks ? rest : 0);
      };
      if constexpr (kScaling == Scaling::kSplit) {
        // Half of the columns at a time, as registers are short.
        Part part;
        multiply(part, x, false);
        products_wait<0>();
        add(d, part);
        multiply(part, {x.a, x.b + half_of_b()}, false);
        find_next();
        products_wait<0>();
        ring.release(stage);
        add(d + kHalf / 2, part);
      } else {
        float part[kN / 2];
        multiply(part, x, false);
        const uint32_t at = ring.scales_of(stage);
        const uint32_t row = (threadIdx.x / 32 * kBoxRows + threadIdx.x % 32 / 4) * 4;
        Scales<kScaling, kN> scales(at, at + row, tile_n);
        find_next();
        products_wait<0>();
        if constexpr (kScaling != Scaling::kRowsAndColumns) release_read(ring, stage);
        scales.add(d, part);
        if constexpr (kScaling == Scaling::kRowsAndColumns) release_read(ring, stage);
      }
    }
  }

  static constexpr __device__ __forceinline__ uint64_t half_of_b() {
    return kBytesB<kScaling> / 2 >> 4;
  }

  // part = a . b^T of a stage, or with `more` added to it.
  template <int kSize>
  static __device__ __forceinline__ void multiply(float (&part)[kSize], const Operands& x,
                                                  bool more) {
    products_begin();
#pragma unroll
    for (int k = 0; k < kTileK / 32; ++k)
      multiply_add(A{}, B{}, part, x.a + 2 * k, x.b + 2 * k, more || k > 0);
    products_commit();
  }

  static __device__ __forceinline__ void add(float* sums, const Part& part) {
#pragma unroll
    for (int j = 0; j < kHalf / 2; ++j) sums[j] += part[j];
  }

  // What was read by loads, not by products alone, was read by all lanes.
  static __device__ __forceinline__ void release_read(const ThisRing& ring, int stage) {
    if (kHasColumnScales<kScaling>) finish_reads();
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

  // Writes the warp's 16 rows from row y of a group's float32 matrix on times `factor`, or adds
  // them to it, each element once; the copy engine does so while the next tile is multiplied.
  __device__ __forceinline__ void store_wide(const Params& p, uint32_t staged, int y, int column,
                                             int group, float factor) const {
    constexpr int kBoxes = kStagedBytes<kScaling> / kBoxBytes;  // of which others are being read
    const uint32_t lane = threadIdx.x % 32, own_row = lane / 4;
    y = same_in_warp(y);
    column = same_in_warp(column);
    group = same_in_warp(group);
#pragma unroll
    for (int box = 0; box < kN / kWideBoxN; ++box) {
      const uint32_t to = staged + box % kBoxes * kBoxBytes;
      if (lane == 0) stores_wait<kBoxes - 1>();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kWideBoxN / 8; ++j) {
        const float* x = d + (box * (kWideBoxN / 8) + j) * 4;
        const uint32_t chunk = j * 2 + lane % 4 / 2;
        const uint32_t at = to + own_row * 128 + (chunk ^ own_row) * 16 + lane % 2 * 8;
        store_pair(at, x[0] * factor, x[1] * factor);
        store_pair(at + 8 * 128, x[2] * factor, x[3] * factor);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane != 0) continue;
      const int x = column + box * kWideBoxN;
      if (p.g.accumulate)
        add_box_of(p.out, x, y, group, to);
      else
        store_box_of(p.out, x, y, group, to);
      stores_commit();
    }
  }

  static __device__ __forceinline__ void store_boxes(const Params& p, uint32_t staged, int row,
                                                     int column) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    row = same_in_warp(row);
    column = same_in_warp(column);
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
