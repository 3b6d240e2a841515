// Cast of a tile of 128 x 128 elements in blocks of 1 x 128, rowwise and columnwise, for kernels
// that load or compute the tile. The columnwise copy may have the tile as one block.
//
// A thread holds 8 rows of 8 columns as words of the matrix's dtype. The amaxes of the tile's rows
// and columns meet in shared memory; each of the 256 threads computes one scale.
#pragma once

#include <type_traits>

#include "common/gpu/fp8_tile.h"
#include "common/gpu/patch_amax.h"
#include "common/numerics/block_cast.h"

namespace apex_te {

using BlockTile = FP8Tile<kBlock>;
constexpr int kBlockWarps = BlockTile::kThreads / 32;
// Blocks of an SM, which bound the registers of a thread: the fastest, one more or less costs 10%.
template <typename T>
constexpr int kBlocks1x128 = sizeof(T) == 4 ? 2 : 3;
template <typename T>
constexpr int kBlocks128x128 = sizeof(T) == 4 ? 2 : 4;
static_assert(BlockTile::kThreads == 2 * kBlock,
              "one scale of a tile's rows and columns for each thread");

template <typename T>
struct Block1x128Shared {
  __align__(16) uint2 tile[BlockTile::kSharedWords];
  __align__(16) uint32_t col_amaxes[kBlockWarps][kBlock / Magnitude<T>::kPerWord];
  uint32_t row_amaxes[kBlock / Magnitude<T>::kPerWord];
  __align__(16) float scales[2 * kBlock];  // of rows, of columns
};

// What a block's scale does to elements of type T.
template <typename T, bool kDivides>
struct Scaling {
  float scale;
  Scaling() = default;
  __device__ __forceinline__ explicit Scaling(float by) : scale(by) {}
  __device__ __forceinline__ float operator()(float x) const { return x * scale; }
};
template <typename T>
struct Scaling<T, true> {
  Divisor by;
  Scaling() = default;
  __device__ __forceinline__ explicit Scaling(float scale) : by(scale) {}
  __device__ __forceinline__ float operator()(float x) const { return by.quotient<sizeof(T)>(x); }
};

// FP8 format of a kernel that is compiled for each, and for scales that divide.
template <typename Format, bool kDividesBy = false>
struct OneFormat {
  static constexpr bool kDivides = kDividesBy;
  __device__ __forceinline__ uint2 encode(const float* values) const {
    return encode_values<Format>(values);
  }
  __device__ __forceinline__ uint2 encode(const float* values, float scale) const {
    return encode_values<Format>(values, scale);
  }
};
// FP8 format that a whole grid branches on.
template <bool kDividesBy = false>
struct AnyFormat {
  static constexpr bool kDivides = kDividesBy;
  bool is_e5m2;
  __device__ __forceinline__ uint2 encode(const float* values) const {
    return is_e5m2 ? encode_values<E5M2>(values) : encode_values<E4M3>(values);
  }
  __device__ __forceinline__ uint2 encode(const float* values, float scale) const {
    return is_e5m2 ? encode_values<E5M2>(values, scale) : encode_values<E4M3>(values, scale);
  }
};

// Codes of a row of a thread's elements, whose scale is one.
template <typename T, typename Format>
__device__ __forceinline__ uint2 encode_row(const Format& format, float* values, float scale) {
  if constexpr (Format::kDivides) {
    const Scaling<T, true> by(scale);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = by(values[i]);
    return format.encode(values);
  } else {
    return format.encode(values, scale);
  }
}

// Calls launch(std::bool_constant) for whether scales divide.
template <typename Launch>
void with_divides(const BlockRule& rule, const Launch& launch) {
  rule.divides ? launch(std::true_type{}) : launch(std::false_type{});
}

// A tensor's amax so far, prefetched by the lane that may have to raise it.
__device__ __forceinline__ uint32_t seen_by_lane_0(const float* amax) {
  return amax && threadIdx.x % 32 == 0 ? *reinterpret_cast<const volatile uint32_t*>(amax) : 0u;
}
__device__ __forceinline__ void raise_amax(float* amax, uint32_t seen, uint32_t found) {
  if (amax && threadIdx.x % 32 == 0 && found > seen)
    atomicMax(reinterpret_cast<unsigned int*>(amax), found);
}

// Stores of a tile's codes. `aligned` is as FP8Tile's kAligned; is_whole: aligned, and all of the
// tile lies in the matrix. kShifts: what is not aligned goes in vectors, which compiles longer.
template <bool kShifts>
__device__ __forceinline__ void store_block_rows(const BlockCast& p, const BlockTile::Place& at,
                                                 bool aligned, bool is_whole, const uint2* codes) {
  if (is_whole) return BlockTile::store_rows_whole(p.rowwise, p.cols, at, codes);
  BlockTile::Place stored = at;
  stored.rows = p.rowwise_rows;  // the matrix has zeros beyond its own
  if (aligned)
    BlockTile::store_rows<true>(p.rowwise, p.cols, stored, codes);
  else
    kShifts ? BlockTile::store_rows_any(p.rowwise, stored, codes)
            : BlockTile::store_rows<false>(p.rowwise, p.cols, stored, codes);
}
__device__ __forceinline__ void store_block_columns(const BlockCast& p, const BlockTile::Place& at,
                                                    bool aligned, bool is_whole,
                                                    const uint2* tile) {
  if (is_whole) return BlockTile::store_columns_whole(p.columnwise, p.columnwise_ld, at, tile);
  aligned ? BlockTile::store_columns<true>(p.columnwise, p.columnwise_ld, at, tile)
          : BlockTile::store_columns_any(p.columnwise, p.columnwise_ld, at, tile);
}

// Stores the scale of a block of 128 x 128 at (row0, col0) of `cols` columns; the last of a line of
// scales also fills the line up to a multiple of 4. i: a number of the thread, of which four act.
__device__ __forceinline__ void store_block_scale(float* scale_inv, int64_t row0, int64_t col0,
                                                  int64_t cols, int i, float value) {
  const int64_t col = col0 / kBlock, blocks = (cols + kBlock - 1) / kBlock;
  const int64_t line = (blocks + 3) / 4 * 4;
  if (i == 0 || (i < 4 && col == blocks - 1 && col + i < line))
    scale_inv[row0 / kBlock * line + col + i] = i == 0 ? value : 1.0f;
}

// Casts the tile of which `in` is this thread's part, zeros where the matrix has no element. All
// threads of a block call it; a second call may follow at once. `format` is a OneFormat or an
// AnyFormat; `aligned` and is_whole are as above.
template <typename T, typename Format, bool kShifts = false>
__device__ __forceinline__ void cast_1x128(const BlockCast& p, const BlockTile::Place& at,
                                           bool aligned, bool is_whole, const Format& format,
                                           const Vec8<T>* in, Block1x128Shared<T>& shared) {
  using Tile = BlockTile;
  using M = Magnitude<T>;
  constexpr int kLanes = Tile::kLanes;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const uint32_t seen = seen_by_lane_0(p.amax);

  uint32_t rows[M::kWords], cols[M::kWords];
  patch_amax<T>(in, rows, cols);
  lanes_amax<T, M::kWords, 1, kLanes>(rows);
  if (lane < M::kWords)
    shared.row_amaxes[group * M::kWords + first_word<M::kWords>(lane)] = rows[0];
  lanes_amax<T, M::kWords, kLanes, 32>(cols);  // the other half of the warp has the next rows
#pragma unroll
  for (int w = 0; w < M::kWords / 2; ++w)
    shared.col_amaxes[threadIdx.x / 32][lane * M::kWords + first_word<M::kWords>(group % 2) + w] =
        cols[w];
  __syncthreads();

  {
    const bool of_row = threadIdx.x < kBlock;
    const int i = threadIdx.x % kBlock;
    uint32_t word = of_row ? shared.row_amaxes[i / M::kPerWord] : 0u;
    const bool as_one = !of_row && p.columnwise_block_rows != 1;
    if (as_one) {
      constexpr int kWords = kBlock / M::kPerWord / 32;  // of a lane, of each warp's columns
#pragma unroll
      for (int w = 0; w < kBlockWarps * kWords; ++w)
        word = M::larger(word, shared.col_amaxes[w / kWords][i % 32 + w % kWords * 32]);
    } else if (!of_row) {
#pragma unroll
      for (int w = 0; w < kBlockWarps; ++w)
        word = M::larger(word, shared.col_amaxes[w][i / M::kPerWord]);
    }
    uint32_t amax = M::bits(word, i % M::kPerWord);
    if (as_one) {
#pragma unroll
      for (int part = 0; part < M::kPerWord; ++part) amax = max(amax, M::bits(word, part));
      amax = warp_max(amax);
    }
    const float scale = p.rule.template scale_of<Format::kDivides>(amax);
    shared.scales[threadIdx.x] = scale;
    // The scales of one block of columns (rows) lie together, their number rounded up to 4.
    float* out = of_row ? p.rowwise_scale_inv : p.columnwise_scale_inv;
    const int64_t line = of_row ? p.row_line : (p.cols + 3) / 4 * 4;
    const int64_t first = of_row ? at.row0 : at.col0, block = of_row ? at.col0 : at.row0;
    if (as_one && !p.repeats_scales) {
      if (out)
        store_block_scale(p.columnwise_scale_inv, at.col0, at.row0, p.rows, i,
                          p.rule.template inverse_of<Format::kDivides>(amax, scale));
    } else if (out && first + i < (of_row ? p.row_scales : line))
      out[block / kBlock * line + first + i] =
          first + i < (of_row ? p.rows : p.cols)
              ? p.rule.template inverse_of<Format::kDivides>(amax, scale)
              : 1.0f;
    if (of_row) raise_amax(p.amax, seen, warp_max(amax));
  }
  __syncthreads();

  if (p.rowwise) {
    uint2 codes[kVec];
#pragma unroll
    for (int r = 0; r < kVec; ++r) {
      float values[kVec];
      unpack(in[r], values);
      codes[r] = encode_row<T>(format, values, shared.scales[group * kVec + r]);
    }
    store_block_rows<kShifts>(p, at.again(), aligned, is_whole, codes);
  }
  if (p.columnwise) {
    using By = Scaling<T, Format::kDivides>;
    By by[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) by[c] = By(shared.scales[kBlock + lane * kVec + c]);
    uint2 codes[kVec];
#pragma unroll
    for (int r = 0; r < kVec; ++r) {
      float values[kVec];
      unpack(in[r], values);
#pragma unroll
      for (int c = 0; c < kVec; ++c) values[c] = by[c](values[c]);
      codes[r] = format.encode(values);
    }
    Tile::stage_columns(codes, shared.tile);
    __syncthreads();
    store_block_columns(p, at.again(), aligned, is_whole, shared.tile);
  }
}

}  // namespace apex_te
