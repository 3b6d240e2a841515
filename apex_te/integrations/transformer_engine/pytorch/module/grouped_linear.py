"""Transformer Engine's GroupedLinear over apex_te's."""

from __future__ import annotations

from .....module.grouped.linear import GroupedLinear as NativeGroupedLinear
from ..._arguments import constructor
from ..._names import named
from .base import GemmModule

__all__ = ["GroupedLinear"]


@named("transformer_engine.pytorch.module.grouped_linear")
class GroupedLinear(GemmModule, NativeGroupedLinear):
    """Linear layers of one shape, layer i applied to the i-th group of rows of the input.

    Arguments are those of ``apex_te.GroupedLinear``, and others as in ``Linear``;
    ``single_grouped_weight``, ``single_grouped_bias`` and ``use_grouped_tensor`` must have their
    defaults.

    Raises:
        NotImplementedError: an argument asks for what is not served.
    """

    __init__ = constructor(
        "GroupedLinear",
        NativeGroupedLinear,
        "num_gemms, in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, "
        "tp_group, tp_size, get_rng_state_tracker, rng_tracker_name, init_method, bias, "
        "return_bias, params_dtype, parallel_mode, device, ub_overlap_rs, ub_overlap_ag, "
        "ub_name: str | None = None, delay_wgrad_compute, save_original_input, "
        "single_grouped_weight, single_grouped_bias, name, use_grouped_tensor",
    )
