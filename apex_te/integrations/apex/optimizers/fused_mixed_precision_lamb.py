"""``FusedMixedPrecisionLamb``: LAMB with float32 weights of its own, without a wait of the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ....compatibility.apex import amp_C
from ._lists import CHUNK, ListOptimizer, grads_of


class FusedMixedPrecisionLamb(ListOptimizer):
    """LAMB (arXiv 1904.00962) whose learning rate, step count and loss scale stay on the device.

    ``group["lr"]`` and ``group["step"]`` are tensors. The state of a parameter is ``exp_avg`` and
    ``exp_avg_sq``, float32. Parameters of ``reduced_precision_dtype`` get float32 master weights at
    the first step, in ``param_groups_full_precision``, which no state dict has.

    Args:
        params: parameters or parameter groups on one device, each group of one dtype.
        lr: learning rate.
        step: number of steps that have been taken.
        bias_correction: divide the moments by their bias corrections.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: coefficient of weight decay.
        amsgrad: not available; True raises RuntimeError.
        adam_w_mode: decoupled weight decay; False adds it to the gradient.
        grad_averaging: the gradient enters ``exp_avg`` with weight ``1 - betas[0]`` instead of 1.
        max_grad_norm: clip the joint norm of all gradients to this value; 0 does not clip.
        use_nvlamb: also scale the updates of tensors without weight decay.
        reduced_precision_dtype: dtype of the parameters that have master weights; None for none.

    Raises:
        RuntimeError: ``amsgrad`` is True.
        ValueError: ``eps`` or ``weight_decay`` is negative.
    """

    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm_mp)
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb_mp)
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        self._refuse_amsgrad(amsgrad)
        self._at_least_zero(eps=eps, weight_decay=weight_decay)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self.reduced_precision_dtype = reduced_precision_dtype
        self.param_groups_full_precision: list[dict[str, Any]] = []
        defaults = {
            "lr": torch.as_tensor(lr, dtype=torch.float32),
            "step": torch.tensor([int(step)], dtype=torch.int32),
            "bias_correction": bias_correction, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none=True)
        self._place()

    def _place(self) -> None:
        """Gives each group a learning rate and a step count of its own, on its device."""
        for group in self.param_groups:
            device = group["params"][0].device
            for name, dtype in (("lr", torch.float32), ("step", torch.int32)):
                value = torch.as_tensor(group[name]).to(device, dtype, copy=True)
                group[name] = value.reshape(()) if name == "lr" else value.reshape(1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict; the moments become float32, and master weights are made again."""
        super().load_state_dict(state_dict)
        self._place()
        for state in self.state.values():
            state.update({name: value.float() for name, value in state.items()})
        self.param_groups_full_precision = []

    def _setup_full_precision_params(self) -> None:
        """Makes the master weights from the parameters."""
        self.param_groups_full_precision = [
            {
                "params": [
                    p.detach().clone().float() if p.dtype is self.reduced_precision_dtype else None
                    for p in group["params"]
                ]
            }
            for group in self.param_groups
        ]

    def _scales(
        self, grad_scaler: Any, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the loss scale, and the scaler's flag of gradients that are not finite."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if grad_scaler is not None:
            scale = grad_scaler._get_scale_async()
            found = grad_scaler._check_inf_per_device(self)[device]
        if scale is None:
            scale = torch.ones((), dtype=torch.float32, device=device)
        return scale.to(device, torch.float32).reshape(1), found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Updates the parameters that have a gradient, unless the loss scaler skips the step.

        Args:
            closure: re-evaluates the model and returns the loss.
            grad_scaler: keyword only; a ``torch.amp.GradScaler``, whose scale the gradients have.
                ``grad_scaler.step(optimizer)`` has the same effect.

        Returns:
            The result of ``closure``, None without a closure.

        Raises:
            RuntimeError: a gradient is sparse.
            TypeError: an argument is unknown.
        """
        grad_scaler = options.pop("grad_scaler", None)  # which torch would hand over if it saw it
        if options:
            raise TypeError(
                f"FusedMixedPrecisionLamb: step has no argument {next(iter(options))!r}"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.param_groups_full_precision:
            self._setup_full_precision_params()
        live = [self._live(group["params"]) for group in self.param_groups]
        grads = [grad for params in live for grad in grads_of(params)]
        if not grads:
            return loss
        device = grads[0].device
        flag = self._flag(device)
        scale, found = self._scales(grad_scaler, device)
        if found is None:
            flag.zero_()
        else:
            flag.copy_(found.reshape(1) != 0)
        norm = self.multi_tensor_l2norm(CHUNK, flag.clone(), [grads], False)[0]
        for group, wide, params in zip(
            self.param_groups, self.param_groups_full_precision, live, strict=True
        ):
            if params:
                self._step_lists(group, wide["params"], params, flag, norm, scale)
        return loss

    def _step_lists(self, group, wide, params, flag, norm, scale):
        """Steps the parameters of one group that have gradients; ``wide`` are master weights."""
        group["step"].add_(flag == 0)
        master_of = dict(zip(group["params"], wide, strict=True))
        masters = [master_of[p] for p in params]
        weights = [p if w is None else w for p, w in zip(params, masters, strict=True)]
        for p, weight in zip(params, weights, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in self.state[p]:
                    self.state[p][name] = torch.zeros_like(weight, dtype=torch.float32)
        moments = [[self.state[p][n] for p in params] for n in ("exp_avg", "exp_avg_sq")]
        lists = [grads_of(params), weights, *moments]
        if any(master is not None for master in masters):
            lists.append(params)
        max_norm = scale * (group["max_grad_norm"] or math.inf)
        self.multi_tensor_lamb(
            CHUNK, flag, lists, group["lr"], *group["betas"], group["eps"], group["step"],
            group["bias_correction"], group["weight_decay"], group["grad_averaging"],
            self.adam_w_mode, norm, max_norm, self.use_nvlamb, flag,
            scale.double().reciprocal().float(),
        )  # fmt: skip
