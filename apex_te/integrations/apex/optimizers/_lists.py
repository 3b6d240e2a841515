"""Base of apex's optimizers that step lists of parameters by the functions of ``amp_C``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

CHUNK = 65536  # elements; has no effect


class ListOptimizer(torch.optim.Optimizer):
    """Optimizer whose subclasses define ``_step_group``, which steps parameters with gradients."""

    def __init__(self, params: Any, defaults: dict[str, Any], *, set_grad_none: bool) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)
        self._flags: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def _at_least_zero(cls, **options: float) -> None:
        for name, value in options.items():
            if not value >= 0.0:
                raise ValueError(f"{cls.__name__}: {name} must be at least 0, got {value}")

    @classmethod
    def _refuse_amsgrad(cls, amsgrad: bool) -> None:
        if amsgrad:
            raise RuntimeError(f"{cls.__name__}: amsgrad must be False, got True")

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops or zeroes gradients; None uses the constructor's ``set_grad_none``."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _flag(self, device: torch.device) -> torch.Tensor:
        """Returns the overflow flag of a device, one int32 element, 0 unless a function set it."""
        if device not in self._flags:
            self._flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._flags[device]

    def _live(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the parameters that have a gradient."""
        live = [p for p in params if p.grad is not None]
        for p in live:
            if p.grad.layout is not torch.strided:  # type: ignore[union-attr]
                raise RuntimeError(
                    f"{type(self).__name__}: gradients must be dense, got one of layout "
                    f"{p.grad.layout}; use torch.optim.SparseAdam"  # type: ignore[union-attr]
                )
        return live

    def _state_of(self, params: Iterable[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Returns the state ``name`` of parameters, zeros in their dtype at first."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p, requires_grad=False)
        return [self.state[p][name] for p in params]

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """Steps parameters of one device, all that ``group`` has there with a gradient."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The result of ``closure``, None without a closure.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params in by_device(self._live(group["params"])):
                self._step_group(group, params)
        return loss


def by_device(params: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields the parameters of each device."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for p in params:
        found.setdefault(p.device, []).append(p)
    yield from found.values()


def grads_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradients of parameters that have one."""
    return [p.grad for p in params if p.grad is not None]
