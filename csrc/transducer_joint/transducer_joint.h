// transducer_joint: the sums f[t] + g[u] of all cells of a batch of samples, with ReLU and dropout,
// and the gradients of f and g.
//
// A cell behind a sample's lengths is -1; packed, there is none. The mask has a byte for each
// element, 1 if it is above 0 (with ReLU) and kept. The draw is a function of the seed, the row and
// the column (common/numerics/philox.h). Backward reads the gradient once: df sums over u, dg over
// t in tiles, in fp32, whose sums are added in order in double; on a CPU all sums are in double.
#pragma once

#include "common/numerics/philox.h"
#include "common/numerics/transducer.h"

// f: [B, T, H], g: [B, U, H]; f_len, g_len: int32 [B]; batch_offset: int64 [B], the ends of packed
// samples, or None. out: [B, T, U, H], packed [rows, H]. seed: one int64. mask: uint8 like out.
APEX_TE_FUNCTION(transducer_joint_fwd,
                 "f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, batch_offset: Tensor?, "
                 "seed: Tensor?, out: Tensor!, mask: Tensor!?, relu: bool, p: float")
// df and dg: the shapes of f and g. workspace: float32 [B, T/tile, U, H].
APEX_TE_FUNCTION(transducer_joint_bwd,
                 "grad: Tensor, mask: Tensor?, f_len: Tensor, g_len: Tensor, "
                 "batch_offset: Tensor?, df: Tensor!, dg: Tensor!, workspace: Tensor!, "
                 "scale: float")

namespace apex_te {

struct TransducerJoint {
  DType dtype;
  TransducerCells cells;
  int64_t cols;
  const void *f, *g, *grad;
  void *out, *df, *dg;
  uint8_t* mask;        // to be written
  const uint8_t* kept;  // to be read
  float* workspace;
  const uint32_t* seed_halves;
  Dropout dropout;
  bool relu;
  float scale;

  APEX_TE_HD uint64_t seed() const { return seed_halves[0] | uint64_t{seed_halves[1]} << 32; }
  int64_t tile;  // frames of one sum of the workspace

  APEX_TE_HD int64_t tiles() const { return (cells.frames + tile - 1) / tile; }
};

// 64, fewer where these would be few: apex_te/ops/transducer_joint.py has the same rule.
inline int64_t transducer_joint_tile(int64_t batch, int64_t frames, int64_t cols) {
  const auto sums = [&](int64_t tile) {
    return batch * ((frames + tile - 1) / tile) * ((cols + 127) / 128);
  };
  return sums(64) >= 500 ? 64 : sums(32) >= 250 ? 32 : 16;
}

// A tensor of the cells, and the shape that it must have.
inline void check_cell_rows(const TensorView& t, const TransducerJoint& p, bool packed) {
  if (packed)
    t.has_shape({p.cells.rows, p.cols}).is_dense();
  else
    t.has_shape({p.cells.batch, p.cells.frames, p.cells.places, p.cols}).is_dense();
}

// f and g, or their gradients.
inline TransducerJoint check_joint(const TensorView& f, const TensorView& g,
                                   const TensorView& cells, bool packed) {
  TransducerJoint p = {};
  f.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(3).is_dense();
  p.dtype = f.dtype();
  g.has_dtype({p.dtype}).has_ndim(3).is_dense();
  p.cols = f.size(2);
  p.cells.batch = f.size(0);
  p.cells.frames = f.size(1);
  p.cells.places = g.size(1);
  g.has_shape({p.cells.batch, p.cells.places, p.cols});
  cells.has_dtype({p.dtype}).has_ndim(packed ? 2 : 4);
  p.cells.rows = packed ? cells.size(0) : p.cells.batch * p.cells.frames * p.cells.places;
  check_cell_rows(cells, p, packed);
  return p;
}

inline TransducerJoint check_transducer_joint_fwd(Args& args) {
  const TensorView f = args.tensor(), g = args.tensor(), f_len = args.tensor();
  const TensorView g_len = args.tensor(), offset = args.optional_tensor();
  const TensorView seed = args.optional_tensor(), out = args.tensor();
  const TensorView mask = args.optional_tensor();
  const bool packed(offset);
  TransducerJoint p = check_joint(f, g, out, packed);
  p.cells = check_cells(f_len, g_len, offset, p.cells);
  p.f = f.data();
  p.g = g.data();
  p.out = out.data();
  if (mask) {
    mask.has_dtype({DType::kUInt8});
    check_cell_rows(mask, p, packed);
  }
  p.mask = mask.data<uint8_t>();
  p.relu = args.boolean();
  const double drop = args.floating();
  if (!(drop >= 0.0 && drop <= 1.0))
    fail(kApexTeValueError, "%s: p must be from 0 to 1, got %g", args.name(), drop);
  p.dropout = Dropout::of(drop);
  if (seed) seed.is_scalar(DType::kInt64);
  if (p.dropout.is_random && !seed)
    fail(kApexTeValueError, "%s: seed must be given for p = %g, got None", args.name(), drop);
  p.seed_halves = seed.data<uint32_t>();
  return p;
}

inline TransducerJoint check_transducer_joint_bwd(Args& args) {
  const TensorView grad = args.tensor(), mask = args.optional_tensor(), f_len = args.tensor();
  const TensorView g_len = args.tensor(), offset = args.optional_tensor(), df = args.tensor();
  const TensorView dg = args.tensor(), workspace = args.tensor();
  const bool packed(offset);
  grad.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  TransducerJoint p = check_joint(df, dg, grad, packed);
  p.cells = check_cells(f_len, g_len, offset, p.cells);
  if (mask) {
    mask.has_dtype({DType::kUInt8});
    check_cell_rows(mask, p, packed);
  }
  p.grad = grad.data();
  p.kept = mask.data<uint8_t>();
  p.df = df.data();
  p.dg = dg.data();
  p.tile = transducer_joint_tile(p.cells.batch, p.cells.frames, p.cols);
  workspace.has_dtype({DType::kFloat32});
  workspace.has_shape({p.cells.batch, p.tiles(), p.cells.places, p.cols}).is_dense();
  p.workspace = workspace.data<float>();
  p.scale = static_cast<float>(args.floating());
  return p;
}

constexpr float kTransducerFiller = -1.0f;

}  // namespace apex_te
