"""``FusedAdam`` with Transformer Engine's order of arguments and step count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .....optimizers import fused_adam as _fused_adam
from .....runtime import moved
from ..._names import named

__all__ = ["FusedAdam"]

_STEP = "step"


@named("transformer_engine.pytorch.optimizers.fused_adam")
class FusedAdam(_fused_adam.FusedAdam):
    """Adam with decoupled (AdamW) or L2 weight decay; ``apex_te.optimizers.FusedAdam``.

    As in Transformer Engine a parameter group counts the steps, in ``group["step"]``, also those at
    which a parameter has no gradient, and the state of a parameter is ``exp_avg``, ``exp_avg_sq``
    and, with master weights, ``master_param``. State dicts of ``torch.optim`` and of apex_te's
    class load, too, if all parameters of a group have taken as many steps.
    """

    _required_state = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter | dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool | Sequence[torch.Tensor | None] = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad,
            set_grad_none is not False, capturable, master_weights,
            master_weight_dtype=master_weight_dtype, exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype, use_decoupled_grad=use_decoupled_grad,
            store_param_remainders=store_param_remainders,
        )  # fmt: skip

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

    def _initialize_state(
        self,
        param: torch.Tensor,
        state_name: str,
        zero_buffer: bool,
        store_param_remainders: bool = False,
    ) -> None:
        """Makes one state of a parameter, zeros; frameworks override it."""
        dtype = torch.int16 if store_param_remainders else torch.float32
        zeros = torch.zeros(param.shape, dtype=dtype, device=param.device)
        self.set_scaled_state(param, state_name, zeros)

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
