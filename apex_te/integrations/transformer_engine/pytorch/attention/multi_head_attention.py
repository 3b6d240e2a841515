"""Transformer Engine's MultiheadAttention over apex_te's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from .....module.attention.inference_params import InferenceParams
from .....module.attention.masks import Mask
from .....module.attention.multihead import MultiheadAttention as NativeMultiheadAttention
from ..._arguments import constructor
from ..._context_parallel import ContextParallelArguments
from ..._extra_state import WithoutExtraState
from ..._names import named
from ..module.base import TransformerEngineBaseModule
from ..module.layernorm import LayerNorm
from ..module.layernorm_linear import LayerNormLinear
from ..module.linear import Linear
from ..module.rmsnorm import RMSNorm
from ._masks import check_diagonal, checked_window, mask_type_of, prepare_masks
from .dot_product_attention.dot_product_attention import DotProductAttention

__all__ = ["MultiheadAttention"]

_NAME = "MultiheadAttention"


@named("transformer_engine.pytorch.attention.multi_head_attention")
class MultiheadAttention(
    WithoutExtraState,
    ContextParallelArguments,
    TransformerEngineBaseModule,
    NativeMultiheadAttention,
):
    """Projections to heads, attention and the projection back, computed as by apex_te's class.

    The modules inside are those of this package. Masks are ignored with mask types that read none.

    Arguments are those of ``apex_te.MultiheadAttention``, with ``attn_mask_type``, ``window_size``
    and ``bottom_right_diagonal`` as in ``DotProductAttention`` and others as in ``Linear``.
    ``seq_length`` and ``micro_batch_size`` are ignored.

    Raises:
        NotImplementedError: an argument asks for a feature that is not supported.
    """

    _linear = Linear
    _layer_norm_linear = LayerNormLinear
    _core_attention = DotProductAttention
    _norms: ClassVar[dict[str, type[Any]]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}

    __init__ = constructor(
        "MultiheadAttention",
        NativeMultiheadAttention,
        "hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon, "
        "init_method, output_layer_init_method, layer_number, attn_mask_type, window_size, "
        "bottom_right_diagonal: bool | None = None, tp_group, tp_size, num_gqa_groups, "
        "fuse_wgrad_accumulation, get_rng_state_tracker, sequence_parallel, params_dtype, "
        "return_bias, return_layernorm_output, input_layernorm, attention_type, set_parallel_mode, "
        "fuse_qkv_params, zero_centered_gamma, qkv_weight_interleaved, rotary_pos_interleaved, "
        "ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, bias, "
        "normalization, device, qkv_format, name, qk_norm_type, qk_norm_eps, qk_norm_before_rope, "
        "seq_length: int | None = None, micro_batch_size: int | None = None, softmax_type, *, "
        "apply_query_key_layer_scaling, return_max_logit",
        prepare_masks,
    )

    def _constructed(self, values: dict[str, Any]) -> None:
        self.bottom_right_diagonal = values["bottom_right_diagonal"]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Any:
        """Attends; returns [..., hidden_size] in the layout of ``hidden_states``.

        Arguments are those of ``apex_te.MultiheadAttention.forward``, with masks, windows and
        padding as in ``DotProductAttention.forward``.

        Returns:
            ``out``, or a tuple of it, the bias with ``return_bias``, and the norm's result with
            ``return_layernorm_output`` and ``input_layernorm``.
        """
        if pad_between_seqs is False or self.qkv_format != "thd":
            cu_seqlens_q_padded = cu_seqlens_kv_padded = None
        kind = mask_type_of(attn_mask_type)
        self.check_diagonal(bottom_right_diagonal, kind, window_size, core_attention_bias_type)
        return NativeMultiheadAttention.forward(
            self, hidden_states, attention_mask, encoder_output, kind, window_size,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params, rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv, cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        )  # fmt: skip

    def check_diagonal(self, value: bool | None, kind: Any, size: Any, bias_type: str) -> None:
        """Checks that a call's windows and ALiBi are aligned as apex_te aligns them.

        ``value``, ``kind`` and ``size`` are the call's ``bottom_right_diagonal``,
        ``attn_mask_type`` and ``window_size``; None stands for the module's own.
        """
        value = self.bottom_right_diagonal if value is None else value
        if value is not False:
            return
        core = self.core_attention
        kind = core.attn_mask_type if kind is None else kind
        size = core.window_size if size is None else size
        check_diagonal(f"{_NAME}.forward", value, kind, checked_window(kind, size), bias_type)
