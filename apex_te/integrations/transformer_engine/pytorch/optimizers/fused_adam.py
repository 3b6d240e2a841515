"""``FusedAdam`` with Transformer Engine's order of arguments and step count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .....optimizers import fused_adam as _fused_adam
from ...._group_steps import GroupSteps
from ..._names import named

__all__ = ["FusedAdam"]


@named("transformer_engine.pytorch.optimizers.fused_adam")
class FusedAdam(GroupSteps, _fused_adam.FusedAdam):
    """Adam with decoupled (AdamW) or L2 weight decay; ``apex_te.optimizers.FusedAdam``.

    As in Transformer Engine a parameter group counts the steps, in ``group["step"]``, also those at
    which a parameter has no gradient, and the state of a parameter is ``exp_avg``, ``exp_avg_sq``
    and, with master weights, ``master_param``. State dicts of ``torch.optim`` and of apex_te's
    class load, too, if all parameters of a group have taken as many steps.
    """

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
