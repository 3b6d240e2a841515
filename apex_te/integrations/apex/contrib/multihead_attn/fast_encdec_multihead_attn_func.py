"""Attention of a decoder to an encoder, with the projections."""

from __future__ import annotations

from typing import Any

import torch

from apex_te.compatibility.apex import fast_multihead_attn as extension

from ._fast_function import FastFunction

__all__ = ["FastEncdecAttnFunc", "fast_encdec_attn_func"]


class FastEncdecAttnFunc(FastFunction):
    """Attention of inputs_q [queries, seqs, embed] to inputs_kv [keys, seqs, embed]."""

    @staticmethod
    def forward(
        ctx: Any,
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs_q: torch.Tensor,
        inputs_kv: torch.Tensor,
        input_weights_q: torch.Tensor,
        input_weights_kv: torch.Tensor,
        output_weights: torch.Tensor,
        pad_mask: torch.Tensor | None,
        dropout_prob: float,
    ) -> torch.Tensor:
        ctx.heads, ctx.dropout_prob = heads, dropout_prob
        tensors = (inputs_q, inputs_kv, input_weights_q, input_weights_kv, output_weights)
        *lins, softmax, dropped, kept, context, out = extension.encdec_multihead_attn_forward(
            pad_mask is not None, use_time_mask, is_training, heads, *tensors, pad_mask,
            dropout_prob,
        )  # fmt: skip
        ctx.save_for_backward(context, dropped, softmax, *lins, *tensors, kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found = extension.encdec_multihead_attn_backward(
            ctx.heads, *grads, *ctx.saved_tensors, ctx.dropout_prob
        )
        return None, None, None, *found, None, None


fast_encdec_attn_func = FastEncdecAttnFunc.apply
