// CPU kernel of swiglu with results in FP8 blocks of 1 x 128: tiles of 128 x 256, one thread each,
// computed into memory of the thread's own and cast from there.
#include "common/cpu/block_1x128.h"
#include "swiglu/swiglu_rows.h"
#include "swiglu_block/swiglu_block.h"

APEX_TE_LIBRARY()

namespace apex_te {
namespace {

template <typename T>
struct Scratch {
  T results[2][kBlock * kBlockTileCols];
  float gate[kBlockTileCols], up[kBlockTileCols], grad[kBlockTileCols];
  float gate_bias[kBlockTileCols], up_bias[kBlockTileCols], made[2][kBlockTileCols];
};

// Results of the tile's elements into scratch.results, rounded.
template <typename T>
void compute_tile(const Swiglu& p, RowLoop loop, const BlockTile& t, Scratch<T>& scratch) {
  const RowDType dtype(p.dtype);
  const float* biases[2] = {nullptr, nullptr};
  if (p.gate_bias) {
    dtype.widen(p.gate_bias, t.col0, t.cols, scratch.gate_bias);
    dtype.widen(p.up_bias, t.col0, t.cols, scratch.up_bias);
    biases[0] = scratch.gate_bias;
    biases[1] = scratch.up_bias;
  }
  const int64_t bytes = t.cols * dtype.size();
  const auto ahead = [&](const void* matrix, int64_t row, int64_t ld) {
    const int64_t i = (row + kBlockRowsAhead) * ld + t.col0;
    prefetch_row(static_cast<const uint8_t*>(dtype.at(matrix, i)), bytes);
  };
  for (int64_t r = 0; r < t.rows; ++r) {
    const int64_t row = t.row0 + r;
    if (row + kBlockRowsAhead < p.rows) {
      if (!p.held_scales) {
        ahead(p.gate, row, p.gate_ld);
        ahead(p.up, row, p.up_ld);
      }
      if (p.grad_output) ahead(p.grad_output, row, p.cols);
    }
    const float* gate = read_gate(p, row, t.col0, biases[0], t.cols, scratch.gate);
    const float* up = read_up(p, row, t.col0, biases[1], t.cols, scratch.up);
    if (p.grad_output) dtype.widen(p.grad_output, row * p.cols + t.col0, t.cols, scratch.grad);
    loop(gate, up, scratch.grad, t.cols, p.clamp, scratch.made[0], scratch.made[1]);
    for (int h = 0; h < (p.grad_output ? 2 : 1); ++h)
      dtype.narrow(scratch.made[h], t.cols, scratch.results[h], r * kBlockTileCols);
  }
}

// Returns the amax of the tile of forward, or of the tiles of both gradients.
template <typename T>
APEX_TE_INLINE uint32_t cast_results(const BlockCast& p, const BlockEncoder<T>& encoder,
                                     BlockTile t, int64_t half_cols, int halves,
                                     const Scratch<T>& scratch) {
  uint32_t amax = 0;
  for (int h = 0; h < halves; ++h, t.col0 += half_cols) {
    const BlockSource<T> from{scratch.results[h], kBlockTileCols, t.rows, nullptr};
    amax = std::max(amax, cast_1x128<T>(p, encoder, t, from));
  }
  return amax;
}
template <typename T>
APEX_TE_TARGET_PORTABLE uint32_t cast_results_portable(const BlockCast& p,
                                                       const BlockEncoder<T>& encoder, BlockTile t,
                                                       int64_t half_cols, int halves,
                                                       const Scratch<T>& scratch) {
  return cast_results<T>(p, encoder, t, half_cols, halves, scratch);
}
template <typename T>
APEX_TE_TARGET_AVX2 uint32_t cast_results_avx2(const BlockCast& p, const BlockEncoder<T>& encoder,
                                               BlockTile t, int64_t half_cols, int halves,
                                               const Scratch<T>& scratch) {
  return cast_results<T>(p, encoder, t, half_cols, halves, scratch);
}

template <typename T>
void run_tiles(const SwigluBlock& given) {
  const Swiglu& op = given.op;
  const bool is_bwd = op.grad_output;
  const RowLoop loop =
      is_bwd ? row_loop_of<true>(op.activation) : row_loop_of<false>(op.activation);
  const auto cast = use_avx2() ? cast_results_avx2<T> : cast_results_portable<T>;
  const BlockEncoder<T> encoder(given.cast.fp8);
  const int64_t col_tiles = block_col_tiles(op.cols);
  std::atomic<uint32_t> amax{0};
  parallel_for(num_blocks(op.rows) * col_tiles, [&](int64_t i) {
    const auto t = BlockTile::of(op.rows, op.cols, i / col_tiles, i % col_tiles);
    Scratch<T>& scratch = thread_scratch<Scratch<T>>();
    compute_tile<T>(op, loop, t, scratch);
    fold_amax(amax, cast(given.cast, encoder, t, op.cols, is_bwd ? 2 : 1, scratch));
  });
  finish_block_cast(given.cast, amax.load());
}

void run_swiglu_block(const SwigluBlock& given) {
  given.op.dtype == DType::kFloat16 ? run_tiles<Half>(given) : run_tiles<BFloat16>(given);
}

}  // namespace
}  // namespace apex_te

APEX_TE_DEFINE(swiglu_fwd_block) {
  apex_te::run_swiglu_block(apex_te::check_swiglu_block(args, false));
}
APEX_TE_DEFINE(swiglu_bwd_block) {
  apex_te::run_swiglu_block(apex_te::check_swiglu_block(args, true));
}
APEX_TE_DEFINE(swiglu_fwd_held_block) {
  apex_te::run_swiglu_block(apex_te::check_swiglu_block(args, false, true));
}
APEX_TE_DEFINE(swiglu_bwd_held_block) {
  apex_te::run_swiglu_block(apex_te::check_swiglu_block(args, true, true));
}
