"""``FusedSGD`` with Transformer Engine's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .....optimizers import fused_sgd as _fused_sgd
from ..._names import named

__all__ = ["FusedSGD"]


@named("transformer_engine.pytorch.optimizers.fused_sgd")
class FusedSGD(_fused_sgd.FusedSGD):
    """Stochastic gradient descent; ``apex_te.optimizers.FusedSGD``.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum: as in
            ``apex_te.optimizers.FusedSGD``; ``lr`` must be given.
        materialize_master_grads: has no effect; gradients are read in the dtype that they have.
        set_grad_none: False makes ``zero_grad()`` fill gradients with 0; None and True drop them.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter | dict[str, Any]],
        lr: float | torch.Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, set_grad_none is not False,
            wd_after_momentum=wd_after_momentum,
        )  # fmt: skip
        self.materialize_master_grads = materialize_master_grads
