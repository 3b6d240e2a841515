// Sources of the elements that grouped_quantize's kernels cast, which fill a thread's part of a
// tile.
//
// Beside load() a source has
// - kTileRows: rows of a tile with one scale a group; tiles of 1x128 blocks have 128;
// - kParts: matrices of equal extents side by side, of which load() fills the same tile of each;
//   with several, 1x128 blocks need whole tiles of columns;
// - kAdjacent: whether the same tiles of all parts lie side by side instead, in one matrix;
// - kByColumns: whether the tiles of one column of tiles follow each other, for a source that reads
//   rows of x several times, of which the L2 cache then holds 128 columns;
// - blocks() and blocks_1x128(): blocks of threads on an SM in either cast, for an element's bytes,
//   which bound the registers of a thread.
#pragma once

#include "common/gpu/block_1x128.h"
#include "grouped_quantize/grouped_quantize.h"

namespace apex_te {
namespace {

// The group of a warp's rows, negative if they have none, and their first column in columnwise
// codes.
struct WarpRows {
  int group;
  int64_t column;
};

// x as it is.
struct PlainSource {
  static constexpr int kTileRows = 256;
  static constexpr int kParts = 1;
  static constexpr bool kAdjacent = false;
  static constexpr bool kByColumns = false;
  static constexpr int blocks(size_t bytes) { return bytes == 4 ? 1 : 2; }
  static constexpr int blocks_1x128(size_t bytes) { return bytes == 4 ? 2 : 3; }
  // The part of a tile that `at` describes in the rows from `begin` on, zeros where it has no
  // element; is_whole: it has all.
  template <typename Tile, bool kAligned, typename T>
  __device__ __forceinline__ void load(const T* x, int64_t begin, const typename Tile::Place& at,
                                       const WarpRows&, bool is_whole, Vec8<T>* in) const {
    x += begin * at.cols;
    is_whole ? Tile::load_whole(x, at.cols, at, in)
             : Tile::template load<T, kAligned>(x, at.cols, at, in);
  }
};

// The place of a tile of adjacent parts, `cols` columns wide, or of a tile of other parts
// unchanged.
template <typename Source, typename Tile>
__device__ __forceinline__ typename Tile::Place place_of_part(typename Tile::Place at, int part,
                                                              int64_t cols) {
  if (!Source::kAdjacent) return at;
  const int64_t shift = at.col0 + part * Tile::kTileCols;
  at.col0 += shift;
  at.col += shift;
  at.cols = cols;
  return at;
}

}  // namespace
}  // namespace apex_te
