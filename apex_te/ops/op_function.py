"""Base class of the ops' autograd functions, which makes them run under torch.func's transforms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import unwrap_if_dead
from torch.autograd import forward_ad

from ..runtime.tracing import transforms_active

__all__ = ["OpFunction", "eager_apply", "needs_autograd", "once_differentiable",
           "second_backward_is_refused", "unwrapped"]  # fmt: skip


def unwrapped(value: Any) -> Any:
    """Removes from a tensor the wrapper of a transform that has ended; returns other values as is.

    A tensor that has left a transform keeps its wrapper until the tensor is used.
    """
    return unwrap_if_dead(value) if isinstance(value, torch.Tensor) else value


def eager_apply(cls: Any, *args: Any) -> Any:
    """Calls an autograd function like ``torch.autograd.Function.apply`` in half the host time.

    The caller must have checked that no transform of torch.func is active.

    Args:
        cls: the ``OpFunction``.
        args: the arguments of its ``forward``.
    """
    return cls.direct(*[unwrap_if_dead(a) if isinstance(a, torch.Tensor) else a for a in args])


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a ``backward`` that has no derivative, so that asking for one raises an error.

    If autograd records the backward (``create_graph=True``), its results depend on a node that
    raises NotImplementedError. torch's decorator of this name adds the node only if an output's
    gradient requires a derivative. A penalty on the gradient of ``op(x).sum()`` would then
    silently have no gradient.
    """
    recorded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if torch.compiler.is_compiling() or transforms_active():
            return recorded(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        label = getattr(ctx._forward_cls, "LABEL", "") or ctx._forward_cls.__name__
        # Autograd runs the node only on a way to a tensor that it was asked for. An input that is
        # neither a leaf nor saved is not known here.
        leaves = [getattr(node, "variable", None) for node, _ in ctx.next_functions]
        ends = [t for t in (*grads, *leaves, *_saved(ctx)) if t is not None and t.requires_grad]
        ends.append(torch.empty(0, requires_grad=True))
        if not isinstance(results, tuple):
            return _NoDerivative.apply(label, 1, results, *ends)[0]
        return _NoDerivative.apply(label, len(results), *results, *ends)

    return call


def _saved(ctx: Any) -> tuple[torch.Tensor | None, ...]:
    """Returns what a context has saved, with its history; nothing where it cannot be read again.

    A backward may have freed or overwritten it, and a checkpoint gives it once.
    """
    try:
        return ctx.saved_tensors
    except RuntimeError:
        return ()


class _NoDerivative(torch.autograd.Function):
    """Identity of the first ``count`` of some tensors, whose derivative raises an error."""

    @staticmethod
    def forward(ctx: Any, label: str, count: int, *tensors: Any) -> tuple[Any, ...]:
        ctx.label = label
        return tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.label}: a second derivative is not supported, as its backward is "
            "once_differentiable"
        )


class OpFunction(torch.autograd.Function):
    """Autograd function with ``forward(ctx, ...)`` that runs under torch.func's transforms.

    ``grad``, ``vjp`` and ``vmap`` work and may be nested around each other; a second derivative and
    ``jvp`` raise NotImplementedError.

    Attributes:
        LABEL: the op's name in error messages; each subclass sets it.
        direct: like ``apply`` in less host time. Only for calls without an active transform of
            torch.func or forward-mode differentiation, and without tensors that have left a
            transform.
    """

    LABEL = ""
    direct: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.direct = super(torch.autograd.Function, cls).apply  # type: ignore[misc]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Calls the function with its forward's arguments, also under torch.func's transforms.

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


def second_backward_is_refused(ctx: Any) -> bool:
    """Returns True if autograd will detect that backward overwrote a tensor saved by this forward.

    Normally autograd compares version counters and refuses a second backward. It makes no such
    check if hooks such as ``torch.autograd.graph.save_on_cpu`` unpack the saved tensors, or under
    torch.func's transforms, whose ``vjp`` function may be called repeatedly. In these cases the
    result is False, and backward must copy saved tensors instead of overwriting them.

    Args:
        ctx: context of the forward that is running.
    """
    if torch.compiler.is_compiling():  # a compiler makes functions of its own without writes
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None and isinstance(ctx, torch.autograd.function.FunctionCtx)


def needs_autograd(*tensors: torch.Tensor | None) -> bool:
    """Returns True if autograd may ask for a derivative with respect to one of the tensors."""
    if not torch.is_grad_enabled():
        return False
    if any(t is not None and t.requires_grad for t in tensors):
        return True
    # Under a transform ``requires_grad`` tells nothing of the tensors that a tensor wraps.
    return not torch.compiler.is_compiling() and transforms_active()
