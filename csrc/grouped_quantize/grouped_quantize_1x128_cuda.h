// Kernel of groups' casts in blocks of 1x128, for every source of the elements (see
// grouped_quantize_source_cuda.h): tiles of 128 x 128 of a group's rows.
#pragma once

#include "common/gpu/ballot.h"
#include "grouped_quantize/grouped_quantize_blocks.h"
#include "grouped_quantize/grouped_quantize_source_cuda.h"

namespace apex_te {
namespace {

// The rows of a group and its tile of them; group -1: there is none.
struct GroupTile {
  int group;
  int64_t tile, begin, rows, column;
};

// The tile whose columnwise scales are in a line. A group without rows has one, too. None if the
// table would have it beyond the columns.
__device__ __forceinline__ GroupTile tile_of_line(const Table& table, int64_t line,
                                                  int64_t columns) {
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
    if (tile < 0 || tile * kBlock >= max(rows, int64_t{1})) break;
    if (column < 0 || column % kGroupAlign || column + columns_of(rows) > columns) break;
    return {group, tile, begin, rows, column};
  }
  return {-1, 0, 0, 0, 0};
}

// The columns of a group without rows are zeros with a scale of 1.
__device__ __forceinline__ void write_empty_group(const GroupedBlocks& p, int64_t col0,
                                                  int64_t column, float* scales) {
  const int64_t line = (p.cols + 3) / 4 * 4;
  for (int i = threadIdx.x; i < kBlock * kGroupAlign; i += BlockTile::kThreads) {
    const int64_t col = col0 + i / kGroupAlign;
    if (col < p.cols) p.columnwise[col * p.columnwise_ld + column + i % kGroupAlign] = 0;
  }
  const int64_t col = col0 + threadIdx.x;
  if (threadIdx.x < kBlock && col < line) scales[col] = 1.0f;
}

// Blocks of an SM. The registers of two do not hold divisors beside a float tile or parts that are
// interleaved.
template <typename T, typename Format, typename Source>
constexpr int kGroupBlocks =
    Format::kDivides && (sizeof(T) == 4 || Source::kAdjacent) ? 1 : Source::blocks_1x128(sizeof(T));

// kAligned: as in FP8Tile. A group's columns begin at multiples of 16 in any case, so that none of
// the next group's is written.
template <typename T, typename Format, bool kAligned, typename Source>
__global__ void __launch_bounds__(BlockTile::kThreads, kGroupBlocks<T, Format, Source>)
    grouped_block_1x128_kernel(const GroupedBlocks p, const Source source, const Format format) {
  using Tile = BlockTile;
  __shared__ Block1x128Shared<T> shared;
  const int64_t x = blockIdx.x, y = block_row();
  const int64_t col0 = (Source::kByColumns ? y : x) * kBlock;
  const int64_t cols = p.cols / Source::kParts;
  if (Source::kByColumns && col0 >= cols) return;
  const GroupTile found = tile_of_line(p.table, Source::kByColumns ? x : y, p.columnwise_ld);
  if (found.group < 0) return;
  float* const scales =
      p.columnwise_scale_inv + first_line(found.column, found.group) * ((p.cols + 3) / 4 * 4);
  if (found.rows == 0) {
    for (int part = 0; part < Source::kParts && p.columnwise; ++part)
      write_empty_group(p, col0 + part * cols, found.column, scales);
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
  Tile::Place at(found.rows, cols, threadIdx.x % Tile::kLanes, threadIdx.x / Tile::kLanes);
  at.row0 = found.tile * kBlock;
  at.row = at.row0 + threadIdx.x / Tile::kLanes * Tile::kRows;
  at.col0 = col0;
  at.col = col0 + threadIdx.x % Tile::kLanes * kVec;
  const bool is_whole = kAligned && at.is_whole();
  Vec8<T> in[Source::kParts * kVec];
  const int64_t column = found.column + at.row0 + threadIdx.x / 32 * kGroupAlign;
  source.template load<Tile, kAligned>(static_cast<const T*>(p.x), found.begin, at,
                                       WarpRows{found.group, column}, is_whole, in);
  const int64_t step = Source::kAdjacent ? kBlock : cols;
  at = place_of_part<Source, Tile>(at, 0, p.cols);
  at.cols = p.cols;
#pragma unroll
  for (int part = 0; part < Source::kParts; ++part) {
    cast_1x128(own, at, kAligned, is_whole, format, in + part * kVec, shared);
    at.col0 += step;
    at.col += step;
  }
}

template <typename T, bool kAligned, typename Format, typename Source>
void launch_1x128(const GroupedBlocks& p, const Source& source, const Format& format,
                  cudaStream_t stream) {
  const int64_t lines = p.columnwise_ld / kBlock + p.table.groups,
                cols = num_blocks(p.cols / Source::kParts);
  if (cols == 0) return;
  const dim3 grid = Source::kByColumns ? grid_of(cols, lines, "grouped_block_quantize")
                                       : grid_of(lines, cols, "grouped_block_quantize");
  grouped_block_1x128_kernel<T, Format, kAligned, Source>
      <<<grid, BlockTile::kThreads, 0, stream>>>(p, source, format);
  check_cuda(cudaGetLastError(), "grouped_block_quantize");
}

}  // namespace
}  // namespace apex_te
