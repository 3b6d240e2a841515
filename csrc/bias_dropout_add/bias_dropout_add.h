// bias_dropout_add: out = residual + dropout(x + bias, p), in fp32 and rounded once, and its
// gradients: dx = dropout(dout) of the same mask, dbias the column sums of dx; residual's is dout.
//
// Dropping multiplies by 0, so a dropped NaN or infinity gives NaN, as in PyTorch's formula. The
// mask is a function of seed, row and column (common/numerics/philox.h). Backward computes it anew,
// or reads what forward has kept of it, on the CPU alone: bit i of a byte is element i of 8 that is
// kept.
#pragma once

#include "common/abi/op.h"
#include "common/numerics/philox.h"

// dbias adds 8 rows, the 8 sums of 64 rows (one line of the workspace), and the lines, each in
// order of rows: fixed, so that both devices give the same bits.
constexpr int64_t kBiasDropoutAddRowsPerThread = 8;
constexpr int64_t kBiasDropoutAddTileRows = 64;

// seed: one int64, or its two halves as int32 [2], the low one first.
APEX_TE_FUNCTION(bias_dropout_add_fwd,
                 "x: T[r c], bias: T|f32[c]?, residual: R=T|f32[r c], seed: Tensor?, out: R[r c]!, "
                 "mask: u8[r c/8]!?, p: float; whole c")
APEX_TE_FUNCTION(bias_dropout_add_bwd,
                 "dout: D=T[r c], seed: Tensor?, mask: u8[r c/8]?, dx: X=T[r c]!?, "
                 "dbias: B=T[+ c]!?, workspace: f32[r/64 c]!?dbias, p: float; whole c")

namespace apex_te {

struct BiasDropoutAdd {
  DType dtype, wide;  // of x and dx; of residual, out and dout
  DType bias_dtype;
  int64_t rows, cols;
  const void *x, *bias, *residual, *dout;
  void *out, *dx, *dbias;
  float* workspace;
  uint8_t* mask;        // to be written
  const uint8_t* kept;  // to be read
  const uint32_t* seed_halves;
  Dropout dropout;

  APEX_TE_HD uint64_t seed() const { return seed_halves[0] | uint64_t{seed_halves[1]} << 32; }
};

inline void check_seed(const TensorView& seed) {
  seed.has_dtype({DType::kInt64, DType::kInt32});
  if (seed.dtype() == DType::kInt64)
    seed.is_scalar(DType::kInt64);
  else
    seed.has_shape({2}).is_dense();
}

inline Dropout check_dropout(Args& args, const TensorView& seed, bool has_mask) {
  const double p = args.floating();
  if (!(p >= 0.0 && p <= 1.0))
    fail(kApexTeValueError, "%s: p must be from 0 to 1, got %g", args.name(), p);
  if (seed) check_seed(seed);
  const Dropout dropout = Dropout::of(p);
  if (dropout.is_random && !seed && !has_mask)
    fail(kApexTeValueError, "%s: seed must be given for p = %g, got None", args.name(), p);
  return dropout;
}

// residual, out and dout have the dtype of x, or float32.
inline void check_wide(const TensorView& t, DType dtype) {
  dtype == DType::kFloat32 ? t.has_dtype({dtype}) : t.has_dtype({dtype, DType::kFloat32});
}

inline uint8_t* check_mask(const TensorView& mask, const BiasDropoutAdd& p) {
  if (mask) mask.has_dtype({DType::kUInt8}).has_shape({p.rows, (p.cols + 7) / 8}).is_dense();
  return mask.data<uint8_t>();
}

inline BiasDropoutAdd check_bias_dropout_add_fwd(Args& args) {
  BiasDropoutAdd p = {};
  const TensorView x = args.tensor(), bias = args.optional_tensor(), residual = args.tensor();
  const TensorView seed = args.optional_tensor(), out = args.tensor();
  const TensorView mask = args.optional_tensor();
  p.dropout = check_dropout(args, seed, false);
  x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.dtype = x.dtype();
  p.rows = x.size(0);
  p.cols = x.size(1);
  if (bias) {
    check_wide(bias, p.dtype);
    bias.has_shape({p.cols}).is_dense();
    p.bias_dtype = bias.dtype();
  }
  check_wide(residual, p.dtype);
  residual.has_shape({p.rows, p.cols}).is_dense();
  p.wide = residual.dtype();
  out.has_dtype({p.wide}).has_shape({p.rows, p.cols}).is_dense();
  p.x = x.data();
  p.bias = bias.data();
  p.residual = residual.data();
  p.out = out.data();
  p.mask = check_mask(mask, p);
  p.seed_halves = seed.data<uint32_t>();
  return p;
}

inline BiasDropoutAdd check_bias_dropout_add_bwd(Args& args) {
  BiasDropoutAdd p = {};
  const TensorView dout = args.tensor(), seed = args.optional_tensor();
  const TensorView mask = args.optional_tensor(), dx = args.optional_tensor();
  const TensorView dbias = args.optional_tensor(), workspace = args.optional_tensor();
  p.dropout = check_dropout(args, seed, bool(mask));
  dout.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.wide = p.dtype = dout.dtype();
  p.rows = dout.size(0);
  p.cols = dout.size(1);
  if (dx) {
    p.dtype = dx.dtype();
    p.wide == DType::kFloat32 ? dx.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
                              : dx.has_dtype({p.wide});
    dx.has_shape({p.rows, p.cols}).is_dense();
  }
  if (dbias) {
    dbias.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
    dbias.has_shape({p.cols}).is_dense();
    p.bias_dtype = dbias.dtype();
    const int64_t tiles = (p.rows + kBiasDropoutAddTileRows - 1) / kBiasDropoutAddTileRows;
    if (!workspace)
      fail(kApexTeValueError, "%s: workspace must be given with dbias, got None", args.name());
    workspace.has_dtype({DType::kFloat32}).has_shape({tiles, p.cols}).is_dense();
    p.workspace = workspace.data<float>();
  }
  p.kept = check_mask(mask, p);
  p.dout = dout.data();
  p.dx = dx.data();
  p.dbias = dbias.data();
  p.seed_halves = seed.data<uint32_t>();
  return p;
}

}  // namespace apex_te
