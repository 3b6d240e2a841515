// CUDA kernels of block_quantize.
//
// Quantize: tiles of 128 x 128 (common/gpu/fp8_tile.h), held in registers as loaded words.
#include "block_quantize/block_quantize.h"
#include "common/gpu/block_128x128.h"
#include "common/gpu/block_1x128.h"
#include "common/gpu/dequantize.h"
#include "common/numerics/with_dtype.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

using Tile = BlockTile;
constexpr int kThreads = Tile::kThreads;

struct Params : BlockCast {
  const void* x;
};

template <typename T, bool kAligned>
__device__ __forceinline__ void load_tile(const Params& p, const Tile::Place& at, bool is_whole,
                                          Vec8<T>* in) {
  const T* x = static_cast<const T*>(p.x);
  if (is_whole) return Tile::load_whole(x, p.cols, at, in);
  kAligned ? Tile::load<T, true>(x, p.cols, at, in) : Tile::load_any(x, at, in);
}

// Blocks of an SM. The registers of three do not hold what is stored without vectors, and divisors.
template <typename T, typename Format, bool kAligned>
constexpr int kBlocks = Format::kDivides && !kAligned ? 2 : kBlocks1x128<T>;

// kAligned: x, the outputs and their row lengths allow vector accesses without a bounds check
// inside a vector. Otherwise vectors are shifted (common/gpu/shifted.h).
template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks<T, Format, kAligned>)
    block_1x128_kernel(const Params p) {
  __shared__ Block1x128Shared<T> shared;
  const Tile::Place at(p.rows, p.cols, threadIdx.x % Tile::kLanes, threadIdx.x / Tile::kLanes);
  if (at.row0 >= p.rows) return;
  const bool is_whole = kAligned && at.is_whole();
  Vec8<T> in[kVec];
  load_tile<T, kAligned>(p, at, is_whole, in);
  cast_1x128<T, Format, !kAligned>(p, at, kAligned, is_whole, Format{}, in, shared);
}

template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, kAligned ? kBlocks128x128<T> : 2)
    block_128x128_kernel(const Params p) {
  __shared__ Block128x128Shared shared;
  const Tile::Place at(p.rows, p.cols, threadIdx.x % Tile::kLanes, threadIdx.x / Tile::kLanes);
  if (at.row0 >= p.rows) return;
  const bool is_whole = kAligned && at.is_whole();
  Vec8<T> in[kVec];
  load_tile<T, kAligned>(p, at, is_whole, in);
  cast_128x128<T, Format, !kAligned>(p, at, kAligned, is_whole, Format{}, in, shared);
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
  with_divides(c.rule, [&](auto divides) {
    constexpr bool kDivides = decltype(divides)::value;
    c.fp8 == DType::kE5M2 ? launch<T, OneFormat<E5M2, kDivides>>(c, p, stream)
                          : launch<T, OneFormat<E4M3, kDivides>>(c, p, stream);
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(block_quantize) {
  using namespace apex_te;
  const BlockQuantize c = check_block_quantize(args);
  const DeviceGuard guard(args.device_id());
  Params p;
  static_cast<BlockCast&>(p) = c;
  p.x = c.x.data<void>();
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
