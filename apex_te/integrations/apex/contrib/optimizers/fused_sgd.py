"""``FusedSGD`` of apex's older programs, which hand gradients to ``step``."""

from __future__ import annotations

from typing import Any

from .....compatibility.apex import amp_C
from ...optimizers._lists import CHUNK
from ._given_grads import GivenGrads


class FusedSGD(GivenGrads):
    """Stochastic gradient descent; the state of a parameter is ``momentum_buffer``.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        momentum: factor of the momentum buffers.
        dampening: the gradient enters the momentum buffers with weight 1 - dampening.
        weight_decay: L2 coefficient.
        nesterov: use Nesterov momentum; requires momentum and no dampening.
        wd_after_momentum: add the weight decay after the momentum.
        materialize_master_grads: has no effect.

    Raises:
        ValueError: an option is negative, or ``nesterov`` is given without momentum.
    """

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
    ) -> None:
        self._at_least_zero(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                "FusedSGD: nesterov must be False without momentum or with dampening, got True"
            )
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none=True)

    def _step_given(self, group, params, grads, outputs, scale, norm):
        for is_first in (False, True):
            chosen = [
                i for i, p in enumerate(params)
                if ("momentum_buffer" not in self.state[p]) is is_first
            ]  # fmt: skip
            if not chosen:
                continue
            own = [params[i] for i in chosen]
            lists = [[grads[i] for i in chosen], own, self._state_of(own, "momentum_buffer")]
            if outputs is not None:
                lists.append([outputs[i] for i in chosen])
            amp_C.multi_tensor_sgd(
                CHUNK, self._flag(own[0].device), lists, group["weight_decay"], group["momentum"],
                group["dampening"], group["lr"], group["nesterov"], is_first,
                self.wd_after_momentum, 1.0 / scale,
            )  # fmt: skip
