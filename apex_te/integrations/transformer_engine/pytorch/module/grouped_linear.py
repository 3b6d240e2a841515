"""Transformer Engine's GroupedLinear over apex_te's."""

from __future__ import annotations

from typing import Any

from .....module.grouped.linear import GroupedLinear as NativeGroupedLinear
from ..._arguments import constructor
from ..._names import named, neutral
from .base import GemmModule

__all__ = ["GroupedLinear"]


def _take_stack(values: dict[str, Any]) -> None:
    weight, bias = values["single_grouped_weight"], values["single_grouped_bias"]
    if values["bias"]:
        neutral("GroupedLinear", single_grouped_bias=(bias, (weight,)))
    values["single_parameter"] = weight


@named("transformer_engine.pytorch.module.grouped_linear")
class GroupedLinear(GemmModule, NativeGroupedLinear):
    """Linear layers of one shape, layer i applied to the i-th group of rows of the input.

    Arguments are those of ``apex_te.GroupedLinear``, and others as in ``Linear``.
    ``single_grouped_weight`` is ``single_parameter``, and with ``bias`` needs
    ``single_grouped_bias``; ``use_grouped_tensor`` must have its default.

    Raises:
        NotImplementedError: an argument asks for a feature that is not supported.
    """

    __init__ = constructor(
        "GroupedLinear",
        NativeGroupedLinear,
        "num_gemms, in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, "
        "tp_group, tp_size, get_rng_state_tracker, rng_tracker_name, init_method, bias, "
        "return_bias, params_dtype, parallel_mode, device, ub_overlap_rs, ub_overlap_ag, "
        "ub_name: str | None = None, delay_wgrad_compute, save_original_input, "
        "single_grouped_weight: bool = False, "
        "single_grouped_bias: bool = False, name, use_grouped_tensor",
        _take_stack,
    )
