// block_quantize: FP8 with one scale for each block of 1 x 128 or 128 x 128 elements, and back.
//
// scale = fp8_max / amax of the block, q = satcast_rne(float(x) * scale); scale_inv = 1 / scale,
// infinite where the amax is, is what is stored; or, as inference engines do it, scale_inv = amax /
// fp8_max and q = satcast_rne(float(x) / scale_inv) (common/numerics/block_rule.h). The columnwise
// copy is the quantization of x transposed: with 1 x 128 blocks it has its own scales, over 128
// rows of x, or over blocks of 128 x 128; where the rowwise copy has these, it is that one
// transposed. Scales lie as
// common/numerics/block_scale.h has it; a block beyond the matrix counts as one of zeros: its
// scale_inv is 1. Copies may be padded (common/numerics/block_cast.h).
#pragma once

#include "common/numerics/block_cast.h"

APEX_TE_FUNCTION(block_quantize,
                 "x: T[r c], rowwise: F[block_lines(r block_rows) c]!?, "
                 "rowwise_scale_inv: f32[block_scales(r c block_rows)]!?rowwise, "
                 "columnwise: F[c r~16]!?, "
                 "columnwise_scale_inv: f32[block_scales(c r columnwise_block_rows)]!?columnwise, "
                 "amax: f32[^ 1]!!?, block_rows: int, columnwise_block_rows: int, eps: float, "
                 "scales: int")
APEX_TE_FUNCTION(block_dequantize,
                 "fp8_data: F[r c], scale_inv: f32[block_scales(r c block_rows)], out: T[r c]!, "
                 "block_rows: int")

namespace apex_te {

struct BlockQuantize : BlockCast {
  TensorView x;
};

inline BlockQuantize check_block_quantize(Args& args) {
  BlockQuantize p;
  p.x = args.tensor();
  p.x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  static_cast<BlockCast&>(p) = check_block_cast(args, p.x.dtype(), p.x.size(0), p.x.size(1));
  return p;
}

struct BlockDequantize {
  TensorView codes, out;
  const float* scale_inv;
  int64_t rows, cols, block_rows;
};

inline BlockDequantize check_block_dequantize(Args& args) {
  BlockDequantize p;
  p.codes = args.tensor();
  p.codes.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(2).is_dense();
  p.rows = p.codes.size(0);
  p.cols = p.codes.size(1);
  const TensorView scales = args.tensor();
  p.out = args.tensor();
  p.block_rows = check_block_rows(args);
  check_block_scales(scales, p.rows, p.cols, p.block_rows);
  p.scale_inv = scales.data<float>();
  p.out.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .has_shape({p.rows, p.cols})
      .is_dense();
  return p;
}

}  // namespace apex_te
