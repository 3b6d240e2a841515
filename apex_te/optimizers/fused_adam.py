"""Fused Adam and AdamW, which update all parameters in a few launches."""

from __future__ import annotations

from typing import Any

import torch

from ..ops import multi_tensor_optim
from ._base import FusedOptimizer, Work
from ._scalars import Scalars

__all__ = ["FusedAdam"]


class FusedAdam(FusedOptimizer):
    """Adam with decoupled (AdamW) or L2 weight decay, equal to torch.optim's to fp32 rounding.

    Interface and defaults follow apex's and TransformerEngine's FusedAdam. State of each parameter:
    ``step``, ``exp_avg``, ``exp_avg_sq`` and, with master weights, ``master_param``. As in
    torch.optim, a parameter's step count leaves out the steps at which it has no gradient. Training
    resumed from a loaded state dict is bitwise equal to training that went on.

    Args:
        params: parameters or groups, float32, float16 or bfloat16, mixed, on any devices; FP8
            parameters with ``master_weights=True``, each updated by ``param.copy_(master)``.
            Parameters may be DTensors, sharded or replicated over any meshes: a rank updates its
            local tensor, bitwise as it would be in an update of the whole, and the state is
            DTensors with the parameter's placements. A gradient with other placements is
            redistributed.
        lr: learning rate; a number or a tensor of one element.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        adam_w_mode: decoupled weight decay (AdamW); False adds it to the gradient (Adam).
        weight_decay: coefficient of the weight decay; 0 turns it off.
        amsgrad: not available; True raises NotImplementedError.
        set_grad_none: True makes ``zero_grad()`` drop gradients, False fill them with 0.
        capturable: keep the step count and ``group["lr"]`` as float32 tensors on the device, so
            that the step can be captured in a CUDA graph, after one outside it. Change the rate
            by ``group["lr"].fill_``, as torch's schedulers do.
        master_weights: keep a float32 copy of every 16-bit or FP8 parameter, which the step
            updates; the parameter is the copy's rounded value. Copies are made at the first step:
            load a model's weights before it, or load this optimizer's state with them.
        master_weight_dtype: must be torch.float32.
        exp_avg_dtype, exp_avg_sq_dtype: torch.float32 or torch.bfloat16, in which the moments are
            kept between steps. The arithmetic is in float32 either way, through float32 copies of
            at most 2**25 elements (or one parameter) at a time; rounding is to nearest. A bfloat16
            number cannot change by less than 1/512 of itself, nor always by less than 1/256:
            ``exp_avg_sq`` in bfloat16 loses small updates with ``betas[1]`` of 0.999 once
            gradients shrink; use 0.99 or less.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a value is out of range.
        NotImplementedError: an option is not available.
    """

    _required_state = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
    ) -> None:
        if amsgrad:
            raise NotImplementedError("FusedAdam: amsgrad must be False, got True")
        self.adam_w_mode = adam_w_mode
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
            capturable=capturable,
            master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            set_grad_none=set_grad_none,
            moment_dtypes={"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "adam_w_mode": self.adam_w_mode}

    def _update(self, work: list[Work], scalars: Scalars) -> None:
        names = ("betas", "eps", "weight_decay", "bias_correction")
        for group, bucket, grads in work:
            options = self._options(group, bucket, scalars, *names)
            options |= {"step": bucket.step, "adamw": self.adam_w_mode}
            bucket.run(multi_tensor_optim.adam, grads, options)
