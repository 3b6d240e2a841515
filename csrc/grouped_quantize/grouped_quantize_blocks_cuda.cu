// CUDA kernels of block scaling of groups: tiles of 128 x 128 of a group's rows, or of a matrix.
#include <algorithm>

#include "common/gpu/ballot.h"
#include "common/gpu/block_128x128.h"
#include "common/numerics/with_dtype.h"
#include "grouped_quantize/grouped_quantize_blocks.h"

namespace apex_te {
namespace {

using Tile = BlockTile;
constexpr int kThreads = Tile::kThreads;
constexpr int kMatrices = 128;  // of one launch

struct Pointers {
  const void* at[kMatrices];
};

// The rows of a group and its tile of them; group -1: there is none.
struct GroupTile {
  int group;
  int64_t tile, begin, rows, column;
};

// The tile whose columnwise scales are in a line. A group without rows has one, too.
__device__ __forceinline__ GroupTile tile_of_line(const Table& table, int64_t line) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < table.groups; base += 32) {
    const int g = base + lane;
    const bool is_before = g < table.groups && first_line(table.column_end(g), g + 1) <= line;
    const int before = __popc(warp_ballot(is_before));
    if (before == 32) continue;
    const int group = base + before;
    if (group >= table.groups) break;
    const int64_t begin = table.begin(group), rows = max(table.end(group) - begin, int64_t{0});
    const int64_t column = table.column_begin(group), tile = line - first_line(column, group);
    if (tile * kBlock >= max(rows, int64_t{1})) break;
    return {group, tile, begin, rows, column};
  }
  return {-1, 0, 0, 0, 0};
}

__device__ __forceinline__ Tile::Place place_of(int64_t rows, int64_t cols, int64_t row_tile) {
  const int lane = threadIdx.x % Tile::kLanes, group = threadIdx.x / Tile::kLanes;
  Tile::Place at(rows, cols, lane, group);
  at.row0 = row_tile * kBlock;
  at.row = at.row0 + group * Tile::kRows;
  return at;
}

template <typename T, bool kAligned>
__device__ __forceinline__ void load_tile(const T* x, int64_t cols, const Tile::Place& at,
                                          bool is_whole, Vec8<T>* in) {
  is_whole ? Tile::load_whole(x, cols, at, in) : Tile::load<T, kAligned>(x, cols, at, in);
}

// The columns of a group without rows are zeros with a scale of 1.
__device__ __forceinline__ void write_empty_group(const GroupedBlocks& p, int64_t column,
                                                  float* scales) {
  const int64_t col0 = static_cast<int64_t>(blockIdx.x) * kBlock;
  const int64_t line = (p.cols + 3) / 4 * 4;
  for (int i = threadIdx.x; i < kBlock * kGroupAlign; i += kThreads) {
    const int64_t col = col0 + i / kGroupAlign;
    if (col < p.cols) p.columnwise[col * p.columnwise_ld + column + i % kGroupAlign] = 0;
  }
  const int64_t col = col0 + threadIdx.x;
  if (threadIdx.x < kBlock && col < line) scales[col] = 1.0f;
}

// kAligned: as in FP8Tile. A group's columns begin at multiples of 16 in any case, so that none of
// the next group's is written.
template <typename T, typename Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks1x128<T>)
    grouped_block_1x128_kernel(const GroupedBlocks p) {
  __shared__ Block1x128Shared<T> shared;
  const GroupTile found = tile_of_line(p.table, block_row());
  if (found.group < 0) return;
  float* const scales =
      p.columnwise_scale_inv + first_line(found.column, found.group) * ((p.cols + 3) / 4 * 4);
  if (found.rows == 0) {
    if (p.columnwise) write_empty_group(p, found.column, scales);
    return;
  }
  BlockCast own = p;
  own.rows = own.rowwise_rows = own.row_scales = found.rows;
  if (p.rowwise) {
    own.rowwise += found.begin * p.cols;
    own.rowwise_scale_inv += found.begin;
  }
  if (p.columnwise) {
    own.columnwise += found.column;
    own.columnwise_scale_inv = scales;
  }
  const Tile::Place at = place_of(found.rows, p.cols, found.tile);
  const bool is_whole = kAligned && at.is_whole();
  Vec8<T> in[kVec];
  load_tile<T, kAligned>(static_cast<const T*>(p.x) + found.begin * p.cols, p.cols, at, is_whole,
                         in);
  cast_1x128(own, at, kAligned, is_whole, OneFormat<Format>{}, in, shared);
}

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
  const Tile::Place at = place_of(p.rows, p.cols, blockIdx.y);
  const bool is_whole = kAligned && at.is_whole();
  Vec8<T> in[kVec];
  load_tile<T, kAligned>(static_cast<const T*>(matrices.at[blockIdx.z]), p.cols, at, is_whole, in);
  cast_128x128<T>(own, at, kAligned, is_whole, OneFormat<Format>{}, in, shared);
}

template <typename T, typename Format>
void launch(const GroupedBlocks& p, cudaStream_t stream) {
  if (p.cols == 0) return;
  bool aligned = fp8_tile_aligned(p.columnwise_ld, p.cols, p.rowwise, p.columnwise);
  if (!p.matrices) {
    aligned = aligned && is_aligned(p.x, 16);
    const dim3 grid = grid_of(p.columnwise_ld / kBlock + p.table.groups, num_blocks(p.cols),
                              "grouped_block_quantize");
    const auto kernel = aligned ? grouped_block_1x128_kernel<T, Format, true>
                                : grouped_block_1x128_kernel<T, Format, false>;
    kernel<<<grid, kThreads, 0, stream>>>(p);
    check_cuda(cudaGetLastError(), "grouped_block_quantize");
    return;
  }
  if (p.rows == 0) return;
  if (num_blocks(p.rows) > kMaxGridY)
    fail(kApexTeUnsupported, "grouped_block_quantize_matrices: too many rows for one launch");
  for (int first = 0; first < p.table.groups; first += kMatrices) {
    Pointers matrices;
    const int count = std::min(kMatrices, p.table.groups - first);
    for (int i = 0; i < count; ++i) {
      matrices.at[i] = p.matrices.at(first + i);
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
    p.fp8 == DType::kE5M2 ? launch<T, E5M2>(p, stream) : launch<T, E4M3>(p, stream);
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
