// CUDA kernel of byte_transpose: tiles of 256 x 128 (common/gpu/fp8_tile.h), a thread's 8 loads of
// 8 bytes all in flight, columns leaving as 16-byte stores.
#include "byte_transpose/byte_transpose.h"
#include "common/gpu/fp8_tile.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

using Tile = FP8Tile<256>;

template <bool kAligned>
__global__ void __launch_bounds__(Tile::kThreads, 2) byte_transpose_kernel(const ByteTranspose p) {
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  const Tile::Place at(p.rows, p.cols, blockIdx.x);
  const int64_t matrix = blockIdx.y;
  const uint8_t *from = p.codes + (matrix * p.rows + at.row) * p.cols + at.col,
                *end = p.codes + gridDim.y * p.rows * p.cols;
  uint2 codes[Tile::kRows];
  const auto address = [&](int r) { return from + r * p.cols; };
  const auto left = [&](int r) { return at.row + r < p.rows ? p.cols - at.col : 0; };
  if constexpr (kAligned) {
#pragma unroll
    for (int r = 0; r < Tile::kRows; ++r)
      codes[r] = left(r) > 0 ? *reinterpret_cast<const uint2*>(address(r)) : make_uint2(0, 0);
  } else {
    load_all_codes_shifted<Tile::kRows>(address, left, p.codes, end, codes);
  }
  Tile::stage_columns(codes, tile);
  __syncthreads();
  Tile::store_columns<kAligned>(p.out + matrix * p.cols * p.ld, p.ld, at, tile);
}

void transpose(Args& args, const ByteTranspose& p) {
  const int64_t tiles = Tile::num_tiles(p.rows, p.cols);
  if (!tiles || !p.count) return;
  if (p.count > 0xFFFF)
    fail(kApexTeUnsupported, "byte_transpose: a stack must have at most 65535 matrices");
  if (tiles > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "byte_transpose: codes must have fewer than 2^46 elements");
  const DeviceGuard guard(args.device_id());
  const auto kernel = fp8_tile_aligned(p.ld, p.cols, p.codes, p.out) ? byte_transpose_kernel<true>
                                                                     : byte_transpose_kernel<false>;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(p.count));
  kernel<<<grid, Tile::kThreads, 0, static_cast<cudaStream_t>(args.stream())>>>(p);
  check_cuda(cudaGetLastError(), "byte_transpose");
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(byte_transpose) { apex_te::transpose(args, apex_te::check_byte_transpose(args)); }

APEX_TE_DEFINE(byte_transpose_stack) {
  apex_te::transpose(args, apex_te::check_byte_transpose_stack(args));
}
