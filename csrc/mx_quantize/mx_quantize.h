// mx_quantize: MXFP8 (OCP MX v1.0): FP8 with one E8M0 power-of-two scale for 32 elements, and back.
//
// A block's scale code e stands for 2^(e - 127), 0xFF for NaN; q = satcast_rne(float(x) *
// 2^(127 - e)). Scales lie plainly: of codes [rows, cols] with blocks along cols,
// [rows, ceil(cols / 32)]. The columnwise copy is the quantization of x transposed, from high
// precision: codes [cols, rows], which may be padded (common/numerics/columnwise.h), scales
// [cols, ceil(rows / 32)]. A last block may be short.
#pragma once

#include "common/numerics/codec.h"
#include "common/numerics/columnwise.h"

APEX_TE_FUNCTION(mx_quantize,
                 "x: T[r c], rowwise: F[r c]!?, rowwise_scale: e8m0[r c/32]!?rowwise, "
                 "columnwise: F[c r~16]!?, columnwise_scale: e8m0[c r/32]!?columnwise, "
                 "use_floor: bool")
APEX_TE_FUNCTION(mx_dequantize, "fp8_data: F[r c], scale: e8m0[r c/32], out: T[r c]!")

namespace apex_te {

constexpr int64_t kMxBlock = 32;

inline int64_t mx_blocks(int64_t n) { return (n + kMxBlock - 1) / kMxBlock; }

// Bits of amax of a block to its scale code. A zero block gives 0, infinity 0xFE, NaN 0xFF.
//
// Round-up: the power of two at or above amax / fp8_max, so that nothing saturates; subnormal
// quotients up to half the smallest normal give 0. Floor (OCP section 6.3): that of amax's
// exponent less the format's largest one.
template <typename Format>
APEX_TE_HD uint32_t mx_scale_code(uint32_t amax, bool use_floor) {
  constexpr uint32_t kLargestExponent = (Format::kMaxBits >> 23) - 127u;
  if (amax >= 0x7F800000u) return amax == 0x7F800000u ? 0xFEu : 0xFFu;
  const uint32_t exponent = amax >> 23;
  if (use_floor) return exponent > kLargestExponent ? exponent - kLargestExponent : 0u;
  const uint32_t ratio = float_bits(bits_float(amax) * (1.0f / Format::kMax));
  // Adding all but the lowest mantissa bit carries when any is set; the quotient has fp32's
  // subnormals at exponent 0, which round up only above 2^-127.
  const uint32_t up = (ratio + 0x007FFFFFu) >> 23;
  return ratio <= 0x00400000u ? 0u : up;
}

// 2^(127 - e), exact (e = 254 gives a subnormal); NaN for 0xFF.
APEX_TE_HD float mx_multiplier(uint32_t code) {
  const uint32_t bits = code == 0xFEu ? 0x00400000u : (254u - code) << 23;
  return bits_float(code == 0xFFu ? 0x7FC00000u : bits);
}
// 2^(e - 127), exact (e = 0 gives a subnormal); NaN for 0xFF.
APEX_TE_HD float mx_scale_value(uint32_t code) {
  const uint32_t bits = code == 0u ? 0x00400000u : code << 23;
  return bits_float(code == 0xFFu ? 0x7FC00000u : bits);
}

struct MxQuantize {
  TensorView x;
  int64_t rows, cols;
  DType fp8;
  uint8_t *rowwise, *rowwise_scale, *columnwise, *columnwise_scale;
  int64_t columnwise_ld;  // row length of columnwise
  bool use_floor;
};

inline void check_mx_scale(const TensorView& scale, int64_t rows, int64_t cols) {
  scale.has_dtype({DType::kE8M0}).has_shape({rows, mx_blocks(cols)}).is_dense();
}

inline MxQuantize check_mx_quantize(Args& args) {
  MxQuantize p;
  p.x = args.tensor();
  p.x.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2).is_dense();
  p.rows = p.x.size(0);
  p.cols = p.x.size(1);
  const TensorView rowwise = args.optional_tensor();
  const TensorView rowwise_scale = args.optional_tensor();
  const TensorView columnwise = args.optional_tensor();
  const TensorView columnwise_scale = args.optional_tensor();
  p.use_floor = args.boolean();
  if (!rowwise != !rowwise_scale || !columnwise != !columnwise_scale)
    fail(kApexTeValueError, "%s: each of rowwise and columnwise must be given with its scale",
         args.name());
  p.fp8 = rowwise ? rowwise.dtype() : columnwise ? columnwise.dtype() : DType::kOther;
  p.columnwise_ld = p.rows;
  if (rowwise) {
    rowwise.has_dtype({DType::kE4M3, DType::kE5M2}).has_shape({p.rows, p.cols}).is_dense();
    check_mx_scale(rowwise_scale, p.rows, p.cols);
  }
  if (columnwise) {
    columnwise.has_dtype({DType::kE4M3, DType::kE5M2});
    p.columnwise_ld = check_columnwise(columnwise, p.cols, p.rows);
    check_mx_scale(columnwise_scale, p.cols, p.rows);
  }
  if (rowwise && columnwise) columnwise.has_dtype({p.fp8});
  p.rowwise = rowwise.data<uint8_t>();
  p.rowwise_scale = rowwise_scale.data<uint8_t>();
  p.columnwise = columnwise.data<uint8_t>();
  p.columnwise_scale = columnwise_scale.data<uint8_t>();
  return p;
}

struct MxDequantize {
  TensorView codes, out;
  const uint8_t* scale;
  int64_t rows, cols;
};

inline MxDequantize check_mx_dequantize(Args& args) {
  MxDequantize p;
  p.codes = args.tensor();
  p.codes.has_dtype({DType::kE4M3, DType::kE5M2}).has_ndim(2).is_dense();
  p.rows = p.codes.size(0);
  p.cols = p.codes.size(1);
  const TensorView scale = args.tensor();
  check_mx_scale(scale, p.rows, p.cols);
  p.scale = scale.data<uint8_t>();
  p.out = args.tensor();
  p.out.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .has_shape({p.rows, p.cols})
      .is_dense();
  return p;
}

}  // namespace apex_te
