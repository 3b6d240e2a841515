"""Attention of a decoder's layer norm to an encoder, with dropout and the residual added."""

from __future__ import annotations

from typing import Any

import torch

from apex_te.compatibility.apex import fast_multihead_attn as extension

from ._fast_function import FastFunction

__all__ = ["FastEncdecAttnNormAddFunc", "fast_encdec_attn_norm_add_func"]


class FastEncdecAttnNormAddFunc(FastFunction):
    """inputs_q + dropout(attention of the layer norm of inputs_q to inputs_kv).

    Arguments, dtypes and errors are those of ``FastEncdecAttnFunc``, and for the norm:

    Args:
        lyr_nrm_gamma_weights, lyr_nrm_beta_weights: its weight and bias, [embed].
    """

    @staticmethod
    def forward(
        ctx: Any,
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs_q: torch.Tensor,
        inputs_kv: torch.Tensor,
        lyr_nrm_gamma_weights: torch.Tensor,
        lyr_nrm_beta_weights: torch.Tensor,
        input_weights_q: torch.Tensor,
        input_weights_kv: torch.Tensor,
        output_weights: torch.Tensor,
        pad_mask: torch.Tensor | None,
        dropout_prob: float,
    ) -> torch.Tensor:
        ctx.heads, ctx.dropout_prob = heads, dropout_prob
        tensors = (
            inputs_q, inputs_kv, lyr_nrm_gamma_weights, lyr_nrm_beta_weights, input_weights_q,
            input_weights_kv, output_weights,
        )  # fmt: skip
        *norm, q_lin, kv_lin, softmax, dropped, kept, context, kept_out, out = (
            extension.encdec_multihead_attn_norm_add_forward(
                pad_mask is not None, use_time_mask, is_training, heads, *tensors, pad_mask,
                dropout_prob,
            )
        )  # fmt: skip
        saved = (context, dropped, softmax, q_lin, kv_lin, *norm, *tensors, kept, kept_out)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found = extension.encdec_multihead_attn_norm_add_backward(
            ctx.heads, *grads, *ctx.saved_tensors, ctx.dropout_prob
        )
        return None, None, None, *found, None, None


fast_encdec_attn_norm_add_func = FastEncdecAttnNormAddFunc.apply
