"""Transformer Engine's TransformerLayer over apex_te's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ....module.attention.inference_params import InferenceParams
from ....module.attention.masks import Mask
from ....module.transformer_layer import TransformerLayer as NativeTransformerLayer
from .._arguments import constructor
from .._context_parallel import ContextParallelArguments
from .._extra_state import WithoutExtraState
from .._names import named
from .attention._masks import checked_window, mask_type_of, reads_masks
from .attention.multi_head_attention import MultiheadAttention
from .module.base import TransformerEngineBaseModule
from .module.layernorm import LayerNorm
from .module.layernorm_mlp import LayerNormMLP
from .module.rmsnorm import RMSNorm

__all__ = ["TransformerLayer"]

_NAME = "TransformerLayer"


def _prepare(values: dict[str, Any]) -> None:
    """Changes mask types and windows among the constructor's arguments to apex_te's."""
    for prefix, name in (("", "self_attn_mask_type"), ("enc_dec_", "enc_dec_attn_mask_type")):
        values[name] = mask_type_of(values[name])
        window = f"{prefix}window_size"
        if prefix and values["layer_type"] != "decoder":
            values[name] = values[window] = None
        else:
            values[window] = checked_window(values[name], values[window])
    values["apply_query_key_layer_scaling"] = False


@named("transformer_engine.pytorch.transformer")
class TransformerLayer(
    WithoutExtraState, ContextParallelArguments, TransformerEngineBaseModule, NativeTransformerLayer
):
    """One layer of a Transformer, computed as by ``apex_te.TransformerLayer``.

    The modules inside are those of this package. Masks are ignored with mask types that read none.

    Arguments that are not listed are those of ``apex_te.TransformerLayer``; ``device`` is as in
    ``Linear``.

    Args:
        self_attn_mask_type, window_size, bottom_right_diagonal: of self attention, as
            ``attn_mask_type`` and the others in ``DotProductAttention``.
        enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: the same of a
            decoder's cross attention; without effect in an encoder.
        ub_tp_comm_overlap: must be False; ``ub_overlap_ag``, ``ub_overlap_rs``,
            ``ub_overlap_rs_dgrad``, ``ub_bulk_dgrad`` and ``ub_bulk_wgrad`` then have no effect.

    Raises:
        NotImplementedError: an argument asks for a feature that is not supported.
    """

    _classes: ClassVar[dict[str, type[Any]]] = {
        "attention": MultiheadAttention,
        "mlp": LayerNormMLP,
        "LayerNorm": LayerNorm,
        "RMSNorm": RMSNorm,
    }

    __init__ = constructor(
        "TransformerLayer",
        NativeTransformerLayer,
        "hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, layernorm_epsilon, "
        "hidden_dropout, attention_dropout, init_method, output_layer_init_method, layer_number, "
        "kv_channels, self_attn_mask_type, window_size, bottom_right_diagonal: bool | None = None, "
        "enc_dec_attn_mask_type: str = 'no_mask', "
        "enc_dec_bottom_right_diagonal: bool | None = None, enc_dec_window_size, tp_group, "
        "tp_size, params_dtype, get_rng_state_tracker, fuse_wgrad_accumulation, seq_length, "
        "micro_batch_size, sequence_parallel, apply_residual_connection_post_layernorm, "
        "output_layernorm, parallel_attention_mlp, layer_type, drop_path_rate, set_parallel_mode, "
        "fuse_qkv_params, rotary_pos_interleaved, zero_centered_gamma, qkv_weight_interleaved, "
        "ub_tp_comm_overlap, ub_overlap_ag: bool = True, ub_overlap_rs: bool = True, "
        "ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = True, "
        "ub_bulk_wgrad: bool = True, bias, activation, activation_params, normalization, device, "
        "attn_input_format, name, qk_norm_type, qk_norm_eps, qk_norm_before_rope, softmax_type",
        _prepare,
    )

    def _constructed(self, values: dict[str, Any]) -> None:
        self.name = values["name"]
        self.self_attn_mask_type = values["self_attn_mask_type"]
        self.bottom_right_diagonal = values["bottom_right_diagonal"]
        self.enc_dec_bottom_right_diagonal = values["enc_dec_bottom_right_diagonal"]

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

        Arguments that are not listed are those of ``apex_te.TransformerLayer.forward``, or of
        ``DotProductAttention.forward``.

        Args:
            attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal: of self
                attention, as in ``DotProductAttention.forward``. A tensor in the place of
                ``bottom_right_diagonal``, where earlier releases have it, is ``encoder_output``.
            encoder_output: hidden states that a decoder's cross attention reads.
            enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size,
                enc_dec_bottom_right_diagonal: of a decoder's cross attention; ignored in an
                encoder.
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
        out: Any = NativeTransformerLayer.forward(
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
        return out
