"""Transformer Engine's LayerNormLinear over apex_te's."""

from __future__ import annotations

from typing import Any

import torch

from .....module.layer_norm_linear import LayerNormLinear as NativeLayerNormLinear
from ..._arguments import checked_forward, constructor
from ..._names import named
from .base import GemmModule

__all__ = ["LayerNormLinear"]


@named("transformer_engine.pytorch.module.layernorm_linear")
class LayerNormLinear(GemmModule, NativeLayerNormLinear):
    """``y = norm(x) @ weight.T + bias``, in FP8 inside an enabled ``fp8_autocast`` region.

    Arguments are those of ``apex_te.LayerNormLinear``, and others as in ``Linear``;
    ``return_layernorm_output_gathered`` must be False.

    Raises:
        NotImplementedError: an argument asks for a feature that is not supported.
    """

    __init__ = constructor(
        "LayerNormLinear",
        NativeLayerNormLinear,
        "in_features, out_features, eps, sequence_parallel, fuse_wgrad_accumulation, tp_group, "
        "tp_size, get_rng_state_tracker, init_method, bias, normalization, return_bias, "
        "params_dtype, parallel_mode, return_layernorm_output, return_layernorm_output_gathered, "
        "parameters_split, zero_centered_gamma, device, ub_overlap_ag, ub_overlap_rs, "
        "ub_overlap_rs_dgrad, ub_bulk_wgrad, ub_bulk_dgrad, ub_name: str | None = None, "
        "delay_wgrad_compute, symmetric_ar_type, name, *, rng_tracker_name",
    )

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, fp8_grad: bool = False
    ) -> Any:
        """Applies the module as ``apex_te.LayerNormLinear`` does; ``fp8_grad`` must be False.

        Returns:
            ``out`` [..., out_features]; ``(out, bias)`` with ``return_bias``, ``(out, norm)`` with
            ``return_layernorm_output``, ``(out, bias, norm)`` with both.
        """
        if fp8_grad:
            checked_forward("LayerNormLinear", fp8_grad=fp8_grad)
        return NativeLayerNormLinear.forward(self, inp, is_first_microbatch)
