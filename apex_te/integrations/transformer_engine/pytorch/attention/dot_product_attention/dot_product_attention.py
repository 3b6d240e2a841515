"""Transformer Engine's DotProductAttention over apex_te's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ......module.attention.dot_product import DotProductAttention as NativeDotProductAttention
from ......module.attention.inference_params import InferenceParams, extended, without_gradient
from ......module.attention.masks import Mask
from ...._arguments import constructor
from ...._context_parallel import ContextParallelArguments
from ...._names import named, neutral
from ...module.base import TransformerEngineBaseModule
from .._masks import check_diagonal, checked_window, mask_type_of, prepare_masks, reads_masks

__all__ = ["DotProductAttention"]

_NAME = "DotProductAttention"


@named("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
class DotProductAttention(
    ContextParallelArguments, TransformerEngineBaseModule, NativeDotProductAttention
):
    """``softmax(scale * q k^T + bias) v`` for each head, computed as by apex_te's class.

    Masks, and ``cu_seqlens_q`` and ``cu_seqlens_kv`` of unpacked tensors, are ignored with mask
    types that read none.

    Args:
        attn_mask_type: as in ``apex_te.DotProductAttention``, whose arguments the others are;
            ``"padding,causal"`` and ``"causal,padding"`` are ``"padding_causal"``.
        window_size: as there; its right end is 0 with causal types.
        bottom_right_diagonal: must be None or True where a window or ALiBi would count otherwise.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: as there.
        name: names the module in reports.

    Raises:
        NotImplementedError: an argument asks for a feature that is not supported.
    """

    __init__ = constructor(
        "DotProductAttention",
        NativeDotProductAttention,
        "num_attention_heads, kv_channels, num_gqa_groups, attention_dropout, qkv_format, "
        "attn_mask_type, window_size, bottom_right_diagonal: bool | None = None, "
        "sequence_parallel, tp_size, get_rng_state_tracker, tp_group, layer_number, "
        "attention_type, cp_group, cp_global_ranks, cp_stream, cp_comm_type, "
        "softmax_scale, softmax_type, return_max_logit, "
        "name: str | None = None, *, apply_query_key_layer_scaling, device",
        prepare_masks,
    )

    def _constructed(self, values: dict[str, Any]) -> None:
        self.bottom_right_diagonal = values["bottom_right_diagonal"]
        self.name = values["name"]
        names = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
        self.set_context_parallel_group(*(values[name] for name in names))

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Mask = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attends; returns [..., h * dv] in the layout of the queries.

        Args:
            attention_mask: as in ``apex_te.DotProductAttention.forward``, whose arguments the
                others are; ignored with mask types that read none.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: as there, for thd; ignored otherwise.
            attn_mask_type, window_size, bottom_right_diagonal: replace the module's own.
            inference_params: caches the keys and values, to which those of earlier calls are added,
                under the module's ``layer_number``.
            pad_between_seqs: False states that there are no gaps between the sequences of thd;
                None and True read ``cu_seqlens_q_padded``.
            fp8_output: must be False.
            num_splits: must be 1 or None.
            fast_zero_fill: without effect.
        """
        if fp8_output or num_splits not in (1, None):
            neutral(
                f"{_NAME}.forward",
                fp8_output=(fp8_output, (False, None)),
                num_splits=(num_splits, (1, None)),
            )
        kind = self.attn_mask_type if attn_mask_type is None else mask_type_of(attn_mask_type)
        layout = self.qkv_format if qkv_format is None else qkv_format
        window = self.window_size if window_size is None else window_size
        window = checked_window(kind, window)
        diagonal = bottom_right_diagonal
        if diagonal is None:
            diagonal = self.bottom_right_diagonal
        check_diagonal(f"{_NAME}.forward", diagonal, kind, window, core_attention_bias_type)
        if layout != "thd" or pad_between_seqs is False:
            cu_seqlens_q_padded = cu_seqlens_kv_padded = None
        keys, values = key_layer, value_layer
        if inference_params is not None:
            cached = extended(
                _NAME, inference_params, self.layer_number, keys, values, layout, self.training
            )
            keys, values, kind = cached.keys, cached.values, cached.mask_type(_NAME, kind)
            query_layer = without_gradient(_NAME, query_layer, self.training)
            if cached.step is not None:
                attention_mask = cu_seqlens_q_padded = None
                cu_seqlens_kv_padded = cached.key_starts
                cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv = cached.lengths()
        if not reads_masks(kind):
            attention_mask = None
            if layout != "thd":
                cu_seqlens_q = cu_seqlens_kv = None
        return NativeDotProductAttention.forward(
            self, query_layer, keys, values, attention_mask, layout, cu_seqlens_q, cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, attn_mask_type=kind,
            window_size=(-1, -1) if window is None else window,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
            checkpoint_core_attention=checkpoint_core_attention,
            cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        )  # fmt: skip

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # Releases 1.6 and 1.7 have a module below that saves the key.
        former = f"{prefix}fused_attention._extra_state"
        unexpected_keys[:] = [key for key in unexpected_keys if key != former]
