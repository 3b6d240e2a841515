"""``apex_te.LayerNorm`` with MindSpeed's name and signature."""

from __future__ import annotations

from typing import Any

import torch

from ...module.layer_norm import LayerNorm
from ._config import Reader, refuse

__all__ = ["MindSpeedTELayernorm"]


class MindSpeedTELayernorm(LayerNorm):
    """``apex_te.LayerNorm`` with MindSpeed's arguments.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the variance.
        sequence_parallel: True if a rank has only some rows of the input. The parameters get it as
            their attribute ``sequence_parallel``; Megatron then sums their gradients over ranks.
        zero_centered_gamma: must be False.
        config: any object, or None; its ``params_dtype``, ``use_cpu_initialization`` and
            ``init_model_with_meta_device`` are defaults of the next two arguments.
        params_dtype, device: as in ``apex_te.LayerNorm``; None means the default from ``config``.

    Raises:
        NotImplementedError: ``zero_centered_gamma`` is True.
        TypeError: an argument is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        *,
        config: Any = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        owner = type(self).__name__
        if zero_centered_gamma:
            raise refuse(owner, "zero_centered_gamma", False, zero_centered_gamma)
        if config is not None:
            read = Reader(owner, config)
            params_dtype = read.params_dtype if params_dtype is None else params_dtype
            device = read.device if device is None else device
        super().__init__(
            hidden_size,
            eps,
            sequence_parallel=sequence_parallel,
            params_dtype=params_dtype,
            device=device,
        )
