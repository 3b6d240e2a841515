"""``FusedAdam`` of apex's older programs, which hand gradients to ``step``."""

from __future__ import annotations

from typing import Any

import torch

from .....compatibility.apex import fused_adam_cuda
from ...optimizers._lists import CHUNK
from ._given_grads import GivenGrads


class FusedAdam(GivenGrads):
    """Adam whose weight decay is added to the update, inside the bias-corrected step size.

    The state of a parameter is ``step``, ``exp_avg`` and ``exp_avg_sq``, float32.

    Args:
        params: float32 parameters or parameter groups.
        lr: learning rate.
        bias_correction: correct the moments' bias, by the step size.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        eps_inside_sqrt: add ``eps`` to the second moment, below the root.
        weight_decay: coefficient of the weight decay.
        max_grad_norm: the norm of a group's gradients to which they are clipped; 0 does not clip.
        amsgrad: not available; True raises RuntimeError.
        use_mt: has no effect: a group's parameters always take one launch.
        amp_scale_adjustment: has no effect.

    Raises:
        RuntimeError: ``amsgrad`` is True.
        ValueError: an option is negative.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        self._refuse_amsgrad(amsgrad)
        self._at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        self.eps_mode = 0 if eps_inside_sqrt else 1
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none=True)

    def _step_given(self, group, params, grads, outputs, scale, norm):
        if group["max_grad_norm"] > 0 and norm is not None:
            scale *= max(1.0, (float(norm) / scale + 1e-6) / group["max_grad_norm"])
        by_step: dict[int, list[int]] = {}
        for i, p in enumerate(params):
            state = self.state[p]
            if not state:
                state["step"] = 0
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
            state["step"] += 1
            by_step.setdefault(state["step"], []).append(i)
        for step, indices in by_step.items():
            own = [params[i] for i in indices]
            lists = [own, *([self.state[p][n] for p in own] for n in ("exp_avg", "exp_avg_sq"))]
            lists.append([grads[i] for i in indices])
            if outputs is not None:
                lists.append([outputs[i] for i in indices])
            fused_adam_cuda.adam_mt(
                CHUNK, self._flag(own[0].device), lists, group["lr"], *group["betas"],
                group["eps"], scale, step, self.eps_mode, group["bias_correction"],
                group["weight_decay"],
            )  # fmt: skip
