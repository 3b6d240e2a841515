"""Fused SGD, which updates all parameters in a few launches."""

from __future__ import annotations

from typing import Any

import torch

from ..ops import multi_tensor, multi_tensor_optim
from ..runtime.named_arguments import named_arguments
from ._base import FusedOptimizer, Work
from ._scalars import Scalars

__all__ = ["FusedSGD"]

_BUFFER = "momentum_buffer"


class FusedSGD(FusedOptimizer):
    """Stochastic gradient descent, equal to ``torch.optim.SGD`` up to fp32 rounding.

    State of each parameter: ``momentum_buffer`` with momentum, ``step`` with momentum and
    dampening, ``master_param`` with master weights.

    Args:
        params: parameters or parameter groups, in float32, float16, bfloat16 or, with master
            weights, FP8.
        lr, set_grad_none, capturable, master_weights, master_weight_dtype: as in ``FusedAdam``.
        momentum: factor of the momentum buffer at each step; 0 keeps no buffers.
        dampening: the gradient is added to the momentum buffer with weight ``1 - dampening``; at
            the first step with weight 1.
        weight_decay: coefficient of the L2 term that is added to the gradient.
        nesterov: use Nesterov momentum; requires momentum and no dampening.
        wd_after_momentum: add the L2 term to the update after the momentum, instead of to the
            gradient: ``param -= lr * (update + weight_decay * param)``.
        momentum_dtype: dtype of the momentum buffers between steps, torch.float32 or
            torch.bfloat16.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a value is out of range.
    """

    wd_after_momentum: bool = False  # for what earlier releases have pickled

    @named_arguments()
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        set_grad_none: bool = True,
        *,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        momentum_dtype: torch.dtype = torch.float32,
        wd_after_momentum: bool = False,
    ) -> None:
        self._check("momentum_dtype", momentum_dtype, (torch.float32, torch.bfloat16))
        self.wd_after_momentum = wd_after_momentum
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
            capturable=capturable,
            master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            set_grad_none=set_grad_none,
            moment_dtypes={_BUFFER: momentum_dtype},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "wd_after_momentum": self.wd_after_momentum}

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        self._at_least_zero("momentum", group["momentum"])
        self._check_number("dampening", group["dampening"])
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                "FusedSGD: nesterov must be False without momentum or with dampening, got True"
            )

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (_BUFFER,) if group["momentum"] else ()

    def _counts_steps(self, group: dict[str, Any]) -> bool:
        # Only dampening tells the first step, whose buffer is the whole gradient, from the others.
        return bool(group["momentum"] and group["dampening"])

    def _update(self, work: list[Work], scalars: Scalars) -> None:
        names = ("momentum", "dampening", "weight_decay", "nesterov")
        op: Any = _decay_last if self.wd_after_momentum else multi_tensor_optim.sgd
        for group, bucket, grads in work:
            options = self._options(group, bucket, scalars, *names)
            step, found_inf = bucket.step, options["found_inf"]
            if not isinstance(step, torch.Tensor):
                bucket.run(op, grads, {**options, "first_step": step == 1})
                continue
            # Only the device knows whether this step is the first: one of two launches is idle.
            for first_step, other in ((True, step != 1), (False, step == 1)):
                skip = other if found_inf is None else other | (found_inf.reshape(()) != 0)
                chosen = {**options, "first_step": first_step, "found_inf": skip.float()}
                bucket.run(op, grads, chosen)


def _decay_last(
    params: Any,
    grads: Any,
    *momentums: Any,
    masters: Any,
    lr: Any,
    weight_decay: float,
    found_inf: torch.Tensor | None,
    **options: Any,
) -> None:
    """Steps SGD with the weight decay after the momentum.

    ``p - lr (m + wd p) = (1 - lr wd) p - lr m``: weights are scaled first, and so rounded once.
    """
    weights, copies = params if masters is None else masters, None
    if masters is None and any(p.dtype is not torch.float32 for p in params):
        weights = copies = [p.detach().float().contiguous() for p in params]
    factor: Any = 1.0 - lr * weight_decay
    if found_inf is not None:
        taken = found_inf.reshape(()) == 0
        factor = torch.as_tensor(factor, dtype=torch.float32, device=taken.device).reshape(())
        factor = torch.where(taken, factor, 1.0)
    multi_tensor.scale(weights, weights, factor)
    target = params if copies is None else copies
    multi_tensor_optim.sgd(
        target, grads, *momentums, masters=masters, lr=lr, found_inf=found_inf, **options
    )
    if copies is not None:
        multi_tensor.scale(copies, params, 1.0)
