"""``FP16_Optimizer`` of apex's older programs: float32 weights and a loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .....ops import multi_tensor


class FP16_Optimizer:
    """Master weights and a loss scale for ``FusedAdam`` and ``FusedSGD`` of this package.

    The model's parameters are in ``fp16_groups``, their float32 copies in ``fp32_groups`` and in
    the wrapped optimizer.

    Args:
        init_optimizer: the optimizer of the model's parameters, before its first step.
        static_loss_scale: the loss scale, unless that is dynamic.
        dynamic_loss_scale: begin with 2**16, halve it at an overflow, double it after 1000 steps.
        dynamic_loss_args: not available.
        verbose: print when a step is skipped.

    Raises:
        NotImplementedError: ``dynamic_loss_args`` is given.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Any = None,
        verbose: bool = True,
    ) -> None:
        if dynamic_loss_args is not None:
            raise NotImplementedError(
                "FP16_Optimizer: dynamic_loss_args must be None, got some; set the attributes "
                "cur_scale, scale_factor and scale_window"
            )
        self.optimizer = init_optimizer
        self.fp16_groups: list[list[torch.Tensor]] = []
        self.fp32_groups: list[list[torch.Tensor]] = []
        for group in init_optimizer.param_groups:
            self.fp16_groups.append(group["params"])
            group["params"] = [p.detach().float().clone().requires_grad_() for p in group["params"]]
            self.fp32_groups.append(group["params"])
        self.dynamic_loss_scale = dynamic_loss_scale
        self.cur_scale = 2.0**16 if dynamic_loss_scale else static_loss_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = 2.0
        self.scale_window = 1000
        self.verbose = verbose

    @property
    def state(self) -> Any:
        """State of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        """Groups of the wrapped optimizer, with float32 parameters."""
        return self.optimizer.param_groups

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Drops or zeroes the gradients of the model's parameters."""
        for p in (p for group in self.fp16_groups for p in group if p.grad is not None):
            p.grad = None if set_grads_to_None else p.grad.zero_()  # type: ignore[union-attr]

    def backward(self, loss: torch.Tensor) -> None:
        """Runs backward of the loss times the loss scale."""
        (loss.float() * self.cur_scale).backward()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates the float32 weights and the model's parameters, unless a gradient overflowed.

        Raises:
            NotImplementedError: ``closure`` is given.
        """
        if closure is not None:
            raise NotImplementedError("FP16_Optimizer: closure must be None, got one")
        grads = [[p.grad for p in group] for group in self.fp16_groups]
        norms: list[Any] = [multi_tensor.l2norm([g for g in own if g is not None]) for own in grads]
        is_skipped = not all(bool(norm.isfinite()) for norm in norms)
        if is_skipped:
            if self.verbose:
                print(f"FP16_Optimizer: step skipped at loss scale {self.cur_scale}: overflow")
        else:
            self.optimizer.step(
                grads=grads, output_params=self.fp16_groups, scale=self.cur_scale, grad_norms=norms
            )
        self._update_scale(is_skipped)

    def _update_scale(self, is_skipped: bool) -> None:
        if self.dynamic_loss_scale:
            if is_skipped:
                self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
                self.last_overflow_iter = self.cur_iter
            elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    _SAVED = (
        "dynamic_loss_scale",
        "cur_scale",
        "cur_iter",
        "last_overflow_iter",
        "scale_factor",
        "scale_window",
    )

    def state_dict(self) -> dict[str, Any]:
        """Returns the loss scale, the wrapped optimizer's state and the float32 weights."""
        saved = {name: getattr(self, name) for name in self._SAVED}
        saved["optimizer_state_dict"] = self.optimizer.state_dict()
        saved["fp32_groups"] = self.fp32_groups
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict; the model's own parameters are to be loaded before or after."""
        for name in self._SAVED:
            setattr(self, name, state_dict[name])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for group, saved in zip(self.fp32_groups, state_dict["fp32_groups"], strict=True):
            for p, value in zip(group, saved, strict=True):
                p.copy_(value)
