// CPU kernel of cast_transpose: the loops of common/cpu/quantize.h, and column sums of their tiles.
#include <algorithm>

#include "cast_transpose/cast_transpose.h"
#include "common/cpu/column_sums.h"
#include "common/cpu/quantize.h"
#include "common/numerics/with_dtype.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kTileRows = kCastTransposeTileRows;
constexpr int64_t kTileCols = kQuantizeTileCols;
static_assert(kTileRows == kQuantizeTileRows, "rows of a line of the bias sums' workspace");

// Column sums of a tile into its line of the workspace.
template <typename T>
void sum_tile_of(const CastTranspose& p, int64_t row0, int64_t col0) {
  const int64_t rows = std::min(kTileRows, p.rows - row0);
  const int64_t cols = std::min(kTileCols, p.cols - col0);
  const T* x = p.x.data<const T>() + row0 * p.cols + col0;
  float* line = p.workspace + row0 / kTileRows * p.cols + col0;
  tile_summer<T, kTileCols>()(x, p.cols, rows, cols, line);
}

template <typename T>
void cast_all(const CastTranspose& p) {
  const float scale = *p.scale;
  const Quantize q{p.x, p.rows, p.cols, p.fp8, p.rowwise, p.columnwise, p.ld};
  const auto encode = fp8_row_encoder<T>(p.fp8, scale);
  uint32_t amax;
  if (p.dbias) {
    amax = quantize_tiles<T>(q, encode,
                             [&](int64_t row0, int64_t col0) { sum_tile_of<T>(p, row0, col0); });
    add_lines<T>(p.workspace, (p.rows + kTileRows - 1) / kTileRows, p.cols, p.dbias.data());
  } else if (p.rowwise || p.columnwise) {
    amax = quantize_all<T>(q, encode);
  } else {
    amax = amax_of_tensor<T>(p.x);
  }
  if (p.amax) *p.amax = bits_float(std::max(amax, float_bits(*p.amax)));
  if (p.scale_inv) *p.scale_inv = 1.0f / scale;
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(cast_transpose) {
  using namespace apex_te;
  const CastTranspose p = check_cast_transpose(args);
  if (p.noop && *p.noop != 0) return;
  with_dtype(p.x.dtype(), [&](auto zero) { cast_all<decltype(zero)>(p); });
}

APEX_TE_DEFINE(cast_transpose_pair) {
  using namespace apex_te;
  const CastTranspose first = check_cast_with_dbias(args), second = check_cast(args);
  with_dtype(first.x.dtype(), [&](auto zero) { cast_all<decltype(zero)>(first); });
  with_dtype(second.x.dtype(), [&](auto zero) { cast_all<decltype(zero)>(second); });
}
