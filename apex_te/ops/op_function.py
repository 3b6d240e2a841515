"""Base class of the autograd functions, which run under torch.func's transforms, too."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ..runtime.tracing import transforms_active

__all__ = ["OpFunction", "eager_apply", "needs_autograd"]


# Not ``super().apply``, at which Dynamo fails where a graph breaks around it.
eager_apply = vars(torch.autograd.Function)["apply"].__func__


class OpFunction(torch.autograd.Function):
    """Autograd function with ``forward(ctx, ...)`` that runs under torch.func's transforms.

    ``grad``, ``vjp`` and ``vmap`` work and may be nested around each other; a second derivative and
    ``jvp`` raise NotImplementedError. A subclass says in ``LABEL`` what errors call it.
    """

    LABEL = ""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Applies the function, under the transforms of torch.func as well."""
        # A compiler does not come here: it traces forward and backward by itself.
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
    # Under a transform a tensor does not say whether one that it stands for needs a gradient.
    return not torch.compiler.is_compiling() and transforms_active()
