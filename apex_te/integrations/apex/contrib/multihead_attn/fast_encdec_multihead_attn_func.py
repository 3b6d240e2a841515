"""Attention of a decoder to an encoder, with the projections."""

from __future__ import annotations

from typing import Any

import torch

from apex_te.compatibility.apex import fast_multihead_attn as extension

from ._fast_function import FastFunction

__all__ = ["FastEncdecAttnFunc", "fast_encdec_attn_func"]


class FastEncdecAttnFunc(FastFunction):
    """Attention of inputs_q [queries, seqs, embed] to inputs_kv [keys, seqs, embed].

    ``apply`` takes the arguments of ``forward``, in order. Under autocast tensors are cast to its
    dtype.

    Args:
        use_time_mask: True for a mask [queries, keys], False for [seqs, keys].
        is_training: False leaves out dropout.
        heads: number of heads; scores are divided by the root of a head's channels.
        inputs_q, inputs_kv, input_weights_q, input_weights_kv, output_weights, dropout_prob: as in
            ``EncdecAttnFunc.apply``.
        pad_mask: nonzero hides a key; None hides nothing.

    Raises:
        TypeError: the tensors have several dtypes.
        ValueError: a shape does not match, or the heads do not divide the channels.
    """

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
