// CPU kernel of swiglu: chunks of whole rows, or with a columnwise output or dbias tiles of
// 64 x 1024; one thread each, row after row in fp32.
#include <algorithm>

#include "common/cpu/column_sums.h"
#include "common/cpu/scratch.h"
#include "swiglu/swiglu_rows.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

constexpr int64_t kTileRows = kSwigluTileRows;
constexpr int64_t kTileCols = 1024;
constexpr int64_t kBlockElements = 1 << 14;  // of a block of whole rows: a thread's share at a time

// Adds a row to the part's sums, and at the part's end those to the tile's.
APEX_TE_INLINE void add_row(const float* values, int64_t n, bool is_last, float* part_sums,
                            float* sums) {
  for (int64_t c = 0; c < n; ++c) part_sums[c] += values[c];
  if (!is_last) return;
  for (int64_t c = 0; c < n; ++c) sums[c] += part_sums[c];
  std::fill_n(part_sums, n, 0.0f);
}

struct Scratch {
  uint8_t codes[2][kTileRows * kTileCols];
  float gate[kTileCols], up[kTileCols], grad[kTileCols], results[2][kTileCols];
  float gate_bias[kTileCols], up_bias[kTileCols];
  float sums[2][kTileCols], part_sums[2][kTileCols];  // of the tile, of its last 8 rows
};

// Returns the amax.
APEX_TE_INLINE uint32_t tile(const Swiglu& p, RowLoop loop, int64_t row0, int64_t rows,
                             int64_t col0, int64_t cols) {
  const int halves = p.grad_output ? 2 : 1;
  const RowDType dtype(p.dtype);
  Scratch& scratch = thread_scratch<Scratch>();
  auto& codes = scratch.codes;
  float *gate = scratch.gate, *up = scratch.up, *grad = scratch.grad;
  float *gate_bias = scratch.gate_bias, *up_bias = scratch.up_bias;
  auto &results = scratch.results, &sums = scratch.sums, &part_sums = scratch.part_sums;
  if (p.dbias) {
    std::fill_n(sums[0], 2 * kTileCols, 0.0f);
    std::fill_n(part_sums[0], 2 * kTileCols, 0.0f);
  }
  if (p.gate_bias) {
    dtype.widen(p.gate_bias, col0, cols, gate_bias);
    dtype.widen(p.up_bias, col0, cols, up_bias);
  }
  uint32_t amax = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = row0 + r;
    const float* first_bias = p.gate_bias ? gate_bias : nullptr;
    const float* second_bias = p.gate_bias ? up_bias : nullptr;
    const float* g = read_gate(p, row, col0, first_bias, cols, gate);
    const float* u = read_up(p, row, col0, second_bias, cols, up);
    const float* d = grad;
    if (p.grad_output) d = read_row(dtype, p.grad_output, row * p.cols + col0, nullptr, cols, grad);
    void* out[2] = {p.grad_output ? p.dgate : p.out, p.dup};
    const int64_t at = row * (p.grad_output ? p.grad_ld : p.cols) + col0;
    float* made[2];
    for (int h = 0; h < 2; ++h)
      made[h] = dtype.is_float() && out[h] ? static_cast<float*>(out[h]) + at : results[h];
    loop(g, u, d, cols, p.clamp, made[0], made[1]);
    for (int h = 0; h < halves; ++h) {
      if (p.dbias) add_row(made[h], cols, r % 8 == 7 || r + 1 == rows, part_sums[h], sums[h]);
      if (p.scale) {
        uint8_t* row_codes = codes[h] + r * kTileCols;
        const uint32_t row_amax = p.fp8 == DType::kE5M2
                                      ? encode_row<E5M2>(made[h], cols, *p.scale, row_codes)
                                      : encode_row<E4M3>(made[h], cols, *p.scale, row_codes);
        amax = std::max(amax, row_amax);
        if (p.rowwise) std::copy_n(row_codes, cols, p.rowwise + (row * halves + h) * p.cols + col0);
      } else if (!dtype.is_float()) {
        dtype.narrow(made[h], cols, out[h], at);
      }
    }
  }
  for (int h = 0; h < halves; ++h) {
    if (p.columnwise) {
      uint8_t* columns = p.columnwise + (h * p.cols + col0) * p.columnwise_ld;
      transpose_bytes(codes[h], kTileCols, rows, cols, columns + row0, p.columnwise_ld);
      if (row0 + rows == p.rows) zero_padding(columns, cols, p.rows, p.columnwise_ld);
    }
    if (p.dbias)
      std::copy_n(sums[h], cols, p.workspace + (row0 / kTileRows * 2 + h) * p.cols + col0);
  }
  return amax;
}

// A block of rows x cols in tiles of at most `tile_rows` rows.
APEX_TE_INLINE uint32_t block(const Swiglu& p, RowLoop loop, int64_t tile_rows, int64_t row0,
                              int64_t row_end, int64_t col0, int64_t col_end) {
  uint32_t amax = 0;
  for (int64_t row = row0; row < row_end; row += tile_rows)
    for (int64_t col = col0; col < col_end; col += kTileCols)
      amax = std::max(amax, tile(p, loop, row, std::min(tile_rows, row_end - row), col,
                                 std::min(kTileCols, col_end - col)));
  return amax;
}
APEX_TE_TARGET_PORTABLE uint32_t block_portable(const Swiglu& p, RowLoop loop, int64_t tile_rows,
                                                int64_t row0, int64_t row_end, int64_t col0,
                                                int64_t col_end) {
  return block(p, loop, tile_rows, row0, row_end, col0, col_end);
}
APEX_TE_TARGET_AVX2 uint32_t block_avx2(const Swiglu& p, RowLoop loop, int64_t tile_rows,
                                        int64_t row0, int64_t row_end, int64_t col0,
                                        int64_t col_end) {
  return block(p, loop, tile_rows, row0, row_end, col0, col_end);
}
APEX_TE_TARGET_AVX512 uint32_t block_avx512(const Swiglu& p, RowLoop loop, int64_t tile_rows,
                                            int64_t row0, int64_t row_end, int64_t col0,
                                            int64_t col_end) {
  return block(p, loop, tile_rows, row0, row_end, col0, col_end);
}

void run_swiglu(const Swiglu& p) {
  const RowLoop loop =
      p.grad_output ? row_loop_of<true>(p.activation) : row_loop_of<false>(p.activation);
  const auto run_block = use_avx512() ? block_avx512 : use_avx2() ? block_avx2 : block_portable;
  // Whole rows suit the memory best; columns are only summed or transposed in tiles.
  const bool in_tiles = p.columnwise || p.dbias;
  const int64_t block_cols = in_tiles ? kTileCols : std::min<int64_t>(p.cols, 16384);
  const int64_t block_rows =
      in_tiles ? kTileRows
               : std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, block_cols));
  const int64_t row_blocks = (p.rows + block_rows - 1) / block_rows;
  const int64_t col_blocks = block_cols ? (p.cols + block_cols - 1) / block_cols : 0;
  std::atomic<uint32_t> amax{0};
  parallel_for(row_blocks * col_blocks, [&](int64_t i) {
    const int64_t row = i / col_blocks * block_rows, col = i % col_blocks * block_cols;
    fold_amax(amax,
              run_block(p, loop, in_tiles ? kTileRows : 1, row, std::min(p.rows, row + block_rows),
                        col, std::min(p.cols, col + block_cols)));
  });
  if (p.amax) *p.amax = bits_float(std::max(amax.load(), float_bits(*p.amax)));
  if (p.scale_inv) *p.scale_inv = 1.0f / *p.scale;
  if (p.dbias) add_lines(p.workspace, row_blocks, 2 * p.cols, p.dtype, p.dbias);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(swiglu_fwd) { apex_te::run_swiglu(apex_te::check_swiglu_fwd(args, false)); }
APEX_TE_DEFINE(swiglu_fwd_fp8) { apex_te::run_swiglu(apex_te::check_swiglu_fwd(args, true)); }
APEX_TE_DEFINE(swiglu_bwd) { apex_te::run_swiglu(apex_te::check_swiglu_bwd(args, false)); }
APEX_TE_DEFINE(swiglu_bwd_fp8) { apex_te::run_swiglu(apex_te::check_swiglu_bwd(args, true)); }
APEX_TE_DEFINE(swiglu_fwd_held_fp8) {
  apex_te::run_swiglu(apex_te::check_swiglu_fwd(args, true, true));
}
APEX_TE_DEFINE(swiglu_bwd_held_fp8) {
  apex_te::run_swiglu(apex_te::check_swiglu_bwd(args, true, true));
}
