"""Self attention as a module."""

from __future__ import annotations

import math
from typing import Any

import torch

from ._base import AttentionBase
from ._base import jit_dropout_add as jit_dropout_add
from .fast_self_multihead_attn_func import fast_self_attn_func
from .fast_self_multihead_attn_norm_add_func import fast_self_attn_norm_add_func
from .self_multihead_attn_func import self_attn_func

__all__ = ["SelfMultiheadAttn", "jit_dropout_add"]


class SelfMultiheadAttn(AttentionBase):
    """Multi-head self attention of [tokens, seqs, embed_dim].

    Args:
        embed_dim: channels of input and output.
        num_heads: number of heads, which divides ``embed_dim``.
        dropout: probability that an attention weight, and with ``include_norm_add`` an output
            element, is dropped in training.
        bias: add biases in both projections.
        include_norm_add: normalise the input and add it to the output.
        impl: "fast" or "default"; both compute the same.
        separate_qkv_params: weights and biases ``q_weight``, ``k_weight``, ``v_weight`` instead of
            ``in_proj_weight`` [3 * embed_dim, embed_dim], whose rows are ordered head, (q, k, v),
            channel.
        mask_additive: ``key_padding_mask`` is added to the scores.

    Raises:
        ValueError: ``num_heads`` does not divide ``embed_dim``, ``impl`` is unknown, or options
            exclude each other: as in apex, the fast norm-add does not support biases, and an
            additive mask needs biases or ``impl="default"``, without norm-add.

    Source: apex.contrib.multihead_attn.
    """

    in_proj_weight: torch.nn.Parameter
    q_weight: torch.nn.Parameter
    k_weight: torch.nn.Parameter
    v_weight: torch.nn.Parameter

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
        separate_qkv_params: bool = False,
        mask_additive: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        if mask_additive and (include_norm_add or (impl == "fast" and not bias)):
            raise ValueError(
                "SelfMultiheadAttn: mask_additive must be False with include_norm_add, or with "
                "impl='fast' without bias, got True"
            )
        if bias and include_norm_add and impl == "fast":
            raise ValueError(
                "SelfMultiheadAttn: bias must be False with include_norm_add and impl='fast', "
                "got True; impl='default' has biases"
            )
        self.separate_qkv_params, self.mask_additive = separate_qkv_params, mask_additive
        parts = ("q", "k", "v") if separate_qkv_params else ("in_proj",)
        for part in parts:
            self._weight(f"{part}_weight", 3 * embed_dim // len(parts), embed_dim)
        self._weight("out_proj_weight", embed_dim, embed_dim)
        for part in parts:
            self._weight(f"{part}_bias", *([3 * embed_dim // len(parts)] if bias else []))
        self._weight("out_proj_bias", *([embed_dim] if bias else []))
        self._add_norm()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the weights, q, k and v each as a square matrix, and sets biases to 0."""
        super().reset_parameters()
        if self.separate_qkv_params:
            for weight in (self.q_weight, self.k_weight, self.v_weight):
                torch.nn.init.xavier_uniform_(weight)
        else:
            # Xavier's bound for [3n, n] is smaller by sqrt(2) than for [n, n].
            torch.nn.init.xavier_uniform_(self.in_proj_weight, gain=math.sqrt(2))
        torch.nn.init.xavier_uniform_(self.out_proj_weight)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[torch.Tensor, None]:
        """Returns (output [tokens, seqs, embed_dim], None).

        Args:
            query: [tokens, seqs, embed_dim], float32, float16 or bfloat16.
            key, value: ignored; ``query`` attends to itself.
            key_padding_mask: [seqs, tokens]; nonzero hides a key, or it is added to the scores.
            need_weights: ignored; no attention weights are returned.
            attn_mask: [tokens, tokens]; nonzero hides a key from a query.
            is_training: False leaves out dropout; the module's mode is ignored.

        Raises:
            ValueError: both masks are given, or ``attn_mask`` with ``mask_additive``.
        """
        mask = self._mask(key_padding_mask, attn_mask)
        if attn_mask is not None and self.mask_additive:
            raise ValueError("SelfMultiheadAttn: attn_mask must be None with mask_additive")
        weights = (self._joined("weight"), self.out_proj_weight)
        biases = (self._joined("bias"), self.out_proj_bias)
        common = (attn_mask is not None, is_training, self.num_heads)
        if not self._is_fast(is_training):
            out = self._normed(
                lambda x: self_attn_func(
                    *common, self.scaling, x, *weights, *biases, mask, self.mask_additive,
                    self.dropout,
                ),
                query, is_training,
            )  # fmt: skip
        elif self.include_norm_add:
            norm = (self.lyr_nrm_gamma_weights, self.lyr_nrm_beta_weights)
            out = fast_self_attn_norm_add_func(*common, query, *norm, *weights, mask, self.dropout)
        else:
            out = fast_self_attn_func(
                *common, query, *weights, *biases, mask, self.mask_additive, self.dropout
            )
        return out, None

    def _joined(self, kind: str) -> Any:
        """Returns the input projection's weight or bias, with rows ordered head, (q, k, v)."""
        if not self.separate_qkv_params:
            return getattr(self, f"in_proj_{kind}")
        parts = [getattr(self, f"{part}_{kind}") for part in "qkv"]
        if parts[0] is None:
            return None
        by_head = [t.view(self.num_heads, 1, self.head_dim, *t.shape[1:]) for t in parts]
        return torch.cat(by_head, 1).flatten(0, 2)
