"""Transformer Engine's GroupedLinear over apex_te's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .....module.grouped.linear import GroupedLinear as NativeGroupedLinear
from ..._arguments import check_overlap
from ..._device import default_device
from ..._names import named, neutral
from .base import GemmModule

__all__ = ["GroupedLinear"]


@named("transformer_engine.pytorch.module.grouped_linear")
class GroupedLinear(GemmModule, NativeGroupedLinear):
    """Linear layers of one shape, layer i applied to the i-th group of rows of the input.

    Args:
        num_gemms, in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group,
            tp_size, get_rng_state_tracker, rng_tracker_name, init_method, bias, return_bias,
            params_dtype, parallel_mode, delay_wgrad_compute, save_original_input, name: as in
            ``apex_te.GroupedLinear``.
        device, ub_overlap_rs, ub_overlap_ag, ub_name: as in ``Linear``.
        single_grouped_weight, single_grouped_bias: must be False.
        use_grouped_tensor: must be None or False.

    Raises:
        NotImplementedError: an argument asks for what is not served.
        TypeError, ValueError: as ``apex_te.GroupedLinear`` raises them.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | int | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        check_overlap("GroupedLinear", ub_overlap_rs=ub_overlap_rs, ub_overlap_ag=ub_overlap_ag)
        neutral(
            "GroupedLinear",
            single_grouped_weight=(single_grouped_weight, False),
            single_grouped_bias=(single_grouped_bias, False),
            use_grouped_tensor=(use_grouped_tensor, (None, False)),
        )
        super().__init__(
            num_gemms,
            in_features,
            out_features,
            bias,
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
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
            name=name,
            device=default_device(device),
        )
        self._finish(ub_name)
