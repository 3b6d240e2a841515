// CUDA kernels of mx_quantize.
//
// Tiles of 128 x 128 (common/gpu/fp8_tile.h), held in registers as loaded words. A warp holds 32
// rows of 64 columns, so that blocks of either direction lie within it: no barrier before the codes
// are written.
#include "common/gpu/dependent_launch.h"
#include "common/gpu/dequantize.h"
#include "common/gpu/fp8_tile.h"
#include "common/gpu/patch_amax.h"
#include "common/numerics/with_dtype.h"
#include "mx_quantize/mx_quantize.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int kTileSide = 128;
using Tile = FP8Tile<kTileSide>;
constexpr int kThreads = Tile::kThreads;
constexpr int kBlocks = kTileSide / kMxBlock;  // of a tile's row or column

// Blocks of an SM, which bound the registers of a thread: one more or less is slower.
template <typename T>
constexpr int kBlocksPerSM = sizeof(T) == 4 ? 2 : 3;

struct Params {
  const void* x;
  int64_t rows, cols;
  uint8_t *rowwise, *rowwise_scale, *columnwise, *columnwise_scale;
  int64_t columnwise_ld;
  bool use_floor;
  bool in_tiles;  // scales of whole tiles leave by store_scale_groups
};

// Scale codes of the 8 rows (columns) of a patch from its magnitudes and those of the 3 lanes at
// distance kStride and 2 kStride; each of the 4 computes two and they exchange them.
template <typename T, typename Format, int kStride>
__device__ __forceinline__ uint2 scale_codes(uint32_t* words, bool use_floor) {
  using M = Magnitude<T>;
  lanes_amax<T, M::kWords, kStride, 4 * kStride>(words);
  const uint32_t first = M::bits(words[0], 0);
  const uint32_t second = M::kPerWord == 1 ? words[1] : M::bits(words[0], 1);
  const uint32_t two =
      mx_scale_code<Format>(first, use_floor) | mx_scale_code<Format>(second, use_floor) << 8;
  const uint32_t other_two = __shfl_xor_sync(0xFFFFFFFFu, two, 2 * kStride);
  const uint32_t four = threadIdx.x & 2 * kStride ? other_two | two << 16 : two | other_two << 16;
  const uint32_t other_four = __shfl_xor_sync(0xFFFFFFFFu, four, kStride);
  return threadIdx.x & kStride ? make_uint2(other_four, four) : make_uint2(four, other_four);
}

__device__ __forceinline__ float multiplier_of(uint2 codes, int i) {
  return mx_multiplier((i < 4 ? codes.x : codes.y) >> 8 * (i % 4) & 0xFFu);
}

// One line's scale codes of a tile, [kBlocks][kTileSide] in shared memory, to their place. A store
// of lines that lie apart is a request each to the L2 cache, whatever its width.
__device__ __forceinline__ void store_scales(uint8_t* out, int64_t num_blocks, int64_t line,
                                             int64_t block, const uint8_t* tile) {
  uint8_t* p = out + line * num_blocks + block;
  const uint32_t low = tile[0] | static_cast<uint32_t>(tile[kTileSide]) << 8;
  const uint32_t high = tile[2 * kTileSide] | static_cast<uint32_t>(tile[3 * kTileSide]) << 8;
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (block + kBlocks <= num_blocks && address % 4 == 0) {
    *reinterpret_cast<uint32_t*>(p) = low | high << 16;
  } else if (block + kBlocks <= num_blocks && address % 2 == 0) {
    reinterpret_cast<uint16_t*>(p)[0] = static_cast<uint16_t>(low);
    reinterpret_cast<uint16_t*>(p)[1] = static_cast<uint16_t>(high);
  } else {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      if (block + i < num_blocks) p[i] = tile[i * kTileSide];
  }
}

// Scales that a warp stores as whole 32 bytes of L2 cache: the codes of 8 lines, [kBlocks][8], at
// the tile's turn of the memory of these 8 lines, where order_scales_kernel will order them.
constexpr int kGroupLines = 8, kGroupBytes = kGroupLines * kBlocks;
__device__ __forceinline__ void store_scale_groups(uint8_t* out, int64_t num_blocks, int64_t line,
                                                   int64_t col, const uint8_t* tile) {
  const int group = threadIdx.x % 32 / 2, half = threadIdx.x % 2;
  const uint8_t* from = tile + 2 * half * kTileSide + group * kGroupLines;
  const uint2 low = *reinterpret_cast<const uint2*>(from);
  const uint2 high = *reinterpret_cast<const uint2*>(from + kTileSide);
  uint8_t* to =
      out + (line + group * kGroupLines) * num_blocks + col / kTileSide * kGroupBytes + half * 16;
  *reinterpret_cast<uint4*>(to) = make_uint4(low.x, low.y, high.x, high.y);
}

template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM<T>) mx_quantize_kernel(const Params p) {
  using M = Magnitude<T>;
  let_next_kernel_start();
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  __shared__ __align__(16) uint8_t scales[2][kBlocks * kTileSide];  // of rows, of columns
  const int warp = threadIdx.x / 32;
  const int lane = warp % 2 * 8 + threadIdx.x % 8, group = warp / 2 * 4 + threadIdx.x % 32 / 8;
  const Tile::Place at(p.rows, p.cols, lane, group);
  if (at.row0 >= p.rows) return;
  Vec8<T> in[kVec];
  const T* x = static_cast<const T*>(p.x);
  kAligned ? Tile::load<T, true>(x, p.cols, at, in) : Tile::load_any(x, at, in);
  uint32_t rows[M::kWords], cols[M::kWords];
  patch_amax<T>(in, rows, cols);

  uint2 codes[kVec];
  if (p.rowwise) {
    const uint2 of_rows = scale_codes<T, Format, 1>(rows, p.use_floor);
    if (lane % 4 == 0)
      *reinterpret_cast<uint2*>(&scales[0][lane / 4 * kTileSide + group * kVec]) = of_rows;
#pragma unroll
    for (int r = 0; r < kVec; ++r) {
      float values[kVec];
      unpack(in[r], values);
      codes[r] = encode_values<Format>(values, multiplier_of(of_rows, r));
    }
    kAligned ? Tile::store_rows<true>(p.rowwise, p.cols, at, codes)
             : Tile::store_rows_any<8>(p.rowwise, at, codes);
  }
  if (p.columnwise) {
    const uint2 of_cols = scale_codes<T, Format, 8>(cols, p.use_floor);
    if (group % 4 == 0)
      *reinterpret_cast<uint2*>(&scales[1][group / 4 * kTileSide + lane * kVec]) = of_cols;
    float by[kVec];
#pragma unroll
    for (int c = 0; c < kVec; ++c) by[c] = multiplier_of(of_cols, c);
#pragma unroll
    for (int r = 0; r < kVec; ++r) {
      float values[kVec];
      unpack(in[r], values);
#pragma unroll
      for (int c = 0; c < kVec; ++c) values[c] *= by[c];
      codes[r] = encode_values<Format>(values);
    }
    Tile::stage_columns(codes, tile, lane, group);
  }
  __syncthreads();
  if (p.columnwise)
    kAligned ? Tile::store_columns<true>(p.columnwise, p.columnwise_ld, at, tile)
             : Tile::store_columns_any(p.columnwise, p.columnwise_ld, at, tile);
  const int i = threadIdx.x % kTileSide;
  const int64_t row_blocks = (p.cols + kMxBlock - 1) / kMxBlock;
  const int64_t col_blocks = (p.rows + kMxBlock - 1) / kMxBlock;
  // A last tile with fewer rows has no groups of 8 rows, but all of its columns.
  if (p.in_tiles && threadIdx.x < 64) {
    if (threadIdx.x >= 32) {
      if (p.columnwise)
        store_scale_groups(p.columnwise_scale, col_blocks, at.col0, at.row0, scales[1]);
    } else if (p.rowwise && at.row0 + kTileSide <= p.rows) {
      store_scale_groups(p.rowwise_scale, row_blocks, at.row0, at.col0, scales[0]);
    }
  }
  if (threadIdx.x < kTileSide) {
    const bool in_groups = p.in_tiles && at.row0 + kTileSide <= p.rows;
    if (p.rowwise && !in_groups && at.row0 + i < p.rows)
      store_scales(p.rowwise_scale, row_blocks, at.row0 + i, at.col0 / kMxBlock, &scales[0][i]);
  } else if (p.columnwise && !p.in_tiles && at.col0 + i < p.cols) {
    store_scales(p.columnwise_scale, col_blocks, at.col0 + i, at.row0 / kMxBlock, &scales[1][i]);
  }
}

// Orders scales that store_scale_groups left, in place. A word for each line and tile, straight
// from the tiles, would be a write of its own to the L2 cache: 12% of all.
constexpr int kOrderThreads = 256, kOrderBytes = 4096;  // of a block, unless a group is longer

struct Order {
  uint8_t* scales[2];  // of the two layouts
  int tiles[2];        // of a line
  int groups[2];       // of a block
  int64_t blocks[2], all_groups[2];
};
__global__ void __launch_bounds__(kOrderThreads) order_scales_kernel(const Order p) {
  extern __shared__ uint32_t words[];
  constexpr int kWords = kGroupBytes / 4, kStep = kWords + 1;  // of a tile; no bank conflicts
  const int which = blockIdx.x >= p.blocks[0];
  const int64_t first = (blockIdx.x - (which ? p.blocks[0] : 0)) * p.groups[which];
  const int tiles = p.tiles[which];
  const int groups = static_cast<int>(min(int64_t{p.groups[which]}, p.all_groups[which] - first));
  uint4* const scales = reinterpret_cast<uint4*>(p.scales[which] + first * tiles * kGroupBytes);
  wait_for_previous_kernel();
#pragma unroll 4
  for (int i = threadIdx.x; i < groups * tiles * 2; i += kOrderThreads) {
    const uint4 in = scales[i];
    uint32_t* to = words + i / 2 * kStep + i % 2 * 4;
    to[0] = in.x, to[1] = in.y, to[2] = in.z, to[3] = in.w;
  }
  __syncthreads();
  const int parts = tiles / 4;  // of a line, 16 bytes each
  for (int i = threadIdx.x; i < groups * 2 * parts; i += kOrderThreads) {
    const int part = i % parts, four = i / parts;  // of the four lines
    uint32_t out[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t* from = words + (four / 2 * tiles + part * 4 + t) * kStep + four % 2;
      transpose4(from[0], from[2], from[4], from[6], out[t]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      scales[(four * 4 + k) * parts + part] =
          make_uint4(out[0][k], out[1][k], out[2][k], out[3][k]);
  }
}

// Scales had better go to their lines at once in small matrices and where these are not whole 16
// bytes of tiles; the last block of a column may be short.
inline bool orders_scales(const Params& p) {
  constexpr int64_t kFewTiles = 2048, kMostCols = 1 << 18;
  const int64_t row_tiles = mx_blocks(p.rows) / kBlocks, col_tiles = p.cols / kTileSide;
  return mx_blocks(p.rows) % 16 == 0 && p.cols % (16 * kMxBlock) == 0 && p.rows <= kMostCols &&
         p.cols <= kMostCols && is_aligned(p.rowwise_scale, 16) &&
         is_aligned(p.columnwise_scale, 16) && row_tiles * col_tiles >= kFewTiles;
}
void launch_order(const Params& p, cudaStream_t stream) {
  Order order = {};
  int bytes = 0;
  const auto add = [&](int k, uint8_t* scales, int64_t lines, int64_t num_blocks) {
    if (!scales) return;
    const int tiles = static_cast<int>(num_blocks / kBlocks), group = tiles * kGroupBytes;
    order.scales[k] = scales;
    order.tiles[k] = tiles;
    order.groups[k] = group < kOrderBytes ? kOrderBytes / group : 1;
    order.all_groups[k] = lines / kGroupLines;
    order.blocks[k] = (order.all_groups[k] + order.groups[k] - 1) / order.groups[k];
    bytes = max(bytes, order.groups[k] * tiles * (kGroupBytes + 4));
  };
  add(0, p.rowwise ? p.rowwise_scale : nullptr, p.rows / kTileSide * kTileSide, mx_blocks(p.cols));
  add(1, p.columnwise ? p.columnwise_scale : nullptr, p.cols, mx_blocks(p.rows));
  allow_shared(reinterpret_cast<const void*>(order_scales_kernel));
  launch_dependent_shared(order_scales_kernel, order.blocks[0] + order.blocks[1], kOrderThreads,
                          bytes, stream, order);
}

template <typename T, typename Format>
void launch(Params p, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return;
  p.in_tiles = orders_scales(p);
  const bool aligned =
      is_aligned(p.x, 16) && fp8_tile_aligned(p.columnwise_ld, p.cols, p.rowwise, p.columnwise);
  const auto kernel =
      aligned ? mx_quantize_kernel<T, Format, true> : mx_quantize_kernel<T, Format, false>;
  kernel<<<Tile::grid(p.rows, p.cols, "mx_quantize"), kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "mx_quantize");
  if (p.in_tiles) launch_order(p, stream);
}

template <typename T>
void launch_format(DType fp8, const Params& p, cudaStream_t stream) {
  fp8 == DType::kE5M2 ? launch<T, E5M2>(p, stream) : launch<T, E4M3>(p, stream);
}

// The scale of (r, c) is at r * ld + c / 32.
struct Scales {
  const uint8_t* codes;
  int64_t ld;
  __device__ __forceinline__ float operator()(int64_t row, int64_t col) const {
    return mx_scale_value(codes[row * ld + col / kMxBlock]);
  }
};

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(mx_quantize) {
  using namespace apex_te;
  const MxQuantize c = check_mx_quantize(args);
  if (c.fp8 == DType::kOther) return;
  const DeviceGuard guard(args.device_id());
  const Params p{
      c.x.data<void>(),   c.rows,          c.cols,      c.rowwise, c.rowwise_scale, c.columnwise,
      c.columnwise_scale, c.columnwise_ld, c.use_floor, false};
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(c.x.dtype(), [&](auto zero) { launch_format<decltype(zero)>(c.fp8, p, stream); });
}

APEX_TE_DEFINE(mx_dequantize) {
  using namespace apex_te;
  const MxDequantize d = check_mx_dequantize(args);
  const DeviceGuard guard(args.device_id());
  dequantize("mx_dequantize", d.codes, d.out, Scales{d.scale, mx_blocks(d.cols)},
             static_cast<cudaStream_t>(args.stream()));
}
