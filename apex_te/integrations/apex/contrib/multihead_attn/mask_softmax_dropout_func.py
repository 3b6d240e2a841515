"""Masked softmax and dropout of attention scores."""

from __future__ import annotations

from typing import Any

import torch

from apex_te.compatibility.apex import fast_multihead_attn as extension

__all__ = ["MaskSoftmaxDropout", "fast_mask_softmax_dropout_func"]


class MaskSoftmaxDropout(torch.autograd.Function):
    """dropout(softmax(inputs)) of scores [seqs * heads, queries, keys].

    ``pad_mask`` is [seqs, keys], or None: nonzero hides a key, or with ``mask_additive`` it is
    added to the scores.
    """

    @staticmethod
    def forward(
        ctx: Any,
        is_training: bool,
        heads: int,
        inputs: torch.Tensor,
        pad_mask: torch.Tensor | None,
        mask_additive: bool,
        dropout_prob: float,
    ) -> torch.Tensor:
        run = extension.mask_softmax_dropout_forward
        if mask_additive:
            run = extension.additive_mask_softmax_dropout_forward
        dropped, kept, softmax = run(
            pad_mask is not None, is_training, heads, inputs, pad_mask, dropout_prob
        )
        ctx.save_for_backward(softmax, kept)
        ctx.heads, ctx.dropout_prob = heads, dropout_prob
        return dropped

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        softmax, kept = ctx.saved_tensors
        found = extension.mask_softmax_dropout_backward(
            False, ctx.heads, *grads, softmax, kept, None, ctx.dropout_prob
        )
        return None, None, found, None, None, None


fast_mask_softmax_dropout_func = MaskSoftmaxDropout.apply
