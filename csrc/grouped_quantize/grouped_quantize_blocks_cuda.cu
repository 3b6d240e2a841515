// CUDA kernels of block scaling of groups of x, and of matrices: tiles of 128 x 128.
#include <algorithm>

#include "common/gpu/block_128x128.h"
#include "common/numerics/with_dtype.h"
#include "grouped_quantize/grouped_quantize_1x128_cuda.h"

namespace apex_te {
namespace {

using Tile = BlockTile;
constexpr int kThreads = Tile::kThreads;
constexpr int kMatrices = 128;  // of one launch

struct Pointers {
  const void* at[kMatrices];
};

template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks128x128<T>)
    grouped_block_128x128_kernel(const GroupedBlocks p, const Pointers matrices, int first) {
  __shared__ Block128x128Shared shared;
  const int64_t matrix = first + static_cast<int>(blockIdx.z);
  if (p.table.data && !p.table.used(static_cast<int>(matrix))) return;
  const int64_t row_blocks = (p.rows + kBlock - 1) / kBlock;
  const int64_t col_blocks = (p.cols + kBlock - 1) / kBlock;
  BlockCast own = p;
  if (p.rowwise) {
    own.rowwise += matrix * p.rows * p.cols;
    own.rowwise_scale_inv += matrix * row_blocks * ((col_blocks + 3) / 4 * 4);
  }
  if (p.columnwise) {
    own.columnwise += matrix * p.rows * p.cols;
    own.columnwise_scale_inv += matrix * col_blocks * ((row_blocks + 3) / 4 * 4);
  }
  Tile::Place at(p.rows, p.cols, threadIdx.x % Tile::kLanes, threadIdx.x / Tile::kLanes);
  at.row0 = static_cast<int64_t>(blockIdx.y) * kBlock;  // z is the matrix
  at.row = at.row0 + threadIdx.x / Tile::kLanes * Tile::kRows;
  const bool is_whole = kAligned && at.is_whole();
  Vec8<T> in[kVec];
  // A tile's rows are of one part.
  const int parts = p.matrices.parts;
  const int part = parts == 1 ? 0 : static_cast<int>(at.row0 / p.matrices.rows);
  const T* x = static_cast<const T*>(matrices.at[blockIdx.z * parts + part]);
  PlainSource{}.load<Tile, kAligned>(x, 0, at, WarpRows{}, is_whole, in);
  cast_128x128<T>(own, at, kAligned, is_whole, Format{}, in, shared);
}

template <typename T, typename Format>
void launch(const GroupedBlocks& p, cudaStream_t stream) {
  if (p.cols == 0) return;
  bool aligned = fp8_tile_aligned(p.columnwise_ld, p.cols, p.rowwise, p.columnwise);
  if (!p.matrices) {
    aligned = aligned && is_aligned(p.x, 16);
    const auto run = aligned ? launch_1x128<T, true, Format, PlainSource>
                             : launch_1x128<T, false, Format, PlainSource>;
    run(p, {}, {}, stream);
    return;
  }
  if (p.rows == 0) return;
  if (num_blocks(p.rows) > kMaxGridY)
    fail(kApexTeUnsupported, "grouped_block_quantize_matrices: too many rows for one launch");
  const int parts = p.matrices.parts, most = kMatrices / parts;
  for (int first = 0; first < p.table.groups; first += most) {
    Pointers matrices;
    const int count = std::min(most, p.table.groups - first);
    for (int i = 0; i < count * parts; ++i) {
      matrices.at[i] = p.matrices.at(first + i / parts, i % parts);
      aligned = aligned && is_aligned(matrices.at[i], 16);
    }
    const dim3 grid(static_cast<unsigned>(num_blocks(p.cols)),
                    static_cast<unsigned>(num_blocks(p.rows)), static_cast<unsigned>(count));
    const auto kernel = aligned ? grouped_block_128x128_kernel<T, Format, true>
                                : grouped_block_128x128_kernel<T, Format, false>;
    kernel<<<grid, kThreads, 0, stream>>>(p, matrices, first);
    check_cuda(cudaGetLastError(), "grouped_block_quantize_matrices");
  }
}

void run_blocks(const GroupedBlocks& p, Args& args) {
  const DeviceGuard guard(args.device_id());
  const auto stream = static_cast<cudaStream_t>(args.stream());
  with_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_divides(p.rule, [&](auto divides) {
      constexpr bool kDivides = decltype(divides)::value;
      p.fp8 == DType::kE5M2 ? launch<T, OneFormat<E5M2, kDivides>>(p, stream)
                            : launch<T, OneFormat<E4M3, kDivides>>(p, stream);
    });
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(grouped_block_quantize) {
  using namespace apex_te;
  run_blocks(check_grouped_blocks(args, false), args);
}

APEX_TE_DEFINE(grouped_block_quantize_matrices) {
  using namespace apex_te;
  run_blocks(check_grouped_blocks(args, true), args);
}
