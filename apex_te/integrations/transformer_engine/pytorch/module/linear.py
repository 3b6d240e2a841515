"""Transformer Engine's Linear: apex_te's linear layer, which is no ``torch.nn.Linear`` here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .....module.linear import LinearLayer
from ..._arguments import check_overlap, checked_forward, stripped_names
from ..._device import default_device
from ..._names import named
from .base import GemmModule

__all__ = ["Linear"]


@named("transformer_engine.pytorch.module.linear")
class Linear(GemmModule, LinearLayer):
    """``y = x @ weight.T + bias``, in FP8 inside an enabled ``fp8_autocast`` region.

    Args:
        in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size,
            get_rng_state_tracker, rng_tracker_name, init_method, bias, return_bias, params_dtype,
            parallel_mode, delay_wgrad_compute, save_original_input, name: as in
            ``apex_te.Linear``.
        parameters_split: as in ``apex_te.Linear``; underscores at the end of a name are dropped.
        device: where the parameters live; None takes PyTorch's default device if one is set, else
            the current GPU, else the CPU.
        ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: must be
            False; ``ub_name`` has no effect.
        symmetric_ar_type: must be None.

    Raises:
        NotImplementedError: an argument asks for what is not served.
        TypeError, ValueError: as ``apex_te.Linear`` raises them.
    """

    def __init__(
        self,
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
        parameters_split: Any = None,
        device: torch.device | str | int | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        check_overlap(
            "Linear",
            symmetric_ar_type,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
        )
        super().__init__(
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
            parameters_split=stripped_names(parameters_split),
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
            name=name,
            device=default_device(device),
        )
        self._finish(ub_name)

    def forward(  # type: ignore[override]
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Applies the layer as ``apex_te.Linear`` does.

        Args:
            inp, is_first_microbatch: as in ``apex_te.Linear.forward``.
            fp8_output, fp8_grad: must be False.

        Returns:
            ``out`` [..., out_features], or with ``return_bias`` a tuple of it and the bias (empty
            if there is none).

        Raises:
            NotImplementedError: the output or its gradient is asked for in FP8.
            TypeError, ValueError: as ``apex_te.Linear.forward`` raises them.
        """
        if fp8_output or fp8_grad:
            checked_forward("Linear", fp8_output, fp8_grad)
        return LinearLayer.forward(self, inp, None, None, is_first_microbatch)
