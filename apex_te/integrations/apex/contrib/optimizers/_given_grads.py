"""Base of apex's older optimizers, whose step takes gradients and low-precision parameters."""

from __future__ import annotations

from collections.abc import Callable
from types import GeneratorType
from typing import Any

import torch

from ...optimizers._lists import ListOptimizer


class GivenGrads(ListOptimizer):
    """Optimizer whose subclasses define ``_step_given``, which steps one group."""

    def _step_given(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        outputs: list[torch.Tensor] | None,
        scale: float,
        norm: Any,
    ) -> None:
        """Steps parameters by gradients, which are ``scale`` times too large, as is their norm."""
        raise NotImplementedError

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """Updates parameters.

        Args:
            closure: re-evaluates the model and returns the loss.
            grads: gradients of the parameters, a list for each group, or one list; None reads
                ``param.grad``.
            output_params: tensors that receive the new parameters, in lists likewise.
            scale: gradients are divided by it.
            grad_norms: the norm of each group's gradients as given, for ``max_grad_norm``.

        Returns:
            The result of ``closure``, None without a closure.

        Raises:
            RuntimeError: a gradient is sparse.
            ValueError: another number of gradients than of parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        count = len(self.param_groups)
        lists, outputs = _by_group(grads, count), _by_group(output_params, count)
        norms = [None] * count if grad_norms is None else list(grad_norms)
        for group, own, copies, norm in zip(self.param_groups, lists, outputs, norms, strict=True):
            params = group["params"]
            own = [p.grad for p in params] if own is None else list(own)
            if len(own) != len(params):
                raise ValueError(
                    f"{type(self).__name__}: grads must have {len(params)} entries, got {len(own)}"
                )
            live = [i for i, grad in enumerate(own) if grad is not None]
            if any(own[i].layout is not torch.strided for i in live):
                raise RuntimeError(f"{type(self).__name__}: gradients must be dense")
            if live:
                copies = None if copies is None else list(copies)
                self._step_given(
                    group, [params[i] for i in live], [own[i] for i in live],
                    None if copies is None else [copies[i] for i in live], scale, norm,
                )  # fmt: skip
        return loss


def _by_group(given: Any, count: int) -> list[Any]:
    """Returns lists for ``count`` groups, of one list or one for each."""
    if given is None:
        return [None] * count
    if isinstance(given, GeneratorType):
        return [given]
    given = list(given)
    return given if given and isinstance(given[0], (list, tuple, GeneratorType)) else [given]
