"""Transformer Engine's TransformerLayer over apex_te's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ....module.attention.inference_params import InferenceParams
from ....module.attention.masks import Mask
from ....module.transformer_layer import TransformerLayer as NativeTransformerLayer
from .._context_parallel import ContextParallelArguments
from .._device import default_device
from .._extra_state import WithoutExtraState
from .._names import named, neutral
from .attention._masks import checked_window, mask_type_of, reads_masks
from .attention.multi_head_attention import MultiheadAttention
from .module.base import TransformerEngineBaseModule
from .module.layernorm import LayerNorm
from .module.layernorm_mlp import LayerNormMLP
from .module.rmsnorm import RMSNorm

__all__ = ["TransformerLayer"]

_NAME = "TransformerLayer"


@named("transformer_engine.pytorch.transformer")
class TransformerLayer(
    WithoutExtraState, ContextParallelArguments, TransformerEngineBaseModule, NativeTransformerLayer
):
    """One layer of a Transformer, computed as by ``apex_te.TransformerLayer``.

    The modules inside are those of this package. Masks are ignored with mask types that read none.

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, layernorm_epsilon,
            hidden_dropout, attention_dropout, init_method, output_layer_init_method, layer_number,
            kv_channels, tp_group, tp_size, params_dtype, get_rng_state_tracker,
            fuse_wgrad_accumulation, seq_length, micro_batch_size, sequence_parallel,
            apply_residual_connection_post_layernorm, output_layernorm, parallel_attention_mlp,
            layer_type, drop_path_rate, set_parallel_mode, fuse_qkv_params, rotary_pos_interleaved,
            zero_centered_gamma, qkv_weight_interleaved, bias, activation, activation_params,
            normalization, attn_input_format, name, qk_norm_type, qk_norm_eps,
            qk_norm_before_rope: as in ``apex_te.TransformerLayer``.
        self_attn_mask_type, window_size, bottom_right_diagonal: of self attention, as
            ``attn_mask_type`` and the others in ``DotProductAttention``.
        enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: the same of a
            decoder's cross attention; without effect in an encoder.
        ub_tp_comm_overlap: must be False; ``ub_overlap_ag``, ``ub_overlap_rs``,
            ``ub_overlap_rs_dgrad``, ``ub_bulk_dgrad`` and ``ub_bulk_wgrad`` then have no effect.
        softmax_type: must be ``"vanilla"``.
        device: as in ``Linear``.

    Raises:
        NotImplementedError: an argument asks for what is not served.
        TypeError, ValueError: as ``apex_te.TransformerLayer`` raises them.
    """

    _classes: ClassVar[dict[str, type[Any]]] = {
        "attention": MultiheadAttention,
        "mlp": LayerNormMLP,
        "LayerNorm": LayerNorm,
        "RMSNorm": RMSNorm,
    }

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: Sequence[int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | int | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        neutral(
            _NAME,
            ub_tp_comm_overlap=(ub_tp_comm_overlap, False),
            softmax_type=(softmax_type, "vanilla"),
        )
        kind, cross_kind = mask_type_of(self_attn_mask_type), mask_type_of(enc_dec_attn_mask_type)
        decodes = layer_type == "decoder"
        super().__init__(
            hidden_size,
            ffn_hidden_size,
            num_attention_heads,
            num_gqa_groups,
            layernorm_epsilon,
            hidden_dropout,
            attention_dropout,
            init_method,
            output_layer_init_method,
            layer_number,
            kv_channels,
            kind,
            checked_window(kind, window_size),
            enc_dec_attn_mask_type=cross_kind if decodes else None,
            enc_dec_window_size=checked_window(cross_kind, enc_dec_window_size)
            if decodes
            else None,
            tp_group=tp_group,
            tp_size=tp_size,
            params_dtype=params_dtype,
            get_rng_state_tracker=get_rng_state_tracker,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            apply_query_key_layer_scaling=False,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            sequence_parallel=sequence_parallel,
            apply_residual_connection_post_layernorm=apply_residual_connection_post_layernorm,
            output_layernorm=output_layernorm,
            layer_type=layer_type,
            drop_path_rate=drop_path_rate,
            set_parallel_mode=set_parallel_mode,
            fuse_qkv_params=fuse_qkv_params,
            zero_centered_gamma=zero_centered_gamma,
            qkv_weight_interleaved=qkv_weight_interleaved,
            bias=bias,
            activation=activation,
            activation_params=activation_params,
            normalization=normalization,
            parallel_attention_mlp=parallel_attention_mlp,
            attn_input_format=attn_input_format,
            qk_norm_type=qk_norm_type,
            qk_norm_eps=qk_norm_eps,
            qk_norm_before_rope=qk_norm_before_rope,
            rotary_pos_interleaved=rotary_pos_interleaved,
            name=name,
            device=default_device(device),
        )
        self.name = name
        self.self_attn_mask_type = kind
        self.bottom_right_diagonal = bottom_right_diagonal
        self.enc_dec_bottom_right_diagonal = enc_dec_bottom_right_diagonal

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Hands the arguments to the layer and its attention.

        Args:
            cp_group, cp_global_ranks, cp_stream, cp_comm_type: as in ``DotProductAttention``.

        Raises:
            NotImplementedError: ``cp_group`` has several ranks.
        """
        args = (cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        super().set_context_parallel_group(*args)
        self._call_children("set_context_parallel_group", *args)

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: Mask = None,
        self_attn_mask_type: str | None = None,
        window_size: Sequence[int] | None = None,
        bottom_right_diagonal: bool | torch.Tensor | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: Mask = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Sequence[int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> torch.Tensor:
        """Applies the layer; returns a tensor of the shape of ``hidden_states``.

        Args:
            hidden_states, is_first_microbatch, checkpoint_core_attention, inference_params,
                rotary_pos_emb, core_attention_bias_type, core_attention_bias, alibi_slopes,
                cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv: as in
                ``apex_te.TransformerLayer.forward``.
            attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal: of self
                attention, as in ``DotProductAttention.forward``. A tensor in the place of
                ``bottom_right_diagonal``, where earlier releases have it, is ``encoder_output``.
            encoder_output: hidden states that a decoder's cross attention reads.
            enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size,
                enc_dec_bottom_right_diagonal: of a decoder's cross attention; ignored in an
                encoder.
            cu_seqlens_q_padded, cu_seqlens_kv_padded, pad_between_seqs, fast_zero_fill: as in
                ``DotProductAttention.forward``.

        Raises:
            NotImplementedError: an argument asks for what is not served.
            TypeError, ValueError: as ``apex_te.TransformerLayer.forward`` raises them.
        """
        if isinstance(bottom_right_diagonal, torch.Tensor):
            if encoder_output is not None:
                raise TypeError(
                    f"{_NAME}: bottom_right_diagonal must be None or a bool where encoder_output "
                    "is given, too, got a tensor"
                )
            bottom_right_diagonal, encoder_output = None, bottom_right_diagonal
        if pad_between_seqs is False or self.attn_input_format != "thd":
            cu_seqlens_q_padded = cu_seqlens_kv_padded = None
        kind = mask_type_of(self_attn_mask_type)
        if bottom_right_diagonal is None:
            bottom_right_diagonal = self.bottom_right_diagonal
        self.self_attention.check_diagonal(
            bottom_right_diagonal, kind, window_size, core_attention_bias_type
        )
        cross_kind = None
        if self.layer_type == "decoder":
            cross_kind = mask_type_of(enc_dec_attn_mask_type) or self.enc_dec_attn_mask_type
            if not reads_masks(cross_kind):
                enc_dec_attn_mask = None
            if enc_dec_bottom_right_diagonal is None:
                enc_dec_bottom_right_diagonal = self.enc_dec_bottom_right_diagonal
            self.inter_attention.check_diagonal(
                enc_dec_bottom_right_diagonal, cross_kind, enc_dec_window_size, "no_bias"
            )
        else:
            enc_dec_attn_mask = enc_dec_window_size = None
        return NativeTransformerLayer.forward(
            self, hidden_states, attention_mask, kind, window_size, encoder_output,
            enc_dec_attn_mask, enc_dec_attn_mask_type=cross_kind,
            enc_dec_window_size=enc_dec_window_size, is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            inference_params=inference_params, rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv, cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        )  # fmt: skip
