"""Transformer Engine's MultiheadAttention over apex_te's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from .....module.attention.inference_params import InferenceParams
from .....module.attention.masks import Mask
from .....module.attention.multihead import MultiheadAttention as NativeMultiheadAttention
from ..._arguments import check_overlap
from ..._context_parallel import ContextParallelArguments
from ..._device import default_device
from ..._extra_state import WithoutExtraState
from ..._names import named, neutral
from ..module.base import TransformerEngineBaseModule
from ..module.layernorm import LayerNorm
from ..module.layernorm_linear import LayerNormLinear
from ..module.linear import Linear
from ..module.rmsnorm import RMSNorm
from ._masks import check_diagonal, checked_window, mask_type_of
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

    Args:
        hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon,
            init_method, output_layer_init_method, layer_number, tp_group, tp_size, num_gqa_groups,
            fuse_wgrad_accumulation, get_rng_state_tracker, sequence_parallel, params_dtype,
            return_bias, return_layernorm_output, input_layernorm, attention_type,
            set_parallel_mode, fuse_qkv_params, zero_centered_gamma, qkv_weight_interleaved,
            rotary_pos_interleaved, bias, normalization, qkv_format, name, qk_norm_type,
            qk_norm_eps, qk_norm_before_rope, apply_query_key_layer_scaling: as in
            ``apex_te.MultiheadAttention``.
        attn_mask_type, window_size, bottom_right_diagonal, softmax_type: as in
            ``DotProductAttention``.
        ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: must be
            False.
        device: as in ``Linear``.
        seq_length, micro_batch_size: have no effect.

    Raises:
        NotImplementedError: an argument asks for what is not served.
        TypeError, ValueError: as ``apex_te.MultiheadAttention`` raises them.
    """

    _linear = Linear
    _layer_norm_linear = LayerNormLinear
    _core_attention = DotProductAttention
    _norms: ClassVar[dict[str, type[Any]]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | int | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
        *,
        apply_query_key_layer_scaling: bool = False,
    ) -> None:
        check_overlap(
            _NAME,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
        )
        neutral(_NAME, softmax_type=(softmax_type, "vanilla"))
        kind = mask_type_of(attn_mask_type)
        super().__init__(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            init_method,
            output_layer_init_method,
            layer_number,
            kind,
            checked_window(kind, window_size),
            num_gqa_groups=num_gqa_groups,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            get_rng_state_tracker=get_rng_state_tracker,
            params_dtype=params_dtype,
            return_bias=return_bias,
            return_layernorm_output=return_layernorm_output,
            input_layernorm=input_layernorm,
            attention_type=attention_type,
            fuse_qkv_params=fuse_qkv_params,
            zero_centered_gamma=zero_centered_gamma,
            qkv_weight_interleaved=qkv_weight_interleaved,
            bias=bias,
            normalization=normalization,
            qkv_format=qkv_format,
            apply_query_key_layer_scaling=apply_query_key_layer_scaling,
            qk_norm_type=qk_norm_type,
            qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope,
            rotary_pos_interleaved=rotary_pos_interleaved,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            tp_size=tp_size,
            set_parallel_mode=set_parallel_mode,
            name=name,
            device=default_device(device),
        )
        self.bottom_right_diagonal = bottom_right_diagonal

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Hands the arguments to the module and its attention.

        Args:
            cp_group, cp_global_ranks, cp_stream, cp_comm_type: as in ``DotProductAttention``.

        Raises:
            NotImplementedError: ``cp_group`` has several ranks.
        """
        args = (cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        super().set_context_parallel_group(*args)
        self._call_children("set_context_parallel_group", *args)

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

        Args:
            hidden_states, encoder_output, is_first_microbatch, checkpoint_core_attention,
                rotary_pos_emb, core_attention_bias_type, core_attention_bias, alibi_slopes,
                cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, inference_params: as in
                ``apex_te.MultiheadAttention.forward``.
            attention_mask, attn_mask_type, window_size, bottom_right_diagonal,
                cu_seqlens_q_padded, cu_seqlens_kv_padded, pad_between_seqs, fast_zero_fill: as in
                ``DotProductAttention.forward``.

        Returns:
            ``out``, or a tuple of it, the bias with ``return_bias``, and the norm's result with
            ``return_layernorm_output`` and ``input_layernorm``.

        Raises:
            NotImplementedError: an argument asks for what is not served.
            TypeError, ValueError: as ``apex_te.MultiheadAttention.forward`` raises them.
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

        Args:
            value, kind, size: the call's ``bottom_right_diagonal``, ``attn_mask_type`` and
                ``window_size``; None stands for the module's own.
            bias_type: the argument ``core_attention_bias_type``.

        Raises:
            NotImplementedError: positions are to count from the first tokens, but do from the last.
        """
        value = self.bottom_right_diagonal if value is None else value
        if value is not False:
            return
        core = self.core_attention
        kind = core.attn_mask_type if kind is None else kind
        size = core.window_size if size is None else size
        check_diagonal(f"{_NAME}.forward", value, kind, checked_window(kind, size), bias_type)
