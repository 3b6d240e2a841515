"""Base class of the ops' autograd functions, which makes them run under torch.func's transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ..runtime.tracing import transforms_active

__all__ = ["OpFunction", "eager_apply", "needs_autograd"]


# ``torch.autograd.Function.apply`` as a plain function of the class and its arguments. Dynamo fails
# at ``super().apply`` where a graph breaks around it.
eager_apply = vars(torch.autograd.Function)["apply"].__func__


class OpFunction(torch.autograd.Function):
    """Autograd function with ``forward(ctx, ...)`` that runs under torch.func's transforms.

    ``grad``, ``vjp`` and ``vmap`` work and may be nested around each other; a second derivative and
    ``jvp`` raise NotImplementedError.

    Attributes:
        LABEL: the op's name in error messages, which each subclass sets.
    """

    LABEL = ""

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
