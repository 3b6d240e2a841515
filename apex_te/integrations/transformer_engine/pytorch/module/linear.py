"""Transformer Engine's Linear: apex_te's linear layer, which is not a ``torch.nn.Linear`` here."""

from __future__ import annotations

import torch

from .....module.linear import LinearLayer
from ..._arguments import checked_forward, constructor
from ..._names import named
from .base import GemmModule

__all__ = ["Linear"]


@named("transformer_engine.pytorch.module.linear")
class Linear(GemmModule, LinearLayer):
    """``y = x @ weight.T + bias``, in FP8 inside an enabled ``fp8_autocast`` region.

    Arguments are those of ``apex_te.Linear``. Underscores at the end of names in
    ``parameters_split`` are dropped. ``device=None`` is PyTorch's default device if one is set,
    else the current GPU, else the CPU. ``ub_overlap_*``, ``ub_bulk_*`` and ``symmetric_ar_type``
    must have their defaults; ``ub_name`` is ignored.

    Raises:
        NotImplementedError: an argument asks for a feature that is not supported.
    """

    __init__ = constructor(
        "Linear",
        LinearLayer,
        "in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size, "
        "get_rng_state_tracker, rng_tracker_name, init_method, bias, return_bias, params_dtype, "
        "parallel_mode, parameters_split, device, ub_overlap_ag, ub_overlap_rs, "
        "ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name: str | None = None, "
        "delay_wgrad_compute, symmetric_ar_type, save_original_input, name",
    )

    def forward(  # type: ignore[override]
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Applies the layer as ``apex_te.Linear`` does; ``fp8_output`` and ``fp8_grad`` are False.

        Returns:
            ``out`` [..., out_features], or with ``return_bias`` a tuple of it and the bias (empty
            if there is none).
        """
        if fp8_output or fp8_grad:
            checked_forward("Linear", fp8_output, fp8_grad)
        return LinearLayer.forward(self, inp, None, None, is_first_microbatch)
