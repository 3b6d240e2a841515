// CUDA kernels of mx_quantize.
//
// Tiles of 128 x 128 (common/fp8_tile.h), held in registers as loaded words. A warp holds 32 rows
// of 64 columns, so that blocks of either direction lie within it: no barrier before the codes are
// written.
#include "common/dequantize_cuda.h"
#include "common/fp8_tile.h"
#include "common/patch_amax.h"
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
  uint8_t *rowwise, *rowwise_scale, *transposed, *transposed_scale;
  bool use_floor;
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

template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM<T>) mx_quantize_kernel(const Params p) {
  using M = Magnitude<T>;
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  __shared__ __align__(16) uint8_t scales[2][kBlocks * kTileSide];  // of rows, of columns
  const int warp = threadIdx.x / 32;
  const int lane = warp % 2 * 8 + threadIdx.x % 8, group = warp / 2 * 4 + threadIdx.x % 32 / 8;
  const Tile::Place at(p.rows, p.cols, lane, group);
  if (at.row0 >= p.rows) return;
  Vec8<T> in[kVec];
  Tile::load<T, kAligned>(static_cast<const T*>(p.x), p.cols, at, in);
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
    Tile::store_rows<kAligned>(p.rowwise, p.cols, at, codes);
  }
  if (p.transposed) {
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
  if (p.transposed) Tile::store_columns<kAligned>(p.transposed, p.rows, at, tile);
  const int i = threadIdx.x % kTileSide;
  if (threadIdx.x < kTileSide) {
    if (p.rowwise && at.row0 + i < p.rows)
      store_scales(p.rowwise_scale, (p.cols + kMxBlock - 1) / kMxBlock, at.row0 + i,
                   at.col0 / kMxBlock, &scales[0][i]);
  } else if (p.transposed && at.col0 + i < p.cols) {
    store_scales(p.transposed_scale, (p.rows + kMxBlock - 1) / kMxBlock, at.col0 + i,
                 at.row0 / kMxBlock, &scales[1][i]);
  }
}

template <typename T, typename Format>
void launch(const Params& p, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return;
  const bool aligned =
      is_aligned(p.x, 16) && fp8_tile_aligned(p.rows, p.cols, p.rowwise, p.transposed);
  const auto kernel =
      aligned ? mx_quantize_kernel<T, Format, true> : mx_quantize_kernel<T, Format, false>;
  kernel<<<Tile::grid(p.rows, p.cols, "mx_quantize"), kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "mx_quantize");
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
  const Params p{c.x.data<void>(),   c.rows,     c.cols, c.rowwise, c.rowwise_scale, c.transposed,
                 c.transposed_scale, c.use_floor};
  const auto stream = static_cast<cudaStream_t>(args.stream());
  switch (c.x.dtype()) {
    case DType::kFloat32:
      return launch_format<float>(c.fp8, p, stream);
    case DType::kFloat16:
      return launch_format<Half>(c.fp8, p, stream);
    default:
      return launch_format<BFloat16>(c.fp8, p, stream);
  }
}

APEX_TE_DEFINE(mx_dequantize) {
  using namespace apex_te;
  const MxDequantize d = check_mx_dequantize(args);
  const DeviceGuard guard(args.device_id());
  dequantize("mx_dequantize", d.codes, d.out, Scales{d.scale, mx_blocks(d.cols)},
             static_cast<cudaStream_t>(args.stream()));
}
