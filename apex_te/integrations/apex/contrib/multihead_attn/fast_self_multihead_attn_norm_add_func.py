"""Self attention of a layer norm, with dropout and the residual added."""

from __future__ import annotations

from typing import Any

import torch

from apex_te.compatibility.apex import fast_multihead_attn as extension

from ._fast_function import FastFunction

__all__ = ["FastSelfAttnNormAddFunc", "fast_self_attn_norm_add_func"]


class FastSelfAttnNormAddFunc(FastFunction):
    """inputs + dropout(attention of the layer norm of inputs [tokens, seqs, embed]).

    Arguments, dtypes and errors are those of ``FastSelfAttnFunc``, and for the norm:

    Args:
        lyr_nrm_gamma_weights, lyr_nrm_beta_weights: its weight and bias, [embed].
    """

    @staticmethod
    def forward(
        ctx: Any,
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs: torch.Tensor,
        lyr_nrm_gamma_weights: torch.Tensor,
        lyr_nrm_beta_weights: torch.Tensor,
        input_weights: torch.Tensor,
        output_weights: torch.Tensor,
        pad_mask: torch.Tensor | None,
        dropout_prob: float,
    ) -> torch.Tensor:
        ctx.heads, ctx.dropout_prob = heads, dropout_prob
        affine = (lyr_nrm_gamma_weights, lyr_nrm_beta_weights)
        weights = (input_weights, output_weights)
        *norm, lin, softmax, dropped, kept, context, kept_out, out = (
            extension.self_attn_norm_add_forward(
                pad_mask is not None, use_time_mask, is_training, heads, inputs, *affine, *weights,
                pad_mask, dropout_prob,
            )
        )  # fmt: skip
        saved = (context, dropped, softmax, lin, *norm, inputs, *affine, *weights, kept, kept_out)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found = extension.self_attn_norm_add_backward(
            ctx.heads, *grads, *ctx.saved_tensors, ctx.dropout_prob
        )
        return None, None, None, *found, None, None


fast_self_attn_norm_add_func = FastSelfAttnNormAddFunc.apply
