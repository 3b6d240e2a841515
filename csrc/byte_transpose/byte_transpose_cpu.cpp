// CPU kernel of byte_transpose: tiles of 256 x 256, one thread each.
#include <algorithm>

#include "byte_transpose/byte_transpose.h"
#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

APEX_TE_LIBRARY()

APEX_TE_DEFINE(byte_transpose) {
  using namespace apex_te;
  constexpr int64_t kTile = 256;
  const ByteTranspose p = check_byte_transpose(args);
  const int64_t col_tiles = (p.cols + kTile - 1) / kTile;
  const bool streamed = p.rows * p.cols >= kStreamedBytes;
  parallel_for((p.rows + kTile - 1) / kTile * col_tiles, [&](int64_t i) {
    const int64_t row0 = i / col_tiles * kTile, col0 = i % col_tiles * kTile;
    const int64_t rows = std::min(kTile, p.rows - row0), cols = std::min(kTile, p.cols - col0);
    uint8_t* out = p.out + col0 * p.ld;
    transpose_bytes(p.codes + row0 * p.cols + col0, p.cols, rows, cols, out + row0, p.ld, streamed);
    if (row0 + rows == p.rows) zero_padding(out, cols, p.rows, p.ld);
    if (streamed) finish_stream();
  });
}
