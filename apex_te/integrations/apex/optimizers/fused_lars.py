"""``FusedLARS``: SGD with a learning rate for each tensor."""

from __future__ import annotations

from typing import Any

import torch

from ....compatibility.apex import amp_C
from ....ops import multi_tensor
from ._lists import CHUNK, ListOptimizer, grads_of


class FusedLARS(ListOptimizer):
    """LARS (arXiv 1708.03888): SGD with a learning rate for each tensor.

    That is ``lr * trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)``, and ``lr`` if a
    norm is 0 or if the group has the option ``is_skipped=True``. The state of a parameter
    is ``momentum_buffer``, in its dtype.

    Args:
        params: parameters or parameter groups, float32, float16 or bfloat16.
        lr: learning rate.
        momentum: factor of the momentum buffers, which hold changes of the parameters.
        dampening: must be 0 with ``nesterov``; has no effect, as in apex.
        weight_decay: L2 coefficient.
        trust_coefficient, eps: see the formula.
        nesterov: use Nesterov momentum; requires momentum.
        wd_after_momentum: has no effect, as in apex.
        materialize_master_grads: has no effect: amp's master weights have gradients of their own.
        set_grad_none: True makes ``zero_grad()`` drop gradients.

    Raises:
        ValueError: ``lr``, ``momentum``, ``weight_decay`` or ``eps`` is negative, or ``nesterov``
            is given without momentum or with dampening.
    """

    multi_tensor_lars = staticmethod(amp_C.multi_tensor_lars)

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        self._at_least_zero(lr=lr, momentum=momentum, weight_decay=weight_decay, eps=eps)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                "FusedLARS: nesterov must be False without momentum or with dampening, got True"
            )
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient, "eps": eps, "nesterov": nesterov,
            "is_skipped": False,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        grads = grads_of(params)
        norms = [multi_tensor.l2norm(each, per_tensor=True)[1] for each in (grads, params)]
        self.multi_tensor_lars(
            CHUNK, self._flag(params[0].device),
            [grads, params, self._state_of(params, "momentum_buffer")], *norms, group["lr"],
            group["trust_coefficient"], group["eps"], group["weight_decay"], group["momentum"],
            group["dampening"], group["nesterov"], False, self.wd_after_momentum, 1.0,
            group["is_skipped"],
        )  # fmt: skip
