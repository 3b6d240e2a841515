"""``FusedNovoGrad``: NovoGrad in a few launches for all parameters of a group."""

from __future__ import annotations

from typing import Any

import torch

from ....compatibility.apex import amp_C
from ....ops import multi_tensor
from ._lists import CHUNK, ListOptimizer, grads_of


class FusedNovoGrad(ListOptimizer):
    """NovoGrad (arXiv 1905.11286): Adam whose second moment is one norm of each gradient.

    The state of a parameter is ``exp_avg``, in its dtype. ``group["exp_avg_sq"]`` has the averaged
    norms, not their squares, in order: those of float16 and bfloat16 parameters, and those of
    float32 ones. ``group["step"]`` counts the steps.

    Args:
        params: parameters or parameter groups, float32, float16 or bfloat16, each group on one
            device. The parameters that have gradients must stay the same.
        lr: learning rate.
        bias_correction: divide the moment and the norm by their bias corrections.
        betas: decay of the moment and of the squared norm, each in [0, 1).
        eps: added to the norm.
        weight_decay: coefficient of weight decay.
        amsgrad: not available; True raises RuntimeError.
        reg_inside_moment: average normalised gradients with the weight decay added, instead of
            normalising the average and decaying the weights directly.
        grad_averaging: the gradient enters ``exp_avg`` with weight ``1 - betas[0]`` instead of 1.
        norm_type: 2 for L2 norms, 0 for largest magnitudes.
        init_zero: begin with norms of 0 instead of those of the first gradients.
        set_grad_none: True makes ``zero_grad()`` drop gradients.

    Raises:
        RuntimeError: ``amsgrad`` is True, or ``norm_type`` is neither 0 nor 2.
        ValueError: ``lr``, ``eps`` or ``weight_decay`` is negative.
    """

    multi_tensor_novograd = staticmethod(amp_C.multi_tensor_novograd)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self._refuse_amsgrad(amsgrad)
        self._at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad: norm_type must be 0 or 2, got {norm_type!r}")
        self.moment_mode = 0 if reg_inside_moment else 1
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "grad_averaging": grad_averaging,
            "norm_type": norm_type, "init_zero": init_zero,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict, with the norms on the devices of their parameters."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if "exp_avg_sq" in group and group["params"]:
                device = group["params"][0].device
                group["exp_avg_sq"] = [norms.to(device) for norms in group["exp_avg_sq"]]

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        group["step"] = group.get("step", 0) + 1
        narrow = [p for p in params if p.dtype is not torch.float32]
        wide = [p for p in params if p.dtype is torch.float32]
        if "exp_avg_sq" not in group:
            group["exp_avg_sq"] = [self._first_norms(group, part) for part in (narrow, wide)]
        for part, norms in zip((narrow, wide), group["exp_avg_sq"], strict=True):
            if len(part) != norms.numel():
                raise ValueError(
                    f"FusedNovoGrad: params with gradients must stay the same, got {len(part)} "
                    f"after {norms.numel()} (of one precision)"
                )
            if not part:
                continue
            self.multi_tensor_novograd(
                CHUNK, self._flag(part[0].device),
                [grads_of(part), part, self._state_of(part, "exp_avg")], norms, group["lr"],
                *group["betas"], group["eps"], group["step"], group["bias_correction"],
                group["weight_decay"], group["grad_averaging"], self.moment_mode,
                group["norm_type"],
            )  # fmt: skip

    def _first_norms(self, group: dict[str, Any], params: list[torch.Tensor]) -> torch.Tensor:
        """Returns the norms before the first step, which the first average keeps."""
        if group["init_zero"] or not params:
            device = group["params"][0].device
            return torch.zeros(len(params), dtype=torch.float32, device=device)
        grads = grads_of(params)
        if group["norm_type"] == 0:
            return multi_tensor.amax(grads)
        return multi_tensor.l2norm(grads, per_tensor=True)[1]
