"""Attention of a decoder to an encoder as a module."""

from __future__ import annotations

import math

import torch

from ._base import AttentionBase
from ._base import jit_dropout_add as jit_dropout_add
from .encdec_multihead_attn_func import encdec_attn_func
from .fast_encdec_multihead_attn_func import fast_encdec_attn_func
from .fast_encdec_multihead_attn_norm_add_func import fast_encdec_attn_norm_add_func

__all__ = ["EncdecMultiheadAttn", "jit_dropout_add"]


class EncdecMultiheadAttn(AttentionBase):
    """Multi-head attention of queries [queries, seqs, embed_dim] to [keys, seqs, embed_dim].

    Args:
        embed_dim: channels of inputs and output.
        num_heads: number of heads, which divides ``embed_dim``.
        dropout: probability that an attention weight, and with ``include_norm_add`` an output
            element, is dropped in training.
        bias: add biases in all projections; needs ``impl="default"``.
        include_norm_add: normalise the query and add it to the output.
        impl: "fast" or "default"; both compute the same.

    Raises:
        ValueError: ``num_heads`` does not divide ``embed_dim``, ``impl`` is unknown, or ``bias`` is
            True with ``impl="fast"``.

    Source: apex.contrib.multihead_attn.
    """

    in_proj_weight_q: torch.nn.Parameter
    in_proj_weight_kv: torch.nn.Parameter
    in_proj_bias_q: torch.nn.Parameter | None
    in_proj_bias_kv: torch.nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        if bias and impl == "fast":
            raise ValueError(
                "EncdecMultiheadAttn: bias must be False with impl='fast', got True; "
                "impl='default' has biases"
            )
        self._weight("in_proj_weight_q", embed_dim, embed_dim)
        self._weight("in_proj_weight_kv", 2 * embed_dim, embed_dim)
        self._weight("out_proj_weight", embed_dim, embed_dim)
        self._weight("in_proj_bias_q", *([embed_dim] if bias else []))
        self._weight("in_proj_bias_kv", *([2 * embed_dim] if bias else []))
        self._weight("out_proj_bias", *([embed_dim] if bias else []))
        self._add_norm()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the weights, k and v each as a square matrix, and sets biases to 0."""
        super().reset_parameters()
        torch.nn.init.xavier_uniform_(self.in_proj_weight_q)
        # Xavier's bound for [2n, n] is smaller by sqrt(1.5) than for [n, n].
        torch.nn.init.xavier_uniform_(self.in_proj_weight_kv, gain=math.sqrt(1.5))
        torch.nn.init.xavier_uniform_(self.out_proj_weight)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[torch.Tensor, None]:
        """Returns (output [queries, seqs, embed_dim], None).

        Args:
            query: [queries, seqs, embed_dim], float32, float16 or bfloat16.
            key: [keys, seqs, embed_dim]; keys and values are projections of it.
            value: ignored.
            key_padding_mask: [seqs, keys]; nonzero hides a key.
            need_weights: ignored; no attention weights are returned.
            attn_mask: [queries, keys]; nonzero hides a key from a query.
            is_training: False leaves out dropout; the module's mode is ignored.

        Raises:
            ValueError: both masks are given.
        """
        mask = self._mask(key_padding_mask, attn_mask)
        weights = (self.in_proj_weight_q, self.in_proj_weight_kv, self.out_proj_weight)
        common = (attn_mask is not None, is_training, self.num_heads)
        if not self._is_fast(is_training):
            biases = (self.in_proj_bias_q, self.in_proj_bias_kv, self.out_proj_bias)
            out = self._normed(
                lambda x: encdec_attn_func(
                    *common, self.scaling, x, key, *weights, *biases, mask, self.dropout
                ),
                query, is_training,
            )  # fmt: skip
        elif self.include_norm_add:
            norm = (self.lyr_nrm_gamma_weights, self.lyr_nrm_beta_weights)
            out = fast_encdec_attn_norm_add_func(
                *common, query, key, *norm, *weights, mask, self.dropout
            )
        else:
            out = fast_encdec_attn_func(*common, query, key, *weights, mask, self.dropout)
        return out, None
