"""Base class of the ops' autograd functions, which makes them run under torch.func's transforms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import unwrap_if_dead
from torch.autograd import forward_ad

from ..runtime.tracing import transforms_active

__all__ = ["OpFunction", "eager_apply", "needs_autograd", "once_differentiable", "unwrapped"]


def unwrapped(value: Any) -> Any:
    """Returns a tensor without the wrapper of a transform that has ended; other values as is.

    Such a wrapper stays around a tensor that has left the transform until the tensor is used.
    """
    return unwrap_if_dead(value) if isinstance(value, torch.Tensor) else value


def eager_apply(cls: Any, *args: Any) -> Any:
    """Calls an autograd function, for the case that no transform of torch.func is active.

    It does what ``torch.autograd.Function.apply`` does then, in half the host time.

    Args:
        cls: the ``OpFunction``.
        args: the arguments of its ``forward``.
    """
    return cls.direct(*[unwrap_if_dead(a) if isinstance(a, torch.Tensor) else a for a in args])


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a ``backward`` that has no derivative, so that asking for one raises an error.

    It has the effect of torch's decorator of this name, but calls that one only if autograd records
    the backward (``create_graph=True``).
    """
    recorded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            return recorded(ctx, *grads)
        return backward(ctx, *grads)

    return call


class OpFunction(torch.autograd.Function):
    """Autograd function with ``forward(ctx, ...)`` that runs under torch.func's transforms.

    ``grad``, ``vjp`` and ``vmap`` work and may be nested around each other; a second derivative and
    ``jvp`` raise NotImplementedError.

    Attributes:
        LABEL: the op's name in error messages, which each subclass sets.
        direct: does what ``apply`` does, in less host time, where neither a transform of torch.func
            nor forward-mode differentiation is active, and no argument is a tensor that has left a
            transform.
    """

    LABEL = ""
    direct: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.direct = super(torch.autograd.Function, cls).apply  # type: ignore[misc]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Calls the function on its forward's arguments, under torch.func's transforms as well.

        Returns:
            The outputs of the subclass's ``forward``.

        Raises:
            NotImplementedError: an argument has a forward-mode tangent.
        """
        # torch.compile does not call this method: it traces forward and backward itself.
        if transforms_active() or forward_ad._current_level >= 0:
            from . import transforms  # here, because importing it takes a while

            transforms.refuse_tangents(cls.LABEL, args)
            if transforms_active():
                return transforms.apply(cls, args)
        return eager_apply(cls, *args)


def needs_autograd(*tensors: torch.Tensor | None) -> bool:
    """Returns True if autograd may ask for a derivative with respect to one of the tensors."""
    if not torch.is_grad_enabled():
        return False
    if any(t is not None and t.requires_grad for t in tensors):
        return True
    # Under a transform ``requires_grad`` tells nothing of the tensors that a tensor wraps.
    return not torch.compiler.is_compiling() and transforms_active()
