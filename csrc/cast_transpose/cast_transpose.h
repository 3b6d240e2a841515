// cast_transpose: quantize a matrix to FP8 with a given scale, rowwise and columnwise, in one pass.
//
// q = satcast_rne(float(x) * scale). amax becomes max(amax, max |x|) with NaN above infinity;
// scale_inv is set to 1 / scale; dbias to the column sums of x. A non-zero noop flag leaves every
// output unwritten.
#pragma once

#include "common/numerics/column_sums.h"
#include "common/numerics/columnwise.h"
#include "common/numerics/fp8_formats.h"

// dbias adds 8 rows, two such sums, the 16 pairs of 256 rows (one line of the workspace), and the
// lines as common/numerics/column_sums.h does: in a fixed order, so that both devices give the same
// bits.
constexpr int64_t kCastTransposeTileRows = apex_te::kSumTileRows;
constexpr int64_t kCastTransposeRowsPerThread = apex_te::kSumThreadRows;

APEX_TE_FUNCTION(cast_transpose,
                 "x: T[r c], scale: f32[1], rowwise: F*[r c]!?, columnwise: F*[c r~16]!?, "
                 "amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, dbias: T[+ c]!?, "
                 "workspace: f32[r/256 c]!?dbias, noop: i32[1]?")
// Two casts of matrices that do not depend on each other, of which dbias is that of the first.
// Small bfloat16 ones take one launch.
APEX_TE_FUNCTION(cast_transpose_pair,
                 "x: T[r c], scale: f32[1], rowwise: F*[r c]!?, columnwise: F*[c r~16]!?, "
                 "amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, dbias: T[+ c]!?, "
                 "workspace: f32[r/256 c]!?dbias, other_x: S=T[s d], other_scale: f32[1], "
                 "other_rowwise: G=F*[s d]!?, other_columnwise: G=F*[d s~16]!?, "
                 "other_amax: f32[^ 1]!!?, other_scale_inv: f32[other_scale]!?")

namespace apex_te {

struct CastTranspose {
  TensorView x;
  int64_t rows, cols;
  DType fp8;  // kOther when only amax, scale_inv or dbias is wanted
  const float* scale;
  uint8_t *rowwise, *columnwise;
  int64_t ld;  // row length of columnwise, which may be padded
  float *amax, *scale_inv, *workspace;
  TensorView dbias;
  const int32_t* noop;
};

// The arguments of a cast up to scale_inv.
inline CastTranspose check_cast(Args& args) {
  CastTranspose p{};
  p.x = args.tensor();
  p.x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.rows = p.x.size(0);
  p.cols = p.x.size(1);
  p.scale = args.tensor().is_scalar(DType::kFloat32).data<float>();
  const TensorView rowwise = args.optional_tensor();
  const TensorView columnwise = args.optional_tensor();
  p.fp8 = rowwise ? rowwise.dtype() : columnwise ? columnwise.dtype() : DType::kOther;
  if (rowwise) rowwise.has_dtype(kFP8DTypes).has_shape({p.rows, p.cols}).is_dense();
  p.ld = columnwise ? check_columnwise(columnwise.has_dtype(kFP8DTypes), p.cols, p.rows) : p.rows;
  if (rowwise && columnwise) columnwise.has_dtype({p.fp8});
  p.rowwise = rowwise.data<uint8_t>();
  p.columnwise = columnwise.data<uint8_t>();
  const TensorView amax = args.optional_tensor();
  if (amax) amax.is_scalar(DType::kFloat32);
  p.amax = amax.data<float>();
  const TensorView scale_inv = args.optional_tensor();
  if (scale_inv) scale_inv.is_scalar(DType::kFloat32);
  p.scale_inv = scale_inv.data<float>();
  return p;
}

// The arguments of a cast up to workspace.
inline CastTranspose check_cast_with_dbias(Args& args) {
  CastTranspose p = check_cast(args);
  p.dbias = args.optional_tensor();
  const TensorView workspace = args.optional_tensor();
  if (p.dbias) {
    p.dbias.has_dtype({p.x.dtype()}).has_shape({p.cols}).is_dense();
    const int64_t tiles = (p.rows + kCastTransposeTileRows - 1) / kCastTransposeTileRows;
    if (!workspace)
      fail(kApexTeValueError, "%s: workspace must be given with dbias, got None", args.name());
    workspace.has_dtype({DType::kFloat32}).has_shape({tiles, p.cols}).is_dense();
  }
  p.workspace = workspace.data<float>();
  return p;
}

inline CastTranspose check_cast_transpose(Args& args) {
  CastTranspose p = check_cast_with_dbias(args);
  const TensorView noop = args.optional_tensor();
  if (noop) noop.is_scalar(DType::kInt32);
  p.noop = noop.data<int32_t>();
  return p;
}

}  // namespace apex_te
