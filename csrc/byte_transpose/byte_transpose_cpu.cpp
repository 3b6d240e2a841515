// CPU kernel of byte_transpose: tiles of 256 x 256, one thread each.
#include <algorithm>

#include "byte_transpose/byte_transpose.h"
#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

void transpose(const ByteTranspose& p) {
  constexpr int64_t kTile = 256;
  const int64_t col_tiles = (p.cols + kTile - 1) / kTile;
  const int64_t tiles = (p.rows + kTile - 1) / kTile * col_tiles;
  const bool streamed = p.count * p.rows * p.cols >= kStreamedBytes;
  parallel_for(p.count * tiles, [&](int64_t i) {
    const int64_t matrix = i / tiles, tile = i % tiles;
    const int64_t row0 = tile / col_tiles * kTile, col0 = tile % col_tiles * kTile;
    const int64_t rows = std::min(kTile, p.rows - row0), cols = std::min(kTile, p.cols - col0);
    const uint8_t* codes = p.codes + (matrix * p.rows + row0) * p.cols + col0;
    uint8_t* out = p.out + (matrix * p.cols + col0) * p.ld;
    transpose_bytes(codes, p.cols, rows, cols, out + row0, p.ld, streamed);
    if (row0 + rows == p.rows) zero_padding(out, cols, p.rows, p.ld);
    if (streamed) finish_stream();
  });
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(byte_transpose) { apex_te::transpose(apex_te::check_byte_transpose(args)); }

APEX_TE_DEFINE(byte_transpose_stack) {
  apex_te::transpose(apex_te::check_byte_transpose_stack(args));
}
