"""Attention of packed sequences, by ``apex_te.DotProductAttention``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from apex_te.module.attention.dot_product import DotProductAttention

__all__ = ["FMHA", "FMHAFun"]


class FMHAFun:
    """Holder of the attention function as ``apply``; it is differentiable."""

    @staticmethod
    def apply(
        qkv: torch.Tensor,
        cu_seqlens: torch.Tensor,
        p_dropout: float,
        max_s: int,
        is_training: bool,
        zero_tensors: bool = False,
    ) -> torch.Tensor:
        """Computes attention of each sequence to itself; returns [tokens, heads, channels].

        Args:
            qkv: [tokens, 3, heads, channels], float32, float16 or bfloat16.
            cu_seqlens: int32 [n + 1], where the n sequences begin and end.
            p_dropout: dropout probability of attention weights.
            max_s: upper bound of the sequence lengths.
            is_training: False disables dropout.
            zero_tensors: ignored.
        """
        heads, channels = qkv.shape[2:]
        attention = _attention(heads, channels, float(p_dropout) if is_training else 0.0)
        q, k, v = qkv.unbind(1)
        out = attention(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
                        max_seqlen_q=max_s, max_seqlen_kv=max_s)  # fmt: skip
        return out.view(-1, heads, channels)


@functools.cache
def _attention(heads: int, channels: int, p_dropout: float) -> DotProductAttention:
    return DotProductAttention(
        heads, channels, attention_dropout=p_dropout, qkv_format="thd", attn_mask_type="padding"
    )


class FMHA(torch.nn.Module):
    """Attention of packed sequences as a module without parameters.

    Args:
        config: object with ``attention_probs_dropout_prob``, ``num_attention_heads`` and
            ``hidden_size``, as BERT's configurations have.

    Raises:
        ValueError: the heads do not divide the hidden size.

    Source: apex.contrib.fmha, which takes 64 channels a head and float16 alone.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.p_dropout = config.attention_probs_dropout_prob
        self.h, self.hidden_size = config.num_attention_heads, config.hidden_size
        self.d, rest = divmod(self.hidden_size, self.h)
        if rest:
            raise ValueError(
                "FMHA: config.hidden_size must be divisible by config.num_attention_heads, "
                f"got {self.hidden_size} and {self.h}"
            )

    def forward(
        self,
        qkv: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_s: int,
        is_training: bool = True,
        zero_tensors: bool = False,
    ) -> torch.Tensor:
        """Returns attention [tokens, hidden_size] of packed sequences, each to itself.

        Args:
            qkv: [tokens, 3 * hidden_size], with columns ordered (q, k, v), head, channel.
            cu_seqlens, max_s, is_training, zero_tensors: as in ``FMHAFun.apply``. ``is_training``,
                not the module's mode, turns dropout on.
        """
        out = FMHAFun.apply(
            qkv.view(-1, 3, self.h, self.d), cu_seqlens, self.p_dropout, max_s, is_training,
            zero_tensors,
        )  # fmt: skip
        return out.reshape(-1, self.hidden_size)
