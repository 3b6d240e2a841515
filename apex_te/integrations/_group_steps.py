"""Optimizers whose parameter groups count the steps, as Transformer Engine's and apex's do."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..optimizers._base import FusedOptimizer
from ..runtime import moved

_STEP = "step"


class GroupSteps(FusedOptimizer):
    """Base that counts steps in ``group["step"]``, also those without gradients."""

    _required_state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def _counts_steps(self, group: dict[str, Any]) -> bool:
        return False

    def _update(self, work: Any, scalars: Any) -> None:
        for group in self.param_groups:
            self._count_step(group, scalars)
        super()._update(work, scalars)

    def _count_step(self, group: dict[str, Any], scalars: Any) -> None:
        """Adds 1 to the step count of a group unless the step is skipped."""
        device = self._device_of(group)
        found_inf = scalars.on(device)[1]
        count = group.get(_STEP, 0)
        if not isinstance(count, torch.Tensor):
            if not self.capturable and found_inf is None:
                group[_STEP] = count + 1
                return
            count = group[_STEP] = torch.full((), count, dtype=torch.float32, device=device)
        count.add_(1 if found_inf is None else found_inf.reshape(()) == 0)

    def _device_of(self, group: dict[str, Any]) -> torch.device:
        """Returns the device of a group's first parameter; of another group's if it has none."""
        every = (param for each in (group, *self.param_groups) for param in each["params"])
        return next(every).device

    def _step_of(self, group: dict[str, Any], bucket: Any) -> int | torch.Tensor | None:
        count = group[_STEP]
        return moved(count, bucket.device) if isinstance(count, torch.Tensor) else count

    def _adapted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a state dict with the step counts of parameters moved to their groups."""
        states = {k: dict(v) if isinstance(v, dict) else v for k, v in state_dict["state"].items()}
        groups = []
        for group in state_dict["param_groups"]:
            own = [states[key] for key in group["params"] if isinstance(states.get(key), dict)]
            counts = {int(state.pop(_STEP)) for state in own if _STEP in state}
            if len(counts) > 1:
                raise ValueError(
                    f"{self._name}: state_dict must have one step count for each group, "
                    f"got {sorted(counts)}"
                )
            steps = {_STEP: next(iter(counts))} if counts else {}
            groups.append({**steps, **group})
        return {**state_dict, "state": states, "param_groups": groups}

    def _prepare_group(self, group: dict[str, Any]) -> None:
        super()._prepare_group(group)
        count = group.get(_STEP)
        if count is None:
            return
        if self.capturable:
            device = self._device_of(group)
            group[_STEP] = torch.as_tensor(count, dtype=torch.float32).reshape(()).to(device)
        elif isinstance(count, torch.Tensor) and count.device.type == "cpu":
            group[_STEP] = int(count)
