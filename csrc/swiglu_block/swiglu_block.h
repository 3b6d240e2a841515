// swiglu_block: act(gate) * up and its gradients in FP8 blocks of 1 x 128; forward's columnwise
// copy may have blocks of 128 x 128.
//
// The results are block_quantize's casts of the results of swiglu_fwd and swiglu_bwd, rounded to
// the inputs' 16-bit dtype, which is not written to memory. Of the gradient F is a multiple of 128,
// so that no block has elements of both halves. The functions named "held" take a held input
// (swiglu/swiglu.h).
#pragma once

#include "common/numerics/block_cast.h"
#include "swiglu/swiglu.h"

APEX_TE_FUNCTION(
    swiglu_fwd_block,
    "input: T=H[r w], up: T[r w]?, bias: T[pair(w up up_bias)]?, "
    "up_bias: T[gated(w up)]?, rowwise: F[r~4 gated(w up)]!?, "
    "rowwise_scale_inv: f32[gated(w up)/128 r%4]!?rowwise, "
    "columnwise: F[gated(w up) r~16]!?, "
    "columnwise_scale_inv: f32[gated_scales(w up r columnwise_block_rows)]!?columnwise, "
    "amax: f32[^ 1]!!?, columnwise_block_rows: int, eps: float, scales: int, "
    "activation: int, limit: float, alpha: float, offset: float")
APEX_TE_FUNCTION(swiglu_bwd_block,
                 "grad_output: T=H[r gated(w up)], input: T[r w], up: T[r w]?, "
                 "bias: T[pair(w up up_bias)]?, up_bias: T[gated(w up)]?, "
                 "rowwise: F[r~4 pair(w up)]!?, "
                 "rowwise_scale_inv: f32[pair(w up)/128 r%4]!?rowwise, "
                 "columnwise: F[pair(w up) r~16]!?, "
                 "columnwise_scale_inv: f32[r/128 pair(w up)%4]!?columnwise, amax: f32[^ 1]!!?, "
                 "eps: float, scales: int, activation: int, limit: float, alpha: float, "
                 "offset: float")
APEX_TE_FUNCTION(
    swiglu_fwd_held_block,
    "input: e4m3[r w], input_scale_inv: f32[w/128 r%4], rowwise: F[r~4 w/2]!?, "
    "rowwise_scale_inv: f32[w/256 r%4]!?rowwise, columnwise: F[w/2 r~16]!?, "
    "columnwise_scale_inv: f32[half_scales(w r columnwise_block_rows)]!?columnwise, "
    "amax: f32[^ 1]!!?, columnwise_block_rows: int, eps: float, scales: int, activation: int, "
    "limit: float, alpha: float, offset: float")
APEX_TE_FUNCTION(swiglu_bwd_held_block,
                 "grad_output: bf16[r f], input: e4m3[r 2f], input_scale_inv: f32[2f/128 r%4], "
                 "rowwise: F[r~4 2f]!?, rowwise_scale_inv: f32[2f/128 r%4]!?rowwise, "
                 "columnwise: F[2f r~16]!?, columnwise_scale_inv: f32[r/128 2f%4]!?columnwise, "
                 "amax: f32[^ 1]!!?, eps: float, scales: int, activation: int, limit: float, "
                 "alpha: float, offset: float")
APEX_TE_IN_PLACE(swiglu_bwd_held_block, "rowwise: input")

namespace apex_te {

struct SwigluBlock {
  Swiglu op;
  BlockCast cast;
};

inline SwigluBlock check_swiglu_block(Args& args, bool is_bwd, bool is_held = false) {
  SwigluBlock p = {};
  Swiglu& op = p.op;
  TensorView grad_output;
  if (is_bwd) grad_output = args.tensor();
  is_held ? check_held_input(args, op) : check_swiglu_input(args, op);
  if (op.dtype == DType::kFloat32)
    fail(kApexTeTypeError, "%s: input must be float16 or bfloat16, got float32", args.name());
  if (is_bwd) {
    if (op.cols % kBlock)
      fail(kApexTeValueError, "%s: up must have a multiple of 128 columns, got %lld", args.name(),
           static_cast<long long>(op.cols));
    grad_output.has_dtype({op.dtype}).has_shape({op.rows, op.cols}).is_dense();
    op.grad_output = grad_output.data<void>();
  }
  p.cast = check_block_cast(args, op.dtype, op.rows, (is_bwd ? 2 : 1) * op.cols,
                            is_bwd ? BlockArguments::kNone : BlockArguments::kColumnwise);
  op.fp8 = p.cast.fp8;
  if (is_held && p.cast.rule.divides)
    fail(kApexTeValueError, "%s: scales must be 0 or 1, got 2", args.name());
  check_swiglu_activation(args, op);
  return p;
}

}  // namespace apex_te
