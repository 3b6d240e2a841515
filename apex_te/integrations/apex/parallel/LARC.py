"""Layer-wise adaptive rates around an optimizer."""

from __future__ import annotations

from typing import Any

import torch


class LARC:
    """Layer-wise adaptive rate control: scales each gradient by parameter norm over gradient norm.

    With ``a = trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)`` the gradient becomes
    ``(g + weight_decay * p) * a``, where neither norm is 0; the optimizer then steps without weight
    decay. If a norm is 0, the gradient stays as it is, without weight decay. The host does not
    wait for the norms.

    Args:
        optimizer: the wrapped optimizer; its other methods and its state are available on this
            object.
        trust_coefficient: fraction of a parameter's norm that a step may change it by.
        clip: use ``min(a / lr, 1)`` for a, so that lr is an upper bound of the rate; False scales
            lr by a.
        eps: added to the denominator.

    Source: apex.parallel.LARC, a form of LARS (arXiv 1708.03888).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    def __getstate__(self) -> Any:
        return self.optim.__getstate__()

    def __setstate__(self, state: Any) -> None:
        self.optim.__setstate__(state)

    @property
    def state(self) -> Any:
        """State of the optimizer."""
        return self.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state dict."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict into the optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients as the optimizer does."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the optimizer."""
        self.optim.add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Scales the gradients in place and steps the optimizer; returns what that returns.

        Args:
            closure: argument of the optimizer's ``step``; gradients that it computes are not
                scaled.
        """
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            self._scale(group, decay)
        try:
            for group in self.optim.param_groups:
                group["weight_decay"] = 0
            return self.optim.step() if closure is None else self.optim.step(closure)
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    def _scale(self, group: dict[str, Any], decay: float) -> None:
        """Replaces a group's gradients by the scaled ones."""
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        grads = [p.grad for p in params]
        norms = zip(torch._foreach_norm(params), torch._foreach_norm(grads), strict=True)
        for p, g, (of_param, of_grad) in zip(params, grads, norms, strict=True):
            of_param, of_grad = of_param.float(), of_grad.float()
            rate = self.trust_coefficient * of_param / (of_grad + of_param * decay + self.eps)
            if self.clip:
                rate = (rate / group["lr"]).clamp(max=1.0)
            is_scaled = (of_param != 0) & (of_grad != 0)
            rate = rate.where(is_scaled, 1.0)
            own_decay = (rate * decay).where(is_scaled, 0.0)
            g.copy_(g * rate + p * own_decay)
