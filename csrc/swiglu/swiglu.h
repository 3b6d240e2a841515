// swiglu: act(gate) * up and its gradients, in the inputs' dtype or straight to FP8.
//
//   out = act(gate) * up, dgate = grad_output * up * act'(gate), dup = grad_output * act(gate)
//
// With the activation kSwish gate is first clamped to at most `limit` and up to [-limit, limit],
// and `offset` is added to up; what was clamped has a gradient of 0. The other activations
// ignore limit, alpha and offset.
// The input is one [M, 2F] matrix, gate in its first F columns and up in its last, or two [M, F]
// matrices; rows are contiguous and may be apart. bias is added to it first: [2F], or [F] with an
// up_bias of [F]. The gradient to FP8 is that of the [M, 2F] matrix in either case.
// FP8: q = satcast_rne(y * scale) from the fp32 result y; amax becomes max(amax, max |y|) with NaN
// above infinity, scale_inv 1 / scale. The columnwise copy may be padded with zeros
// (common/numerics/columnwise.h). dbias is the column sums of the fp32 gradient, [2F].
// A held input is one [M, 2F] matrix in E4M3 with scales of blocks of 1 x 128, as block_quantize
// makes it; its values are rounded to bfloat16, and there are no biases.
#pragma once

#include "common/abi/op.h"
#include "common/activation/functions.h"
#include "common/numerics/block_scale.h"
#include "common/numerics/columnwise.h"

// Rows that one line of the workspace of dbias sums.
constexpr int64_t kSwigluTileRows = 64;

APEX_TE_FUNCTION(swiglu_fwd,
                 "input: T[r w], up: T[r w]?, bias: T[pair(w up up_bias)]?, "
                 "up_bias: T[gated(w up)]?, out: T[r gated(w up)]!, activation: int, "
                 "limit: float, alpha: float, offset: float")
APEX_TE_FUNCTION(swiglu_fwd_fp8,
                 "input: T[r w], up: T[r w]?, bias: T[pair(w up up_bias)]?, "
                 "up_bias: T[gated(w up)]?, scale: f32[1], rowwise: F[r gated(w up)]!?, "
                 "columnwise: F[gated(w up) r~16]!?, amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, "
                 "activation: int, limit: float, alpha: float, offset: float")
APEX_TE_FUNCTION(swiglu_bwd,
                 "grad_output: T[r gated(w up)], input: T[r w], up: T[r w]?, "
                 "bias: T[pair(w up up_bias)]?, up_bias: T[gated(w up)]?, "
                 "grad_input: T[r pair(w up grad_up)]!, grad_up: T[r gated(w up)]!?, "
                 "dbias: T[+ pair(w up)]!?, workspace: f32[r/64 pair(w up)]!?dbias, "
                 "activation: int, limit: float, alpha: float, offset: float")
APEX_TE_FUNCTION(swiglu_bwd_fp8,
                 "grad_output: T[r gated(w up)], input: T[r w], up: T[r w]?, "
                 "bias: T[pair(w up up_bias)]?, up_bias: T[gated(w up)]?, scale: f32[1], "
                 "rowwise: F[r pair(w up)]!?, columnwise: F[pair(w up) r~16]!?, "
                 "amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, dbias: T[+ pair(w up)]!?, "
                 "workspace: f32[r/64 pair(w up)]!?dbias, activation: int, limit: float, "
                 "alpha: float, offset: float")
APEX_TE_FUNCTION(swiglu_fwd_held_fp8,
                 "input: e4m3[r w], input_scale_inv: f32[w/128 r%4], scale: f32[1], "
                 "rowwise: F[r w/2]!?, columnwise: F[w/2 r~16]!?, amax: f32[^ 1]!!?, "
                 "scale_inv: f32[scale]!?, activation: int, limit: float, alpha: float, "
                 "offset: float")
APEX_TE_FUNCTION(swiglu_bwd_held_fp8,
                 "grad_output: bf16[r f], input: e4m3[r 2f], input_scale_inv: f32[2f/128 r%4], "
                 "scale: f32[1], rowwise: F[r 2f]!?, columnwise: F[2f r~16]!?, "
                 "amax: f32[^ 1]!!?, scale_inv: f32[scale]!?, dbias: bf16[+ 2f]!?, "
                 "workspace: f32[r/64 2f]!?dbias, activation: int, limit: float, alpha: float, "
                 "offset: float")
APEX_TE_IN_PLACE(swiglu_bwd_held_fp8, "rowwise: input")

namespace apex_te {

// Parameters of kSwish.
struct Clamp {
  float limit, alpha, offset;
};

// Clamps gate and up for kSwish and adds the offset; NaN stays.
template <Activation kAct>
APEX_TE_HD void clamp_halves(const Clamp& clamp, float* gate, float* up) {
  if (kAct != Activation::kSwish) return;
  *gate = *gate > clamp.limit ? clamp.limit : *gate;
  const float bounded = *up > clamp.limit ? clamp.limit : *up;
  *up = (bounded < -clamp.limit ? -clamp.limit : bounded) + clamp.offset;
}

// kFine: for results in float32.
template <Activation kAct, bool kFine = true>
APEX_TE_HD float gated(float gate, float up, const Clamp& clamp) {
  clamp_halves<kAct>(clamp, &gate, &up);
  return activate<kAct, kFine>(gate, nullptr, clamp.alpha) * up;
}

// Gradients of one gated element; *result receives the element where it is not null. dgate is 0
// where relu's derivative is, whatever the rest; grad counts as 0 for an input that was clamped.
template <Activation kAct, bool kFine = true>
APEX_TE_HD void gated_gradient(float gate, float up, float grad, const Clamp& clamp, float* dgate,
                               float* dup, float* result = nullptr) {
  constexpr bool kIsRelu = kAct == Activation::kRelu || kAct == Activation::kSquaredRelu;
  constexpr bool kClamps = kAct == Activation::kSwish;
  const float gate_grad = kClamps && gate > clamp.limit ? 0.0f : grad;
  const float up_grad = kClamps && fabsf(up) > clamp.limit ? 0.0f : grad;
  clamp_halves<kAct>(clamp, &gate, &up);
  float slope;
  const float value = activate<kAct, kFine>(gate, &slope, clamp.alpha);
  const float product = gate_grad * up * slope;
  if (result) *result = value * up;
  *dgate = kIsRelu && slope == 0.0f ? 0.0f : product;
  *dup = up_grad * value;
}

// Checked arguments; what a call does not have is null. Plain data, so kernels take it whole.
struct Swiglu {
  Activation activation;
  Clamp clamp;
  DType dtype;         // of inputs, biases, out, gradients and dbias
  int64_t rows, cols;  // M and F
  const void *gate, *up;
  int64_t gate_ld, up_ld;    // distances of rows, in elements
  const float* held_scales;  // [2 F / 128, held_ld] of gate and up in E4M3; null: they have dtype
  int64_t held_ld;
  const void *gate_bias, *up_bias;
  const void* grad_output;
  void* out;
  void *dgate, *dup;
  int64_t grad_ld;  // of dgate and dup
  DType fp8;        // kOther without FP8 outputs
  const float* scale;
  uint8_t *rowwise, *columnwise;
  int64_t columnwise_ld;  // length of its rows: `rows` or more
  float *amax, *scale_inv;
  void* dbias;
  float* workspace;
};

// The matrix's rows must be contiguous; returns their distance in elements.
inline int64_t row_distance(const TensorView& x) {
  if (x.numel() && x.size(1) > 1 && x.stride(1) != 1) {
    const int64_t strides[2] = {x.stride(0), x.stride(1)};
    char actual[96] = "strides ";
    format_shape(actual + 8, sizeof(actual) - 8, strides, 2);
    x.refuse(kApexTeValueError, "have contiguous rows", actual);
  }
  return x.size(0) > 1 ? x.stride(0) : x.size(1);
}

// Begin of the second half of a row.
inline void* second_half(const void* first, int64_t half, DType dtype) {
  const int64_t bytes = dtype == DType::kFloat32 ? 4 : 2;
  return first ? static_cast<char*>(const_cast<void*>(first)) + half * bytes : nullptr;
}

// Columns of gate in a matrix [M, 2F].
inline int64_t half_of_columns(const TensorView& input) {
  if (input.size(1) % 2) {
    char actual[96];
    const int64_t shape[2] = {input.size(0), input.size(1)};
    format_shape(actual, sizeof(actual), shape, 2);
    input.refuse(kApexTeValueError, "have an even number of columns without up", actual);
  }
  return input.size(1) / 2;
}

inline void check_swiglu_input(Args& args, Swiglu& p) {
  const TensorView input = args.tensor();
  const TensorView up = args.optional_tensor();
  input.has_dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16}).has_ndim(2);
  p.dtype = input.dtype();
  p.rows = input.size(0);
  p.gate = input.data<void>();
  p.gate_ld = row_distance(input);
  if (up) {
    p.cols = input.size(1);
    p.up = up.has_dtype({p.dtype}).has_shape({p.rows, p.cols}).data<void>();
    p.up_ld = row_distance(up);
  } else {
    p.cols = half_of_columns(input);
    p.up = second_half(p.gate, p.cols, p.dtype);
    p.up_ld = p.gate_ld;
  }
  const TensorView bias = args.optional_tensor();
  const TensorView up_bias = args.optional_tensor();
  if (up_bias) {
    if (!bias)
      fail(kApexTeValueError, "%s: bias must be given with up_bias, got None", args.name());
    up_bias.has_dtype({p.dtype}).has_shape({p.cols}).is_dense();
  }
  if (bias) bias.has_dtype({p.dtype}).has_shape({up_bias ? p.cols : 2 * p.cols}).is_dense();
  p.gate_bias = bias.data<void>();
  p.up_bias = up_bias ? up_bias.data<void>() : second_half(p.gate_bias, p.cols, p.dtype);
}

inline void check_held_input(Args& args, Swiglu& p) {
  const TensorView input = args.tensor(), scale_inv = args.tensor();
  input.has_dtype({DType::kE4M3}).has_ndim(2).is_dense();
  p.dtype = DType::kBFloat16;
  p.rows = input.size(0);
  p.gate_ld = p.up_ld = input.size(1);
  p.cols = half_of_columns(input);
  p.gate = input.data<void>();
  p.up = input.data<uint8_t>() ? input.data<uint8_t>() + p.cols : nullptr;
  p.held_ld = padded_to_4(p.rows);
  scale_inv.has_dtype({DType::kFloat32}).has_shape({num_blocks(2 * p.cols), p.held_ld});
  p.held_scales = scale_inv.is_dense().data<float>();
}

// rows x cols: the shape of the FP8 result.
inline void check_swiglu_fp8(Args& args, Swiglu& p, int64_t rows, int64_t cols) {
  p.scale = args.tensor().is_scalar(DType::kFloat32).data<float>();
  const TensorView rowwise = args.optional_tensor();
  const TensorView columnwise = args.optional_tensor();
  p.fp8 = rowwise ? rowwise.dtype() : columnwise ? columnwise.dtype() : DType::kE4M3;
  if (rowwise) rowwise.has_dtype({DType::kE4M3, DType::kE5M2}).has_shape({rows, cols}).is_dense();
  if (columnwise) {
    columnwise.has_dtype({DType::kE4M3, DType::kE5M2});
    p.columnwise_ld = check_columnwise(columnwise, cols, rows);
  }
  if (rowwise && columnwise) columnwise.has_dtype({p.fp8});
  p.rowwise = rowwise.data<uint8_t>();
  p.columnwise = columnwise.data<uint8_t>();
  const TensorView amax = args.optional_tensor();
  if (amax) amax.is_scalar(DType::kFloat32);
  p.amax = amax.data<float>();
  const TensorView scale_inv = args.optional_tensor();
  if (scale_inv) scale_inv.is_scalar(DType::kFloat32);
  p.scale_inv = scale_inv.data<float>();
}

inline void check_swiglu_dbias(Args& args, Swiglu& p) {
  const TensorView dbias = args.optional_tensor();
  const TensorView workspace = args.optional_tensor();
  if (!dbias) return;
  p.dbias = dbias.has_dtype({p.dtype}).has_shape({2 * p.cols}).is_dense().data<void>();
  if (!workspace)
    fail(kApexTeValueError, "%s: workspace must be given with dbias, got None", args.name());
  const int64_t tiles = (p.rows + kSwigluTileRows - 1) / kSwigluTileRows;
  workspace.has_dtype({DType::kFloat32}).has_shape({tiles, 2 * p.cols}).is_dense();
  p.workspace = workspace.data<float>();
}

inline Activation check_gated_activation(Args& args, Clamp& clamp) {
  const int64_t value = args.integer();
  const auto activation = static_cast<Activation>(value);
  clamp.limit = static_cast<float>(args.floating());
  clamp.alpha = static_cast<float>(args.floating());
  clamp.offset = static_cast<float>(args.floating());
  switch (activation) {
    case Activation::kSilu:
    case Activation::kGelu:
    case Activation::kGeluErf:
    case Activation::kRelu:
    case Activation::kSquaredRelu:
    case Activation::kSigmoid:
    case Activation::kSwish:
      return activation;
    default:
      fail(kApexTeValueError, "%s: activation must be 0, 1 or 3 to 7, got %lld", args.name(),
           static_cast<long long>(value));
  }
}
inline void check_swiglu_activation(Args& args, Swiglu& p) {
  p.activation = check_gated_activation(args, p.clamp);
}

inline Swiglu check_swiglu_fwd(Args& args, bool to_fp8, bool is_held = false) {
  Swiglu p = {};
  p.fp8 = DType::kOther;
  is_held ? check_held_input(args, p) : check_swiglu_input(args, p);
  if (to_fp8)
    check_swiglu_fp8(args, p, p.rows, p.cols);
  else
    p.out = args.tensor().has_dtype({p.dtype}).has_shape({p.rows, p.cols}).is_dense().data<void>();
  check_swiglu_activation(args, p);
  return p;
}

inline Swiglu check_swiglu_bwd(Args& args, bool to_fp8, bool is_held = false) {
  Swiglu p = {};
  p.fp8 = DType::kOther;
  const TensorView grad_output = args.tensor();
  is_held ? check_held_input(args, p) : check_swiglu_input(args, p);
  grad_output.has_dtype({p.dtype}).has_shape({p.rows, p.cols}).is_dense();
  p.grad_output = grad_output.data<void>();
  if (to_fp8) {
    check_swiglu_fp8(args, p, p.rows, 2 * p.cols);
  } else {
    const TensorView grad_input = args.tensor();
    const TensorView grad_up = args.optional_tensor();
    p.grad_ld = grad_up ? p.cols : 2 * p.cols;
    grad_input.has_dtype({p.dtype}).has_shape({p.rows, p.grad_ld}).is_dense();
    if (grad_up) grad_up.has_dtype({p.dtype}).has_shape({p.rows, p.cols}).is_dense();
    p.dgate = grad_input.data<void>();
    p.dup = grad_up ? grad_up.data<void>() : second_half(p.dgate, p.cols, p.dtype);
  }
  check_swiglu_dbias(args, p);
  check_swiglu_activation(args, p);
  return p;
}

}  // namespace apex_te
