"""Scalars of a step that stay on the device: the loss scale, and the flag that skips the step."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from ..comm.shards import max_over_shards, mesh_groups, part_groups
from ..runtime import moved


class Scalars:
    """Inverse loss scale and skip flag of one step, copied to each device that asks for them.

    Gradients are divided by ``grad_scale``. A ``found_inf`` of one element that is not 0 skips the
    step; None never does, nor does the 0 of a ``GradScaler`` that has found no gradient.
    """

    def __init__(self, grad_scale: Any = None, found_inf: Any = None) -> None:
        inv_scale = None
        if isinstance(grad_scale, torch.Tensor):
            inv_scale = grad_scale.double().reciprocal().float()
        elif grad_scale is not None:
            inv_scale = torch.tensor(1.0 / grad_scale)
        if not isinstance(found_inf, torch.Tensor):
            found_inf = None
        elif found_inf.dtype not in (torch.float32, torch.int32):
            found_inf = found_inf.float()
        self._values = (inv_scale, found_inf)
        self._on: dict[torch.device, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns ``(inv_scale, found_inf)`` on ``device``, each of one element or None."""
        found = self._on.get(device)
        if found is None:
            inv_scale, found_inf = (None if v is None else moved(v, device) for v in self._values)
            found = self._on[device] = (inv_scale, found_inf)
        return found

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, scaler: Any = None) -> Scalars:
        """Returns the scalars for one step; ``scaler`` notes that ``optimizer`` has stepped.

        Raises RuntimeError if ``scaler.update()`` was not called since the last step, or if
        ``GradScaler.step`` has not asked all ranks that hold parts of the parameters.
        """
        is_reduced = optimizer.__dict__.pop("found_inf_is_reduced", False)
        if scaler is None:
            found_inf = getattr(optimizer, "found_inf", None)
            # amp, which has asked all ranks, sets no grad_scale.
            from_scaler = hasattr(optimizer, "grad_scale") and isinstance(found_inf, torch.Tensor)
            if from_scaler and not is_reduced and _is_of_one_rank(optimizer):
                raise RuntimeError(
                    f"{type(optimizer).__name__}: found_inf must be that of all ranks that hold "
                    "parts of the parameters, as optimizer.step(grad_scaler=scaler) or "
                    "apex_te.distributed.reduce_found_inf before scaler.step(optimizer) makes it, "
                    "got that of this rank's part"
                )
            return cls(getattr(optimizer, "grad_scale", None), found_inf)
        if not hasattr(scaler, "is_enabled"):
            raise TypeError(
                f"{type(optimizer).__name__}: grad_scaler must be a torch.amp.GradScaler, "
                f"got {type(scaler).__name__}"
            )
        if not scaler.is_enabled():
            return cls()
        # This is what GradScaler.step does for an optimizer that takes its scale.
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
            if not is_reduced:
                flag = max_over_shards(flag, params)
            if found_inf is not None:
                flag = found_inf + moved(flag, found_inf.device)
            found_inf = flag
        return cls(scale, found_inf)


def _is_of_one_rank(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if a GradScaler's non-finite flag may be of this rank's parts alone.

    It reduces the flag of the gradients of a dtype over the mesh of the first one.
    """
    first: dict[Any, list[Any]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                key = param.grad.device, param.grad.dtype
                covered = first.setdefault(key, mesh_groups(param.grad))
                if any(each not in covered for each in part_groups(param)):
                    return True
    return False
