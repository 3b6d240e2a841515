// CPU kernels of qkv_cast: tiles of 256 x 256, one thread each; heads are gathered into a tile that
// lies in the cache.
#include <algorithm>

#include "common/cpu/column_sums.h"
#include "common/cpu/quantize.h"
#include "common/numerics/with_dtype.h"
#include "qkv_cast/qkv_cast.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kTileRows = kQuantizeTileRows;
constexpr int64_t kTileCols = kQuantizeTileCols;
static_assert(kTileRows == kSumTileRows, "rows of a line of the bias sums' workspace");

struct CodeScratch {
  alignas(kLineBytes) uint8_t codes[kQuantizePartRows * kTileCols];
};
template <typename T>
struct TileScratch {
  alignas(kLineBytes) T elements[kTileRows * kTileCols];
};

// A tile of a rows x cols matrix.
struct TileAt {
  int64_t rows, cols, row0, col0;
  int64_t tile_rows() const { return std::min(kTileRows, rows - row0); }
  int64_t tile_cols() const { return std::min(kTileCols, cols - col0); }
};

// Calls run(tile) for each tile of a matrix.
template <typename Run>
void for_tiles(int64_t rows, int64_t cols, const Run& run) {
  const int64_t col_tiles = (cols + kTileCols - 1) / kTileCols;
  parallel_for((rows + kTileRows - 1) / kTileRows * col_tiles, [&](int64_t i) {
    run(TileAt{rows, cols, i / col_tiles * kTileRows, i % col_tiles * kTileCols});
  });
}

// Codes of a tile whose rows are x + r * ld; row r goes to row out_row(r) of the rowwise copy.
template <typename T, typename OutRow>
uint32_t cast_tile(const TileAt& at, const T* x, int64_t ld, const FP8RowEncoder<T>& encode,
                   const QkvOutputs& out, const OutRow& out_row) {
  uint8_t* const codes = thread_scratch<CodeScratch>().codes;
  const int64_t rows = at.tile_rows(), cols = at.tile_cols();
  uint32_t amax = 0;
  for (int64_t part = 0; part < rows; part += kQuantizePartRows) {
    const int64_t part_rows = std::min(kQuantizePartRows, rows - part);
    for (int64_t r = 0; r < part_rows; ++r) {
      uint8_t* row_codes = codes + r * kTileCols;
      amax = std::max(amax, encode(x + (part + r) * ld, cols, row_codes));
      if (out.rowwise)
        std::copy_n(row_codes, cols, out.rowwise + out_row(at.row0 + part + r) * at.cols + at.col0);
    }
    if (out.columnwise)
      transpose_bytes(codes, kTileCols, part_rows, cols,
                      out.columnwise + at.col0 * out.columnwise_length + at.row0 + part,
                      out.columnwise_length);
  }
  if (out.columnwise && at.row0 + rows == at.rows)
    zero_padding(out.columnwise + at.col0 * out.columnwise_length, cols, at.rows,
                 out.columnwise_length);
  return amax;
}

void finish(const QkvOutputs& out, uint32_t amax, float scale) {
  if (out.amax) *out.amax = bits_float(std::max(amax, float_bits(*out.amax)));
  if (out.scale_inv) *out.scale_inv = 1.0f / scale;
}

template <typename T>
void cast_weight(const QkvCastWeight& p) {
  const float scale = *p.scale;
  const auto encode = fp8_row_encoder<T>(p.out.fp8, scale);
  std::atomic<uint32_t> amax{0};
  const HeadOrder& order = p.order;
  for_tiles(p.rows, p.cols, [&](const TileAt& at) {
    const T* x = p.weight.data<const T>() + at.row0 * p.cols + at.col0;
    fold_amax(amax, cast_tile(at, x, p.cols, encode, p.out, [&](int64_t row) {
                const auto head = order.head_at(static_cast<uint32_t>(row / order.size));
                return order.sorted_place(head) * order.size + row % order.size;
              }));
  });
  finish(p.out, amax.load(), scale);
}

// The tile's elements, gathered from the heads.
template <typename T>
const T* gather(const QkvCastGrad& p, const TileAt& at) {
  T* const tile = thread_scratch<TileScratch<T>>().elements;
  const int64_t end = at.col0 + at.tile_cols(), size = p.order.size;
  for (int64_t c = at.col0; c < end;) {
    const int64_t place = c / size, within = c % size, n = std::min(size - within, end - c);
    const auto head = p.order.head_at(static_cast<uint32_t>(place));
    const HeadsView& from = head.part == 0 ? p.queries : head.part == 1 ? p.keys : p.values;
    const T* x = static_cast<const T*>(from.data) + head.index * from.head + within;
    for (int64_t r = 0; r < at.tile_rows(); ++r) {
      const int64_t row = at.row0 + r;
      std::copy_n(x + row / p.inner * from.outer + row % p.inner * from.inner, n,
                  tile + r * kTileCols + c - at.col0);
    }
    c += n;
  }
  return tile;
}

template <typename T>
void cast_grad(const QkvCastGrad& p) {
  const float scale = *p.scale;
  const auto encode = fp8_row_encoder<T>(p.out.fp8, scale);
  const auto sum = tile_summer<T, kTileCols>();
  std::atomic<uint32_t> amax{0};
  for_tiles(p.rows, p.cols, [&](const TileAt& at) {
    const T* x = gather<T>(p, at);
    fold_amax(amax, cast_tile(at, x, kTileCols, encode, p.out, [](int64_t row) { return row; }));
    if (p.dbias)
      sum(x, kTileCols, at.tile_rows(), at.tile_cols(),
          p.workspace + at.row0 / kTileRows * p.cols + at.col0);
  });
  if (p.dbias)
    add_lines<T>(p.workspace, (p.rows + kTileRows - 1) / kTileRows, p.cols, p.dbias.data());
  finish(p.out, amax.load(), scale);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(qkv_cast_weight) {
  using namespace apex_te;
  const QkvCastWeight p = check_qkv_cast_weight(args);
  if (p.noop && *p.noop != 0) return;
  with_dtype(p.weight.dtype(), [&](auto zero) { cast_weight<decltype(zero)>(p); });
}

APEX_TE_DEFINE(qkv_cast_grad) {
  using namespace apex_te;
  const QkvCastGrad p = check_qkv_cast_grad(args);
  with_dtype(p.dtype, [&](auto zero) { cast_grad<decltype(zero)>(p); });
}
