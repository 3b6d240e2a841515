"""Scalars that a step reads on the device: the loss scale, and the flag that skips the step."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from ..runtime import moved
from ._sharded import max_over_shards


class Scalars:
    """Inverse of the loss scale and flag that skips a step, on each device that asks."""

    def __init__(self, grad_scale: Any = None, found_inf: torch.Tensor | None = None) -> None:
        inv_scale = None
        if isinstance(grad_scale, torch.Tensor):
            inv_scale = grad_scale.double().reciprocal().float()
        elif grad_scale is not None:
            inv_scale = torch.tensor(1.0 / grad_scale)
        if found_inf is not None and found_inf.dtype not in (torch.float32, torch.int32):
            found_inf = found_inf.float()
        self._values = (inv_scale, found_inf)
        self._on: dict[torch.device, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns ``(inv_scale, found_inf)`` on ``device``, each one element or None."""
        found = self._on.get(device)
        if found is None:
            inv_scale, found_inf = (None if v is None else moved(v, device) for v in self._values)
            found = self._on[device] = (inv_scale, found_inf)
        return found

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, scaler: Any = None) -> Scalars:
        """Returns the scalars of a GradScaler, else those in ``grad_scale`` and ``found_inf``.

        Raises:
            RuntimeError: it is a second step of the GradScaler before its ``update()``.
        """
        if scaler is None:
            grad_scale = getattr(optimizer, "grad_scale", None)
            return cls(grad_scale, getattr(optimizer, "found_inf", None))
        if not scaler.is_enabled():
            return cls()
        # What GradScaler.step does around an optimizer that takes its scale.
        kept = scaler._per_optimizer_states[id(optimizer)]
        if kept["stage"] is OptState.STEPPED:
            name = type(optimizer).__name__
            raise RuntimeError(f"{name}: grad_scaler.update() must come between two steps")
        scale = None
        if kept["stage"] is OptState.READY:  # else unscale_() has run
            scaler._check_inf_per_device(optimizer)
            scale = scaler._get_scale_async()
        kept["stage"] = OptState.STEPPED
        found_inf = None
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for flag in kept["found_inf_per_device"].values():
            # torch's is that of the ranks which share the first gradient.
            flag = max_over_shards(flag, params)
            if found_inf is not None:
                flag = found_inf + moved(flag, found_inf.device)
            found_inf = flag
        return cls(scale, found_inf)
