"""Loss scaler whose ranks skip a step together."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from .. import parallel_state


class GradScaler(torch.amp.GradScaler):
    """Loss scaler of torch, with an overflow on any rank of the model counting on all.

    Args:
        init_scale: factor of the loss at first.
        growth_factor: by which it grows.
        backoff_factor: by which it shrinks after an overflow.
        growth_interval: steps without an overflow after which it grows.
        enabled: False makes it do nothing.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        """Unscales gradients, and shares over ranks whether one is infinite or NaN."""
        found = super()._unscale_grads_(*args, **kwargs)
        group = parallel_state.get_model_parallel_group()
        device = "cuda" if self._device == "cuda" else "cpu"
        largest = torch.zeros(1, device=device)
        for flag in found.values():
            largest = torch.maximum(largest, flag.to(device).reshape(1))
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group)
        for flag in found.values():
            flag.copy_(largest.reshape(flag.shape))
        return found
