// Kernel of grouped_quantize's casts, for every source of the elements: tiles of Source::kTileRows
// x 128 (common/gpu/fp8_tile.h) over the columns of the columnwise codes, in which 16 columns, the
// rows of one warp, belong to one group.
//
// A warp finds its group with one load of the table for each 32 groups and a vote.
#pragma once

#include <algorithm>

#include "common/gpu/ballot.h"
#include "common/numerics/with_dtype.h"
#include "grouped_quantize/grouped_quantize_source_cuda.h"

namespace apex_te {
namespace {

constexpr int kPointers = 128;  // matrices of one launch

struct Pointers {
  const void* at[kPointers];
};

struct Params {
  const void* x;
  bool stacked;  // matrices instead of x
  Table table;   // its data may be null where there are matrices
  int64_t rows, cols, columns;
  GroupValues scale, scale_inv, amax;
  uint8_t *rowwise, *columnwise;
  bool casts;
  float* row_scale_inv;
  const int32_t* due;
  bool inverse_given;
  int parts;  // stacks that a matrix is of, each with `part_rows` of its rows
  int part_rows;
  int first;              // group of the first matrix
  int64_t tiles_of_each;  // tiles of a matrix
};

// Rows of a warp's 16 columns: rows begin to end of x, the first at `row`, as the table says. The
// table may be one of another matrix.
struct GroupRows {
  int group;  // -1: none
  int64_t row, end;
};

__device__ __forceinline__ GroupRows rows_of(const Table& table, int64_t column) {
  const int lane = threadIdx.x % 32;
  int64_t begin = 0, column_begin = 0;
  for (int base = 0; base < table.groups; base += 32) {
    const int g = base + lane;
    const bool exists = g < table.groups;
    const int column_end = exists ? table.data[table.groups + g] : 0x7FFFFFFF;
    const int end = exists ? table.data[g] : 0;
    const int before = __popc(warp_ballot(column_end <= column));
    if (before > 0) {
      column_begin = __shfl_sync(0xFFFFFFFFu, column_end, before - 1);
      begin = __shfl_sync(0xFFFFFFFFu, end, before - 1);
    }
    if (before == 32) continue;
    const int64_t last = __shfl_sync(0xFFFFFFFFu, end, before);
    if (base + before >= table.groups) break;
    return {base + before, begin + column - column_begin, last};
  }
  return {-1, 0, 0};
}

// row_scale_inv where x has no columns and thus no tile that would write it.
__device__ void write_rows_without_columns(const Params& p) {
  if (!p.row_scale_inv) return;
  for (int g = 0; g < p.table.groups; ++g)
    for (int64_t r = p.table.begin(g) + threadIdx.x; r < p.table.end(g); r += blockDim.x)
      if (!p.due || p.due[g])
        p.row_scale_inv[r] = p.inverse_given ? p.scale_inv[g] : 1.0f / p.scale[g];
}

// kAligned: as in FP8Tile.
template <typename T, typename Format, bool kAligned, typename Source>
__global__ void __launch_bounds__(FP8Tile<Source::kTileRows>::kThreads, Source::blocks(sizeof(T)))
    grouped_quantize_kernel(const Params p, const Pointers matrices, const Source source,
                            const Format format) {
  using Tile = FP8Tile<Source::kTileRows>;
  constexpr int kThreads = Tile::kThreads, kWarps = kThreads / 32, kRows = Tile::kRows;
  static_assert(32 / Tile::kLanes * kRows == kGroupAlign, "a warp's rows are of one group");
  __shared__ uint32_t amaxes[kWarps];
  __shared__ int groups[kWarps];
  __shared__ __align__(16) uint2 tile[Tile::kSharedWords];
  const int warp = threadIdx.x / 32;
  const bool is_writer = blockIdx.x == 0 && p.scale_inv && p.casts;
  if (is_writer && p.first == 0) {
    const bool bad = p.table.data && p.table.bad();
    for (int g = threadIdx.x; g < p.table.groups; g += kThreads)
      if ((bad || !p.inverse_given) && (!p.due || p.due[g]))
        p.scale_inv[g] = bad ? __uint_as_float(0x7FC00000u) : 1.0f / p.scale[g];
  }
  if (p.tiles_of_each == 0) return write_rows_without_columns(p);
  int64_t index = blockIdx.x;
  const int64_t cols = p.cols / Source::kParts;
  if (Source::kByColumns) {
    const int64_t col_tiles = (cols + Tile::kTileCols - 1) / Tile::kTileCols;
    const int64_t row_tiles = p.tiles_of_each / col_tiles;
    index = index % row_tiles * col_tiles + index / row_tiles;
  }
  const T* x = static_cast<const T*>(p.x);
  uint8_t *rowwise = p.rowwise, *columnwise = p.columnwise;
  int matrix = 0;
  if (p.stacked) {
    matrix = static_cast<int>(index / p.tiles_of_each);
    index -= matrix * p.tiles_of_each;
    matrix += p.first;
    if ((p.table.data && !p.table.used(matrix)) || (p.due && !p.due[matrix])) return;
    if (rowwise) rowwise += matrix * p.rows * p.cols;
    if (columnwise) columnwise += matrix * p.rows * p.cols;
  }
  // Places of the FP8 data in the columnwise copy and in x.
  const typename Tile::Place to(p.columns, cols, index);
  const int64_t column = to.row0 + warp * kGroupAlign;
  if (p.stacked) {  // a warp's rows are of one part, the last's where they do not exist
    const int part = p.parts == 1 ? 0 : min(static_cast<int>(column) / p.part_rows, p.parts - 1);
    x = static_cast<const T*>(matrices.at[(matrix - p.first) * p.parts + part]);
  }
  GroupRows found = p.stacked ? GroupRows{matrix, column, p.rows} : rows_of(p.table, column);
  if (!p.stacked && p.due && found.group >= 0 && !p.due[found.group]) found.group = -1;
  if (!p.stacked && p.due && !__syncthreads_or(found.group >= 0)) return;
  typename Tile::Place from = to;
  from.row = max(found.row, int64_t{0}) + (to.row - column);
  from.rows = found.group < 0 ? from.row : min(found.end, p.rows);
  Vec8<T> in[Source::kParts * kRows];
  source.template load<Tile, kAligned>(x, 0, from, WarpRows{found.group, column}, false, in);
  const int group = found.group;
  const float scale = group < 0 || !(rowwise || columnwise) ? 1.0f : p.scale[group];
  // Thread 0 may find that the tile's amax is no news to its group.
  uint32_t seen = 0;
  if (threadIdx.x == 0 && p.amax && group >= 0)
    seen = *reinterpret_cast<const volatile uint32_t*>(&p.amax[group]);
  uint32_t amax = 0;
#pragma unroll
  for (int part = 0; part < Source::kParts; ++part) {
    uint2 codes[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      fold_amax(in[part * kRows + r], amax);
      float values[kVec];
      unpack(in[part * kRows + r], values);
      codes[r] = format.encode(values, scale);
      if (from.row + r >= from.rows) codes[r] = make_uint2(0u, 0u);
    }
    const int64_t before = Source::kAdjacent ? 0 : part * cols;
    if (rowwise)
      Tile::template store_rows<kAligned>(rowwise + before, p.cols,
                                          place_of_part<Source, Tile>(from, part, p.cols), codes);
    if (part == 0 && p.row_scale_inv && to.col == 0 && group >= 0) {
      const float inverse = p.inverse_given ? p.scale_inv[group] : 1.0f / scale;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (from.row + r < from.rows) p.row_scale_inv[from.row + r] = inverse;
    }
    if (part > 0) __syncthreads();  // the tile of the part before has been read
    if (columnwise) Tile::stage_columns(codes, tile);
    if (part == Source::kParts - 1) {
      stage_amax(amax_bits(T{}, amax), amaxes);
      if (threadIdx.x % 32 == 0) groups[warp] = group;
    }
    __syncthreads();
    if (columnwise)
      Tile::template store_columns<kAligned>(columnwise + before * p.columns, p.columns,
                                             place_of_part<Source, Tile>(to.again(), part, p.cols),
                                             tile);
  }
  if (threadIdx.x != 0 || !p.amax) return;
  // One atomic for each group of the tile.
  const int own = group;
  for (int w = 0; w < kWarps;) {
    const int g = groups[w];
    uint32_t largest = 0;
    for (; w < kWarps && groups[w] == g; ++w) largest = max(largest, amaxes[w]);
    if (g >= 0 && largest > (g == own ? seen : 0u))
      atomicMax(reinterpret_cast<unsigned int*>(&p.amax[g]), largest);
  }
}

inline Params params_of(const GroupedQuantize& q) {
  return {q.x.data<void>(),
          static_cast<bool>(q.matrices),
          q.table,
          q.rows,
          q.cols,
          q.columns,
          q.scale,
          q.scale_inv,
          q.amax,
          q.rowwise,
          q.columnwise,
          q.casts,
          q.row_scale_inv,
          q.due,
          q.inverse_given,
          q.matrices.parts,
          static_cast<int>(q.matrices.rows),
          0,
          0};
}

// `count` matrices, or 1 for the groups of x.
template <typename T, bool kAligned, typename Format, typename Source>
void launch_tiles(Params p, const Pointers& matrices, int count, const Source& source,
                  const Format& format, cudaStream_t stream) {
  using Tile = FP8Tile<Source::kTileRows>;
  p.tiles_of_each = Tile::num_tiles(p.columns, p.cols / Source::kParts);
  // Without elements, one block writes scale_inv.
  const int64_t blocks = std::max<int64_t>(p.tiles_of_each * count, 1);
  if (blocks > 0x7FFFFFFF)
    fail(kApexTeUnsupported, "grouped_quantize: x must have fewer than 2^46 elements");
  grouped_quantize_kernel<T, Format, kAligned, Source>
      <<<static_cast<unsigned>(blocks), Tile::kThreads, 0, stream>>>(p, matrices, source, format);
  check_cuda(cudaGetLastError(), "grouped_quantize");
}

}  // namespace
}  // namespace apex_te
