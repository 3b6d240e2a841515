"""Transformer Engine's LayerNormMLP over apex_te's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .....module.layer_norm_mlp import LayerNormMLP as NativeLayerNormMLP
from ..._arguments import check_overlap
from ..._device import default_device
from ..._names import named, neutral
from .base import GemmModule

__all__ = ["LayerNormMLP"]


@named("transformer_engine.pytorch.module.layernorm_mlp")
class LayerNormMLP(GemmModule, NativeLayerNormMLP):
    """``act(norm(x) @ fc1.T + b1) @ fc2.T + b2``, in FP8 inside an enabled ``fp8_autocast`` region.

    Args:
        hidden_size, ffn_hidden_size, eps, sequence_parallel, return_bias, get_rng_state_tracker,
            tp_group, tp_size, init_method, bias, normalization, activation,
            activation_params, output_layer_init_method, fuse_wgrad_accumulation, params_dtype,
            return_layernorm_output, seq_length, micro_batch_size, set_parallel_mode,
            zero_centered_gamma, name, delay_wgrad_compute, checkpoint: as in
            ``apex_te.LayerNormMLP``.
        return_layernorm_output_gathered: must be False.
        device, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad,
            symmetric_ar_type: as in ``Linear``.

    Raises:
        NotImplementedError: an argument asks for what is not served.
        TypeError, ValueError: as ``apex_te.LayerNormMLP`` raises them.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        check_overlap(
            "LayerNormMLP",
            symmetric_ar_type,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
        )
        neutral(
            "LayerNormMLP",
            return_layernorm_output_gathered=(return_layernorm_output_gathered, False),
        )
        super().__init__(
            hidden_size,
            ffn_hidden_size,
            eps,
            bias,
            normalization=normalization,
            activation=activation,
            activation_params=activation_params,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=return_layernorm_output,
            return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            params_dtype=params_dtype,
            delay_wgrad_compute=delay_wgrad_compute,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            set_parallel_mode=set_parallel_mode,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            name=name,
            device=default_device(device),
            checkpoint=checkpoint,
        )
        self._finish(None)
