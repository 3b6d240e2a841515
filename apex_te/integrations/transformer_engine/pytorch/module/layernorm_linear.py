"""Transformer Engine's LayerNormLinear over apex_te's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .....module.layer_norm_linear import LayerNormLinear as NativeLayerNormLinear
from ..._arguments import check_overlap, checked_forward, stripped_names
from ..._device import default_device
from ..._names import named, neutral
from .base import GemmModule

__all__ = ["LayerNormLinear"]


@named("transformer_engine.pytorch.module.layernorm_linear")
class LayerNormLinear(GemmModule, NativeLayerNormLinear):
    """``y = norm(x) @ weight.T + bias``, in FP8 inside an enabled ``fp8_autocast`` region.

    Args:
        in_features, out_features, eps, sequence_parallel, fuse_wgrad_accumulation, tp_group,
            tp_size, get_rng_state_tracker, init_method, bias, normalization, return_bias,
            params_dtype, parallel_mode, return_layernorm_output, zero_centered_gamma,
            delay_wgrad_compute, name, rng_tracker_name: as in ``apex_te.LayerNormLinear``.
        return_layernorm_output_gathered: must be False.
        parameters_split, device, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_wgrad,
            ub_bulk_dgrad, ub_name, symmetric_ar_type: as in ``Linear``.

    Raises:
        NotImplementedError: an argument asks for what is not served.
        TypeError, ValueError: as ``apex_te.LayerNormLinear`` raises them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
        *,
        rng_tracker_name: str | None = None,
    ) -> None:
        check_overlap(
            "LayerNormLinear",
            symmetric_ar_type,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
        )
        gathered = (return_layernorm_output_gathered, False)
        neutral("LayerNormLinear", return_layernorm_output_gathered=gathered)
        super().__init__(
            in_features,
            out_features,
            eps,
            bias,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=return_layernorm_output,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name,
            init_method=init_method,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            parameters_split=stripped_names(parameters_split),
            delay_wgrad_compute=delay_wgrad_compute,
            name=name,
            device=default_device(device),
        )
        self._finish(ub_name)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_grad: bool = False,
    ) -> Any:
        """Applies the norm and the linear layer as ``apex_te.LayerNormLinear`` does.

        Args:
            inp, is_first_microbatch: as in ``apex_te.LayerNormLinear.forward``.
            fp8_grad: must be False.

        Returns:
            ``out`` [..., out_features]; ``(out, bias)`` with ``return_bias``, ``(out, norm)`` with
            ``return_layernorm_output``, ``(out, bias, norm)`` with both.

        Raises:
            NotImplementedError: the output's gradient is asked for in FP8.
            TypeError, ValueError: as ``apex_te.LayerNormLinear.forward`` raises them.
        """
        if fp8_grad:
            checked_forward("LayerNormLinear", fp8_grad=fp8_grad)
        return NativeLayerNormLinear.forward(self, inp, is_first_microbatch)
