"""Attention of a decoder to an encoder, of plain PyTorch functions."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from .self_multihead_attn_func import attend

__all__ = ["EncdecAttnFunc", "encdec_attn_func"]


def encdec_attn_func(
    use_time_mask: bool,
    is_training: bool,
    heads: int,
    scale: float,
    inputs_q: torch.Tensor,
    inputs_kv: torch.Tensor,
    input_weights_q: torch.Tensor,
    input_weights_kv: torch.Tensor,
    output_weights: torch.Tensor,
    input_biases_q: torch.Tensor | None,
    input_biases_kv: torch.Tensor | None,
    output_biases: torch.Tensor | None,
    mask: torch.Tensor | None,
    dropout_prob: float,
) -> torch.Tensor:
    """Computes attention of inputs_q [queries, seqs, embed] to inputs_kv; differentiable.

    Args:
        use_time_mask: True for a mask [queries, keys], False for [seqs, keys].
        is_training: False leaves out dropout.
        heads: number of heads.
        scale: factor of the scores.
        inputs_q: [queries, seqs, embed] in any floating-point dtype.
        inputs_kv: [keys, seqs, embed] in the same dtype.
        input_weights_q: [embed, embed], with rows ordered head, channel.
        input_weights_kv: [2 * embed, embed], with rows ordered head, (k, v), channel.
        output_weights: [embed, embed].
        input_biases_q: [embed], or None.
        input_biases_kv: [2 * embed], or None.
        output_biases: [embed], or None.
        mask: nonzero hides a key; None hides nothing.
        dropout_prob: dropout probability of attention weights.

    Returns:
        The output, [queries, seqs, embed].
    """
    lins = [
        linear(inputs_q, input_weights_q, input_biases_q),
        linear(inputs_kv, input_weights_kv, input_biases_kv),
    ]
    p = dropout_prob if is_training else 0.0
    context = attend(lins, (1, 2), heads, scale, mask, use_time_mask, False, p)
    return linear(context, output_weights, output_biases)


class EncdecAttnFunc:
    """Holder of ``encdec_attn_func`` as ``apply``."""

    apply = staticmethod(encdec_attn_func)
