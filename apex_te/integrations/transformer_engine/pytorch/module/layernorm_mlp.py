"""Transformer Engine's LayerNormMLP over apex_te's."""

from __future__ import annotations

from .....module.layer_norm_mlp import LayerNormMLP as NativeLayerNormMLP
from ..._arguments import constructor
from ..._names import named
from .base import GemmModule

__all__ = ["LayerNormMLP"]


@named("transformer_engine.pytorch.module.layernorm_mlp")
class LayerNormMLP(GemmModule, NativeLayerNormMLP):
    """``act(norm(x) @ fc1.T + b1) @ fc2.T + b2``, in FP8 inside an enabled ``fp8_autocast`` region.

    Arguments are those of ``apex_te.LayerNormMLP``, and others as in ``Linear``;
    ``return_layernorm_output_gathered`` must be False.

    Raises:
        NotImplementedError: an argument asks for a feature that is not supported.
    """

    __init__ = constructor(
        "LayerNormMLP",
        NativeLayerNormMLP,
        "hidden_size, ffn_hidden_size, eps, sequence_parallel, return_bias, get_rng_state_tracker, "
        "tp_group, tp_size, init_method, bias, normalization, activation, activation_params, "
        "output_layer_init_method, fuse_wgrad_accumulation, params_dtype, return_layernorm_output, "
        "return_layernorm_output_gathered, seq_length, micro_batch_size, set_parallel_mode, "
        "zero_centered_gamma, device, ub_overlap_ag, name, ub_overlap_rs, ub_overlap_rs_dgrad, "
        "ub_bulk_dgrad, ub_bulk_wgrad, delay_wgrad_compute, symmetric_ar_type, checkpoint",
    )
