"""Self attention of plain PyTorch functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import dropout, linear, scaled_dot_product_attention

__all__ = ["SelfAttnFunc", "attend", "self_attn_func"]


def self_attn_func(
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    scale: float,
    inputs: torch.Tensor,
    input_weights: torch.Tensor,
    output_weights: torch.Tensor,
    input_biases: torch.Tensor | None,
    output_biases: torch.Tensor | None,
    mask: torch.Tensor | None,
    is_additive_mask: bool,
    dropout_prob: float,
) -> torch.Tensor:
    """Computes attention of inputs [tokens, seqs, embed] to itself; differentiable.

    Args:
        use_time_mask: True for a mask [tokens, tokens], False for [seqs, tokens].
        is_training: False leaves out dropout.
        heads: number of heads.
        scale: factor of the scores.
        inputs: [tokens, seqs, embed] in any floating-point dtype.
        input_weights: [3 * embed, embed], with rows ordered head, (q, k, v), channel.
        output_weights: [embed, embed].
        input_biases: [3 * embed], or None.
        output_biases: [embed], or None.
        mask: nonzero hides a key; None hides nothing.
        is_additive_mask: the mask is added to the scores instead.
        dropout_prob: dropout probability of attention weights.

    Returns:
        The output, [tokens, seqs, embed].
    """
    lin = linear(inputs, input_weights, input_biases)
    context = attend(
        [lin], (3,), heads, scale, mask, use_time_mask, is_additive_mask,
        dropout_prob if is_training else 0.0,
    )  # fmt: skip
    return linear(context, output_weights, output_biases)


def attend(
    lins: Sequence[torch.Tensor],
    parts: Sequence[int],
    heads: int,
    scale: float,
    mask: torch.Tensor | None,
    over_time: bool,
    is_additive: bool,
    dropout_prob: float,
) -> torch.Tensor:
    """Returns the context [queries, seqs, embed] of projected queries, keys and values.

    Args:
        lins: projections [tokens, seqs, n * embed], with columns ordered head, part, channel.
        parts: n of each projection; the parts are q, k and v: ``(3,)``, or ``(1, 2)`` for q and kv.
        heads, scale: as in ``self_attn_func``.
        mask: as in ``self_attn_func``, [queries, keys] or [seqs, keys].
        over_time: True for a mask [queries, keys].
        is_additive: the mask is added to the scores instead of hiding where it is nonzero.
        dropout_prob: dropout probability of attention weights; 0 outside of training.
    """
    views = []
    for lin, n in zip(lins, parts, strict=True):
        split = lin.view(*lin.shape[:2], heads, n, -1).permute(3, 1, 2, 0, 4)
        views += [*split]  # [seqs, heads, tokens, channels] each
    q, k, v = views
    if mask is not None:
        mask = mask[None, None] if over_time else mask[:, None, None]
        mask = mask.to(q.dtype if is_additive else torch.bool)
    if not torch.is_grad_enabled() and not dropout_prob:
        if mask is not None and not is_additive:
            mask = ~mask
        context = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        # Scale and sum belong to the matmul: float16 does not overflow, and rounds once.
        start, beta = q.new_zeros(()), 0
        if mask is not None and is_additive:
            start, beta = mask.expand(*q.shape[:3], -1).flatten(0, 1), 1
        batches = (q.flatten(0, 1), k.flatten(0, 1).mT)
        scores = torch.baddbmm(start, *batches, beta=beta, alpha=scale)
        scores = scores.unflatten(0, q.shape[:2])
        if mask is not None and not is_additive:
            scores = scores.masked_fill(mask, -torch.inf)
        context = dropout(torch.softmax(scores, -1), dropout_prob) @ v
    return context.permute(2, 0, 1, 3).flatten(2)


class SelfAttnFunc:
    """Holder of ``self_attn_func`` as ``apply``."""

    apply = staticmethod(self_attn_func)
