// CUDA kernels of block_quantize.
//
// Quantize: tiles of 128 x 128 (common/gpu/fp8_tile.h), held in registers as loaded words. The
// amaxes of a tile's rows and columns meet in shared memory; each of the 256 threads computes one
// scale.
#include "block_quantize/block_quantize.h"
#include "common/gpu/dequantize.h"
#include "common/gpu/fp8_tile.h"
#include "common/gpu/patch_amax.h"
#include "common/numerics/with_dtype.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

using Tile = FP8Tile<kBlock>;
constexpr int kLanes = Tile::kLanes;
constexpr int kThreads = Tile::kThreads;
constexpr int kWarps = kThreads / 32;
static_assert(kThreads == 2 * kBlock, "one scale of a tile's rows and columns for each thread");

// Blocks of an SM, which bound the registers of a thread: the fastest, one more or less costs 10%.
template <typename T>
constexpr int kBlocks1x128 = sizeof(T) == 4 ? 2 : 3;
template <typename T>
constexpr int kBlocks128x128 = sizeof(T) == 4 ? 2 : 4;

struct Params {
  const void* x;
  int64_t rows, cols;
  uint8_t *rowwise, *columnwise;
  int64_t rowwise_rows, columnwise_ld;
  float *rowwise_scale_inv, *columnwise_scale_inv, *amax;
  ScaleRule rule;
};

// A tensor's amax so far, prefetched by the lane that may have to raise it.
__device__ __forceinline__ uint32_t seen_by_lane_0(const float* amax) {
  return amax && threadIdx.x % 32 == 0 ? *reinterpret_cast<const volatile uint32_t*>(amax) : 0u;
}
__device__ __forceinline__ void raise_amax(float* amax, uint32_t seen, uint32_t found) {
  if (amax && threadIdx.x % 32 == 0 && found > seen)
    atomicMax(reinterpret_cast<unsigned int*>(amax), found);
}

template <typename T, bool kAligned>
__device__ __forceinline__ void load_tile(const Params& p, const Tile::Place& at, bool is_whole,
                                          Vec8<T>* in) {
  const T* x = static_cast<const T*>(p.x);
  is_whole ? Tile::load_whole(x, p.cols, at, in) : Tile::load<T, kAligned>(x, p.cols, at, in);
}
template <bool kAligned>
__device__ __forceinline__ void store_tile_rows(const Params& p, const Tile::Place& at,
                                                bool is_whole, const uint2* codes) {
  if (is_whole) return Tile::store_rows_whole(p.rowwise, p.cols, at, codes);
  Tile::Place stored = at;
  stored.rows = p.rowwise_rows;  // the matrix has zeros beyond its own
  Tile::store_rows<kAligned>(p.rowwise, p.cols, stored, codes);
}
template <bool kAligned>
__device__ __forceinline__ void store_tile_columns(const Params& p, const Tile::Place& at,
                                                   bool is_whole, const uint2* tile) {
  is_whole ? Tile::store_columns_whole(p.columnwise, p.columnwise_ld, at, tile)
           : Tile::store_columns<kAligned>(p.columnwise, p.columnwise_ld, at, tile);
}

// kAligned: x, the outputs and their row lengths allow vector accesses without a bounds check
// inside a vector. Otherwise every access is checked and done by element.
template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks1x128<T>) block_1x128_kernel(const Params p) {
  using M = Magnitude<T>;
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  __shared__ __align__(16) uint32_t col_amaxes[kWarps][kBlock / M::kPerWord];
  __shared__ uint32_t row_amaxes[kBlock / M::kPerWord];
  __shared__ __align__(16) float scales[2 * kBlock];  // of rows, of columns
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const Tile::Place at(p.rows, p.cols, lane, group);
  if (at.row0 >= p.rows) return;
  const bool is_whole = kAligned && at.is_whole();
  Vec8<T> in[kVec];
  load_tile<T, kAligned>(p, at, is_whole, in);
  const uint32_t seen = seen_by_lane_0(p.amax);

  uint32_t rows[M::kWords], cols[M::kWords];
  patch_amax<T>(in, rows, cols);
  lanes_amax<T, M::kWords, 1, kLanes>(rows);
  if (lane < M::kWords) row_amaxes[group * M::kWords + first_word<M::kWords>(lane)] = rows[0];
  lanes_amax<T, M::kWords, kLanes, 32>(cols);  // the other half of the warp has the next rows
#pragma unroll
  for (int w = 0; w < M::kWords / 2; ++w)
    col_amaxes[threadIdx.x / 32][lane * M::kWords + first_word<M::kWords>(group % 2) + w] = cols[w];
  __syncthreads();

  {
    const bool of_row = threadIdx.x < kBlock;
    const int i = threadIdx.x % kBlock;
    uint32_t word = of_row ? row_amaxes[i / M::kPerWord] : 0u;
    if (!of_row) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) word = M::larger(word, col_amaxes[w][i / M::kPerWord]);
    }
    const uint32_t amax = M::bits(word, i % M::kPerWord);
    const float scale = p.rule.scale_of(amax);
    scales[threadIdx.x] = scale;
    // The scales of one block of columns (rows) lie together, their number rounded up to 4.
    float* out = of_row ? p.rowwise_scale_inv : p.columnwise_scale_inv;
    const int64_t extent = ((of_row ? p.rows : p.cols) + 3) / 4 * 4;
    const int64_t first = of_row ? at.row0 : at.col0, block = of_row ? at.col0 : at.row0;
    if (out && first + i < extent)
      out[block / kBlock * extent + first + i] =
          first + i < (of_row ? p.rows : p.cols) ? p.rule.inverse_of(amax, scale) : 1.0f;
    if (of_row) raise_amax(p.amax, seen, warp_max(amax));
  }
  __syncthreads();

  if (p.rowwise) {
    uint2 codes[kVec];
#pragma unroll
    for (int r = 0; r < kVec; ++r) {
      float values[kVec];
      unpack(in[r], values);
      codes[r] = encode_values<Format>(values, scales[group * kVec + r]);
    }
    store_tile_rows<kAligned>(p, at, is_whole, codes);
  }
  if (p.columnwise) {
    float by[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) by[c] = scales[kBlock + lane * kVec + c];
    uint2 codes[kVec];
#pragma unroll
    for (int r = 0; r < kVec; ++r) {
      float values[kVec];
      unpack(in[r], values);
#pragma unroll
      for (int c = 0; c < kVec; ++c) values[c] *= by[c];
      codes[r] = encode_values<Format>(values);
    }
    Tile::stage_columns(codes, tile);
    __syncthreads();
    store_tile_columns<kAligned>(p, at, is_whole, tile);
  }
}

template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks128x128<T>)
    block_128x128_kernel(const Params p) {
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  __shared__ uint32_t warp_amaxes[kWarps];
  const Tile::Place at(p.rows, p.cols, threadIdx.x % kLanes, threadIdx.x / kLanes);
  if (at.row0 >= p.rows) return;
  const bool is_whole = kAligned && at.is_whole();
  Vec8<T> in[kVec];
  load_tile<T, kAligned>(p, at, is_whole, in);
  const uint32_t seen = amax_so_far(p.amax);
  uint32_t amax = 0;
#pragma unroll
  for (int r = 0; r < kVec; ++r) fold_amax(in[r], amax);
  stage_amax(amax_bits(T{}, amax), warp_amaxes);
  __syncthreads();
  amax = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) amax = max(amax, warp_amaxes[w]);
  const float scale = p.rule.scale_of(amax);

  uint2 codes[kVec];
#pragma unroll
  for (int r = 0; r < kVec; ++r) {
    float values[kVec];
    unpack(in[r], values);
    codes[r] = encode_values<Format>(values, scale);
  }
  if (p.rowwise) store_tile_rows<kAligned>(p, at, is_whole, codes);
  if (p.columnwise) {
    Tile::stage_columns(codes, tile);
    __syncthreads();
    store_tile_columns<kAligned>(p, at, is_whole, tile);
  }
  if (threadIdx.x < 4) {
    // The last block of a line of scales also fills the line up to a multiple of 4.
    const int64_t row = at.row0 / kBlock, col = at.col0 / kBlock;
    const int64_t rows = (p.rows + kBlock - 1) / kBlock, cols = (p.cols + kBlock - 1) / kBlock;
    const int64_t row_end = (rows + 3) / 4 * 4, col_end = (cols + 3) / 4 * 4;
    const int i = threadIdx.x;
    const float value = i == 0 ? p.rule.inverse_of(amax, scale) : 1.0f;
    if (p.rowwise_scale_inv && (i == 0 || (col == cols - 1 && col + i < col_end)))
      p.rowwise_scale_inv[row * col_end + col + i] = value;
    if (p.columnwise_scale_inv && (i == 0 || (row == rows - 1 && row + i < row_end)))
      p.columnwise_scale_inv[col * row_end + row + i] = value;
  }
  finish_amax<kThreads>(p.amax, seen, warp_amaxes);
}

// 1 x 128: the scale of (r, block c) is at c * ld + r. 128 x 128: at r / 128 * ld + c.
struct Scales {
  const float* scale_inv;
  int64_t ld;
  bool by_row;
  __device__ __forceinline__ float operator()(int64_t row, int64_t col) const {
    return scale_inv[by_row ? col / kBlock * ld + row : row / kBlock * ld + col / kBlock];
  }
};

template <typename T, typename Format>
void launch(const BlockQuantize& c, const Params& p, cudaStream_t stream) {
  if (c.rows == 0 || c.cols == 0) return;
  const bool aligned =
      is_aligned(p.x, 16) && fp8_tile_aligned(c.columnwise_ld, c.cols, p.rowwise, p.columnwise);
  const auto kernel =
      c.block_rows == 1
          ? (aligned ? block_1x128_kernel<T, Format, true> : block_1x128_kernel<T, Format, false>)
          : (aligned ? block_128x128_kernel<T, Format, true>
                     : block_128x128_kernel<T, Format, false>);
  kernel<<<Tile::grid(c.rows, c.cols, "block_quantize"), kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "block_quantize");
}

template <typename T>
void launch_format(const BlockQuantize& c, const Params& p, cudaStream_t stream) {
  c.fp8 == DType::kE5M2 ? launch<T, E5M2>(c, p, stream) : launch<T, E4M3>(c, p, stream);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(block_quantize) {
  using namespace apex_te;
  const BlockQuantize c = check_block_quantize(args);
  const DeviceGuard guard(args.device_id());
  const Params p{c.x.data<void>(),       c.rows,         c.cols,          c.rowwise,
                 c.columnwise,           c.rowwise_rows, c.columnwise_ld, c.rowwise_scale_inv,
                 c.columnwise_scale_inv, c.amax,         c.rule};
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(c.x.dtype(), [&](auto zero) { launch_format<decltype(zero)>(c, p, stream); });
}

APEX_TE_DEFINE(block_dequantize) {
  using namespace apex_te;
  const BlockDequantize d = check_block_dequantize(args);
  const DeviceGuard guard(args.device_id());
  const bool by_row = d.block_rows == 1;
  const Scales scales{d.scale_inv, padded_to_4(by_row ? d.rows : num_blocks(d.cols)), by_row};
  dequantize("block_dequantize", d.codes, d.out, scales, static_cast<cudaStream_t>(args.stream()));
}
