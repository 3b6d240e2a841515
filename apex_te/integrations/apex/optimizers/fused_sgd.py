"""``FusedSGD`` with apex's arguments and attributes."""

from __future__ import annotations

from typing import Any

from ....compatibility.apex import amp_C
from ....optimizers import fused_sgd
from ._overflow import Overflow


class FusedSGD(Overflow, fused_sgd.FusedSGD):
    """Stochastic gradient descent; ``apex_te.optimizers.FusedSGD`` with apex's arguments.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum, set_grad_none:
            as for that class.
        materialize_master_grads: accepted, without effect: ``amp`` unscales gradients into those
            of master weights.

    Raises:
        ValueError: a value is out of range.
    """

    multi_tensor_sgd = staticmethod(amp_C.multi_tensor_sgd)
    most_recent_scale = 1.0
    scale_set_by_backward = False

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        self.materialize_master_grads = materialize_master_grads
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, set_grad_none,
            wd_after_momentum=wd_after_momentum,
        )  # fmt: skip
