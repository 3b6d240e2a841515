"""``FusedAdagrad``: Adagrad in one launch for all parameters of a group."""

from __future__ import annotations

from typing import Any

import torch

from ....compatibility.apex import amp_C
from ._lists import CHUNK, ListOptimizer, grads_of


class FusedAdagrad(ListOptimizer):
    """Adagrad, as ``torch.optim.Adagrad`` with ``lr_decay=0``.

    The state of a parameter is ``sum``, in its dtype.

    Args:
        params: parameters or parameter groups, float32, float16 or bfloat16.
        lr: learning rate.
        eps: added to the root of the sums of squared gradients.
        weight_decay: coefficient of weight decay.
        set_grad_none: True makes ``zero_grad()`` drop gradients.
        adagrad_w_mode: decay the weights directly instead of adding the decay to the gradient.

    Raises:
        ValueError: ``lr``, ``eps`` or ``weight_decay`` is negative.
    """

    multi_tensor_adagrad = staticmethod(amp_C.multi_tensor_adagrad)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self._at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        self.multi_tensor_adagrad(
            CHUNK, self._flag(params[0].device),
            [grads_of(params), params, self._state_of(params, "sum")],
            group["lr"], group["eps"], self.adagrad_w_mode, group["weight_decay"],
        )  # fmt: skip
