// Tiles of FP8 codes that leave a kernel rowwise, columnwise or both.
//
// A tile is kTileRows x 128; a thread holds 8 rows of 8 columns, whose codes it stores as rows,
// transposes in registers and passes through shared memory, so that every column of the tile leaves
// as kTileRows contiguous bytes. The shared tile is swizzled: both its sides are free of bank
// conflicts.
#pragma once

#include "common/gpu/amax.h"
#include "common/gpu/shifted.h"
#include "common/gpu/vec.h"

namespace apex_te {

// Transposes 4 x 4 bytes held in four words.
__device__ __forceinline__ void transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                           uint32_t* out) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab_low, cd_low, 0x5410);
  out[1] = __byte_perm(ab_low, cd_low, 0x7632);
  out[2] = __byte_perm(ab_high, cd_high, 0x5410);
  out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

template <int kTileRows>
struct FP8Tile {
  static_assert(kTileRows == 64 || kTileRows == 128 || kTileRows == 256, "tile rows");
  static constexpr int kRows = 8;  // rows of one thread
  static constexpr int kTileCols = 128;
  static constexpr int kLanes = kTileCols / kVec;  // threads across a tile
  static constexpr int kThreads = kLanes * kTileRows / kRows;
  static constexpr int kSharedWords = kTileRows * kTileCols / 8;  // uint2 of shared memory

  // Place of a thread in a rows x cols matrix: its first row and column, and its tile's.
  struct Place {
    int64_t rows, cols, row0, col0, row, col;
    __device__ Place(int64_t num_rows, int64_t num_cols, int64_t tile)
        : rows(num_rows), cols(num_cols) {
      const int64_t col_tiles = (cols + kTileCols - 1) / kTileCols;
      const int64_t row_tile = tile / col_tiles;
      row0 = row_tile * kTileRows;
      col0 = (tile - row_tile * col_tiles) * kTileCols;
      row = row0 + threadIdx.x / kLanes * kRows;
      col = col0 + threadIdx.x % kLanes * kVec;
    }
    // Place in a tile of a grid(), for a thread that holds the columns of `lane`, rows of `group`.
    __device__ Place(int64_t num_rows, int64_t num_cols, int lane, int group)
        : rows(num_rows), cols(num_cols) {
      row0 = block_row() * kTileRows;
      col0 = static_cast<int64_t>(blockIdx.x) * kTileCols;
      row = row0 + group * kRows;
      col = col0 + lane * kVec;
    }
    // The same place for code that follows a barrier: what is computed again there need not stay in
    // registers until then.
    __device__ __forceinline__ Place again() const {
      int row_tile = static_cast<int>(row0 / kTileRows),
          col_tile = static_cast<int>(col0 / kTileCols);
      asm volatile("" : "+r"(row_tile), "+r"(col_tile));
      Place place = *this;
      place.row0 = static_cast<int64_t>(row_tile) * kTileRows;
      place.col0 = static_cast<int64_t>(col_tile) * kTileCols;
      place.row = place.row0 + threadIdx.x / kLanes * kRows;
      place.col = place.col0 + threadIdx.x % kLanes * kVec;
      return place;
    }
    __device__ bool is_whole() const {
      return row0 + kTileRows <= rows && col0 + kTileCols <= cols;
    }
    // Number of a thread's rows that exist; none where its columns lie past the last.
    __device__ int rows_present() const {
      const int64_t left = rows - row;
      return col >= cols || left <= 0 ? 0 : left < kRows ? static_cast<int>(left) : kRows;
    }
  };

  static dim3 grid(int64_t rows, int64_t cols, const char* name) {
    return grid_of((rows + kTileRows - 1) / kTileRows, (cols + kTileCols - 1) / kTileCols, name);
  }

  static int64_t num_tiles(int64_t rows, int64_t cols) {
    return (rows + kTileRows - 1) / kTileRows * ((cols + kTileCols - 1) / kTileCols);
  }

  // kAligned: pointers are aligned to 16 bytes (rows of codes to 8) and cols and ld are multiples
  // of 8, so no vector needs a bounds check inside. `ld` is the distance of rows in elements.
  template <typename T, bool kAligned>
  static __device__ __forceinline__ void load(const T* x, int64_t ld, const Place& at,
                                              Vec8<T>* in) {
    const T* p = x + at.row * ld + at.col;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (kAligned) {
        in[r] = at.row + r < at.rows && at.col < at.cols ? load_vec(p + r * ld) : Vec8<T>{};
      } else {
        in[r] = load_partial(p + r * ld, at.row + r < at.rows ? at.cols - at.col : 0);
      }
    }
  }

  // The same, and the stores below, for aligned data of a whole tile: nothing is checked.
  template <typename T>
  static __device__ __forceinline__ void load_whole(const T* x, int64_t ld, const Place& at,
                                                    Vec8<T>* in) {
    const T* p = x + at.row * ld + at.col;
#pragma unroll
    for (int r = 0; r < kRows; ++r, p += ld) in[r] = load_vec(p);
  }
  static __device__ __forceinline__ void store_rows_whole(uint8_t* out, int64_t ld, const Place& at,
                                                          const uint2* codes) {
    uint8_t* p = out + at.row * ld + at.col;
#pragma unroll
    for (int r = 0; r < kRows; ++r, p += ld) *reinterpret_cast<uint2*>(p) = codes[r];
  }
  static __device__ __forceinline__ void store_columns_whole(uint8_t* out, int64_t ld,
                                                             const Place& at, const uint2* tile,
                                                             int thread = threadIdx.x) {
    constexpr int kParts = kTileRows / 16, kStep = kThreads / kParts;
    const int part = thread % kParts, first = thread / kParts;
    uint8_t* p = out + (at.col0 + first) * ld + at.row0 + part * 16;
#pragma unroll
    for (int i = 0; i < kTileCols / kStep; ++i, p += kStep * ld)
      *reinterpret_cast<uint4*>(p) = column_part(tile, first + i * kStep, part);
  }

  template <bool kAligned>
  static __device__ __forceinline__ void store_rows(uint8_t* out, int64_t ld, const Place& at,
                                                    const uint2* codes) {
    uint8_t* p = out + at.row * ld + at.col;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (at.row + r >= at.rows) break;
      if (!kAligned)
        store_codes_partial(p + r * ld, codes[r], at.cols - at.col);
      else if (at.col < at.cols)
        *reinterpret_cast<uint2*>(p + r * ld) = codes[r];
    }
  }

  // load, store_rows and store_columns of a dense matrix at any alignment, with rows of any length,
  // in vectors even so. All threads of a warp call store_rows_any, of which kRowLanes
  // neighbours share a row.
  template <typename T>
  static __device__ __forceinline__ void load_any(const T* x, const Place& at, Vec8<T>* in) {
    if (at.cols % kVec == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0)
      return load<T, true>(x, at.cols, at, in);
    constexpr int kOnce = 8 / sizeof(T);  // rows whose loads are in flight, which take registers
    const T *p = x + at.row * at.cols + at.col, *end = x + at.rows * at.cols;
#pragma unroll
    for (int first = 0; first < kRows; first += kOnce)
      load_all_shifted<kOnce>(
          [&](int r) { return p + (first + r) * at.cols; },
          [&](int r) { return at.row + first + r < at.rows ? at.cols - at.col : 0; }, x, end,
          in + first);
  }
  template <int kRowLanes = kLanes>
  static __device__ __forceinline__ void store_rows_any(uint8_t* out, const Place& at,
                                                        const uint2* codes) {
    const int lane = threadIdx.x % kRowLanes;
    const int64_t col = at.col - lane * kVec;
    uint8_t* p = out + at.row * at.cols + col;
#pragma unroll
    for (int r = 0; r < kRows; ++r, p += at.cols)
      store_codes_of_lanes<kRowLanes>(p, codes[r], at.row + r < at.rows ? at.cols - col : 0, lane);
  }
  static __device__ __forceinline__ void store_columns_any(uint8_t* out, int64_t ld,
                                                           const Place& at, const uint2* tile,
                                                           int thread = threadIdx.x) {
    if (ld % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0)
      store_columns<true>(out, ld, at, tile, thread);
    else
      store_columns<false>(out, ld, at, tile, thread);
  }

  // store_columns_any with a path for whole tiles, which is faster and compiles longer.
  static __device__ __forceinline__ void store_columns_most(uint8_t* out, int64_t ld,
                                                            const Place& at, const uint2* tile,
                                                            int thread = threadIdx.x) {
    if (ld % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0 && at.is_whole())
      store_columns_whole(out, ld, at, tile, thread);
    else
      store_columns_any(out, ld, at, tile, thread);
  }

  // A thread's 8 x 8 codes, transposed, into the shared tile. A barrier must follow.
  static __device__ __forceinline__ void stage_columns(const uint2* codes, uint2* tile) {
    stage_columns(codes, tile, threadIdx.x % kLanes, threadIdx.x / kLanes);
  }
  // Stages FP8 data of a thread that holds the columns of `lane` and the rows of `group`.
  static __device__ __forceinline__ void stage_columns(const uint2* codes, uint2* tile, int lane,
                                                       int group) {
    uint32_t low[kVec], high[kVec];  // of column c: rows 0-3 and 4-7
    transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, low);
    transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, low + 4);
    transpose4(codes[4].x, codes[5].x, codes[6].x, codes[7].x, high);
    transpose4(codes[4].y, codes[5].y, codes[6].y, codes[7].y, high + 4);
#pragma unroll
    for (int c = 0; c < kVec; ++c)
      tile[chunk_of(lane * kVec + c, group)] = make_uint2(low[c], high[c]);
  }

  // The shared tile to the columnwise output, whose rows are `ld` bytes long: the matrix's rows, or
  // more with padding (common/numerics/columnwise.h), which becomes zeros whatever the tile holds
  // there. kAligned: out is aligned to 16 bytes and ld is a multiple of 16. `thread` is one of
  // kThreads.
  template <bool kAligned>
  static __device__ __forceinline__ void store_columns(uint8_t* out, int64_t ld, const Place& at,
                                                       const uint2* tile,
                                                       int thread = threadIdx.x) {
    if (!kAligned) return store_columns_shifted(out, ld, at, tile, thread);
    constexpr int kParts = kTileRows / 16;
    const int part = thread % kParts;
    // Rows of the part that exist; behind them are zeros.
    const int present = rows_of(at) - part * 16;
#pragma unroll
    for (int c = thread / kParts; c < kTileCols; c += kThreads / kParts) {
      if (at.col0 + c >= at.cols) break;
      uint4 bytes = column_part(tile, c, part);
      if (present < 16) bytes = first_bytes(bytes, present);
      uint8_t* p = out + (at.col0 + c) * ld + at.row0 + part * 16;
      if (present > 0) *reinterpret_cast<uint4*>(p) = bytes;
    }
  }

 private:
  static __device__ __forceinline__ int rows_of(const Place& at) {
    return static_cast<int>(at.rows - at.row0 < kTileRows ? at.rows - at.row0 : kTileRows);
  }
  // store_columns at any alignment: a thread stores the 16 bytes around its part's address, the
  // first of them of the part before it, and bytes outside such units. A call, so that no kernel
  // keeps registers for it.
  static __device__ __noinline__ void store_columns_shifted(uint8_t* out, int64_t ld, Place at,
                                                            const uint2* tile, int thread) {
    constexpr int kParts = kTileRows / 16;
    const int part = thread % kParts, rows = rows_of(at);
#pragma unroll 2
    for (int c = thread / kParts; c < kTileCols; c += kThreads / kParts) {
      if (at.col0 + c >= at.cols) break;
      uint8_t* p = out + (at.col0 + c) * ld + at.row0;
      const ShiftedRow<16> column(p, ld - at.row0, kTileRows);
      if (column.has_unit(part)) {
        const int first = part * 16 - column.shift;
        uint4 bytes = column_part(tile, c, part);
        if (column.shift) {
          const uint4 before = column_part(tile, c, part - 1);
          uint32_t words[8] = {before.x, before.y, before.z, before.w,
                               bytes.x,  bytes.y,  bytes.z,  bytes.w};
          uint32_t unit[4];
          shift_words<4>(words, 16 - column.shift, unit);
          bytes = make_uint4(unit[0], unit[1], unit[2], unit[3]);
        }
        if (first + 16 > rows) bytes = first_bytes(bytes, rows - first);
        *reinterpret_cast<uint4*>(p + first) = bytes;
      }
      for (int i = part; column.edge(i) < column.length; i += kParts) {
        const int row = column.edge(i);
        const auto* chunk = reinterpret_cast<const uint8_t*>(tile + chunk_of(c, row / 8));
        p[row] = row < rows ? chunk[row % 8] : uint8_t{0};
      }
    }
  }

 private:
  static __device__ __forceinline__ uint4 first_bytes(uint4 bytes, int64_t n) {
    const uint2 low = first_codes(make_uint2(bytes.x, bytes.y), n);
    const uint2 high = first_codes(make_uint2(bytes.z, bytes.w), n - 8);
    return make_uint4(low.x, low.y, high.x, high.y);
  }
  // Rows 16 part to 16 part + 15 of a column of the shared tile.
  static __device__ __forceinline__ uint4 column_part(const uint2* tile, int col, int part) {
    const int swizzle = swizzle_of(col);
    const uint4 pair =
        reinterpret_cast<const uint4*>(tile)[col * (kTileRows / 16) + (part ^ (swizzle >> 1))];
    return swizzle & 1 ? make_uint4(pair.z, pair.w, pair.x, pair.y) : pair;
  }
  static __device__ __forceinline__ int swizzle_of(int col) { return col / kVec % (kTileRows / 8); }
  // Place of an 8-byte chunk (8 rows of one column) in the shared tile.
  static __device__ __forceinline__ int chunk_of(int col, int row_chunk) {
    return col * (kTileRows / 8) + (row_chunk ^ swizzle_of(col));
  }
};

// Row lengths and all pointers of an FP8 producer allow the vector accesses of FP8Tile. ld: of the
// columnwise copy's rows.
inline bool fp8_tile_aligned(int64_t ld, int64_t cols, const uint8_t* rowwise,
                             const uint8_t* columnwise) {
  return cols % kVec == 0 && is_aligned(rowwise, 8) &&
         (!columnwise || (ld % 16 == 0 && is_aligned(columnwise, 16)));
}

}  // namespace apex_te
