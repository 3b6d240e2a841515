// CPU kernel of cast_transpose: tiles of 256 x 128, one thread each.
#include <algorithm>

#include "cast_transpose/cast_transpose.h"
#include "common/cpu_vec.h"
#include "common/parallel.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kTileRows = kCastTransposeTileRows;
constexpr int64_t kTileCols = 128;
constexpr int64_t kRows = kCastTransposeRowsPerThread;

template <typename T, typename Format>
APEX_TE_INLINE uint32_t cast_tile(const CastTranspose& p, float scale, int64_t row0, int64_t col0) {
  const int64_t rows = std::min(kTileRows, p.rows - row0);
  const int64_t cols = std::min(kTileCols, p.cols - col0);
  const T* x = p.x.data<const T>() + row0 * p.cols + col0;
  uint8_t codes[kTileRows * kTileCols];
  float tile_sums[kTileCols] = {}, sums[2][kTileCols];
  const bool with_codes = p.rowwise || p.transposed;
  uint32_t amax = 0;
  for (int64_t r0 = 0; r0 < rows; r0 += 2 * kRows) {
    std::fill_n(sums[0], 2 * kTileCols, 0.0f);
    for (int64_t r = r0; r < std::min(rows, r0 + 2 * kRows); ++r) {
      float values[kTileCols];
      widen(x + r * p.cols, cols, values);
      amax = std::max(amax, amax_of(values, cols));
      if (p.dbias) {
        float* row_sums = sums[(r - r0) / kRows];
        for (int64_t c = 0; c < cols; ++c) row_sums[c] += values[c];
      }
      if (!with_codes) continue;
      encode_row<Format>(values, cols, scale, codes + r * kTileCols);
      if (p.rowwise)
        std::copy_n(codes + r * kTileCols, cols, p.rowwise + (row0 + r) * p.cols + col0);
    }
    if (p.dbias)
      for (int64_t c = 0; c < cols; ++c) tile_sums[c] += sums[0][c] + sums[1][c];
  }
  if (p.transposed)
    transpose_bytes(codes, kTileCols, rows, cols, p.transposed + col0 * p.rows + row0, p.rows);
  if (p.dbias) std::copy_n(tile_sums, cols, p.workspace + row0 / kTileRows * p.cols + col0);
  return amax;
}

template <typename T, typename Format>
uint32_t cast_tile_portable(const CastTranspose& p, float scale, int64_t row0, int64_t col0) {
  return cast_tile<T, Format>(p, scale, row0, col0);
}
template <typename T, typename Format>
APEX_TE_TARGET_AVX2 uint32_t cast_tile_avx2(const CastTranspose& p, float scale, int64_t row0,
                                            int64_t col0) {
  return cast_tile<T, Format>(p, scale, row0, col0);
}

template <typename T>
void sum_tiles(const CastTranspose& p) {
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows;
  T* dbias = p.dbias.data<T>();
  parallel_for((p.cols + 1023) / 1024, [&](int64_t chunk) {
    const int64_t end = std::min(p.cols, (chunk + 1) * 1024);
    for (int64_t c = chunk * 1024; c < end; ++c) {
      float sum = 0.0f;
      for (int64_t t = 0; t < tiles; ++t) sum += p.workspace[t * p.cols + c];
      dbias[c] = from_float<T>(sum);
    }
  });
}

template <typename T, typename Format>
void cast_all(const CastTranspose& p) {
  const float scale = *p.scale;
  const auto tile = use_avx2() ? cast_tile_avx2<T, Format> : cast_tile_portable<T, Format>;
  const int64_t row_tiles = (p.rows + kTileRows - 1) / kTileRows;
  const int64_t col_tiles = (p.cols + kTileCols - 1) / kTileCols;
  std::atomic<uint32_t> amax{0};
  parallel_for(row_tiles * col_tiles, [&](int64_t i) {
    fold_amax(amax, tile(p, scale, i / col_tiles * kTileRows, i % col_tiles * kTileCols));
  });
  if (p.amax) *p.amax = bits_float(std::max(amax.load(), float_bits(*p.amax)));
  if (p.scale_inv) *p.scale_inv = 1.0f / scale;
  if (p.dbias) sum_tiles<T>(p);
}

template <typename T>
void cast_format(const CastTranspose& p) {
  p.fp8 == DType::kE5M2 ? cast_all<T, E5M2>(p) : cast_all<T, E4M3>(p);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(cast_transpose) {
  using namespace apex_te;
  const CastTranspose p = check_cast_transpose(args);
  if (p.noop && *p.noop != 0) return;
  switch (p.x.dtype()) {
    case DType::kFloat32:
      return cast_format<float>(p);
    case DType::kFloat16:
      return cast_format<Half>(p);
    default:
      return cast_format<BFloat16>(p);
  }
}
