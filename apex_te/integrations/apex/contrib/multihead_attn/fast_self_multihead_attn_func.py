"""Self attention with both projections, without and with biases."""

from __future__ import annotations

from typing import Any

import torch

from apex_te.compatibility.apex import fast_multihead_attn as extension

from ._fast_function import FastFunction

__all__ = ["FastSelfAttnFunc", "fast_self_attn_func"]


class FastSelfAttnFunc(FastFunction):
    """Attention of [tokens, seqs, embed] to itself, in float32, float16 or bfloat16.

    ``apply`` takes the arguments of ``forward``, in order. Under autocast tensors are cast to its
    dtype.

    Args:
        use_time_mask: True for a mask [tokens, tokens], False for [seqs, tokens].
        is_training: False leaves out dropout.
        heads: number of heads; scores are divided by the root of a head's channels.
        inputs, input_weights, output_weights, input_biases, output_biases, dropout_prob: as in
            ``self_attn_func``. Give both biases or neither.
        pad_mask: nonzero hides a key, or with ``mask_additive`` it is added to the scores; None
            hides nothing.
        mask_additive: True requires biases and ``use_time_mask=False``.

    Raises:
        NotImplementedError: ``mask_additive`` with a mask and without biases.
        TypeError: the tensors have several dtypes.
        ValueError: a shape does not match, ``mask_additive`` with ``use_time_mask``, or the heads
            do not divide the channels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        use_time_mask: bool,
        is_training: bool,
        heads: int,
        inputs: torch.Tensor,
        input_weights: torch.Tensor,
        output_weights: torch.Tensor,
        input_biases: torch.Tensor | None,
        output_biases: torch.Tensor | None,
        pad_mask: torch.Tensor | None,
        mask_additive: bool,
        dropout_prob: float,
    ) -> torch.Tensor:
        ctx.heads, ctx.dropout_prob, ctx.has_biases = heads, dropout_prob, input_biases is not None
        tensors, run = [inputs, input_weights, output_weights], extension.self_attn_forward
        if input_biases is not None and output_biases is not None:
            tensors += [input_biases, output_biases]
            run = extension.self_attn_bias_forward
            if mask_additive:
                run = extension.self_attn_bias_additive_mask_forward
        elif mask_additive and pad_mask is not None:
            raise NotImplementedError(
                "FastSelfAttnFunc: mask_additive must be False without biases, got True; "
                "self_attn_func supports it"
            )
        masking = (pad_mask is not None, use_time_mask, is_training)
        *saved, out = run(*masking, heads, *tensors, pad_mask, dropout_prob)
        lin, softmax, dropped, kept, context = saved
        ctx.save_for_backward(context, dropped, softmax, lin, *tensors[:3], kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        run = extension.self_attn_bias_backward if ctx.has_biases else extension.self_attn_backward
        found = run(ctx.heads, *grads, *ctx.saved_tensors, ctx.dropout_prob)
        return None, None, None, *found, *[None] * (8 - len(found))


fast_self_attn_func = FastSelfAttnFunc.apply
