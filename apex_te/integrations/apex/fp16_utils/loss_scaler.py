"""Loss scalers whose scale is a number of the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ....ops import multi_tensor


class LossScaler:
    """Loss scaler with a fixed scale.

    Args:
        scale: the scale.
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Returns False: gradients are not checked, and ``params`` are not read."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing."""

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Any, ...]:
        """Returns the gradients of a module's inputs times the scale, for a full backward hook.

        Args:
            module, grad_out: not read.
            grad_in: gradients of the inputs; None entries stay None.
        """
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Runs the backward of the loss times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """Loss scaler that divides its scale after an overflow, and multiplies it after good steps.

    Args:
        init_scale: where it starts.
        scale_factor: the factor.
        scale_window: number of steps without an overflow after which the scale grows.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Returns True if a gradient is not finite; waits for the device."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for param in params:
            if param.grad is not None:
                by_device.setdefault(param.grad.device, []).append(param.grad.detach())
        norms: list[Any] = [multi_tensor.l2norm(grads) for grads in by_device.values()]
        return not all(bool(norm.isfinite()) for norm in norms)

    def update_scale(self, overflow: bool) -> None:
        """Updates the scale after a step, or after one that is skipped for an overflow."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
