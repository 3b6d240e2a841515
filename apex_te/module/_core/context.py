"""Help for autograd functions: their saved tensors, ``torch.autocast`` off, and no autograd."""

from __future__ import annotations

from typing import Any

import torch


def is_autocast(device_type: str) -> bool:
    """Returns True if ``torch.autocast`` is on for a device type; never for the meta device."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_autocast(backward: Any, ctx: Any, *grads: Any) -> Any:
    """Returns ``backward(ctx, *grads)``, run without autocast, in the dtypes of forward."""
    device_type = ctx.device_type
    if not is_autocast(device_type):
        return backward(ctx, *grads)
    with torch.autocast(device_type, enabled=False):
        return backward(ctx, *grads)


def take_saved(ctx: Any) -> tuple:
    """Returns the tensors saved in forward, and drops autograd's references to them.

    Each tensor is then freed with the caller's last reference. With ``retain_graph`` autograd keeps
    them all; without it a second backward raises RuntimeError.
    """
    if torch.compiler.is_compiling() or not isinstance(ctx, torch._C._FunctionBase):
        return ctx.saved_tensors
    of: Any = ctx
    taken = getattr(of, "taken", None)  # by a program that could not use them
    if taken is not None:
        of.taken = None
        return taken
    try:
        saved = of.saved_tensors
    except RuntimeError as error:
        if "a second time" not in str(error):
            raise
        raise RuntimeError(
            f"{of._forward_cls.LABEL}: backward() may run once for each forward, got a second run; "
            "add up losses and call backward() on the sum, or pass retain_graph=True to the first "
            "(torch: Trying to backward through the graph a second time)"
        ) from error
    of.maybe_clear_saved_tensors()
    return saved


def without_autograd(function: Any, inputs: tuple[torch.Tensor | None, ...], *rest: Any) -> Any:
    """Returns the outputs of an autograd function's ``forward``, run without autograd."""
    return function.forward(_NoContext(len(inputs)), *inputs, *rest)


class _NoContext:
    """Stand-in for autograd's ``ctx`` that needs no gradients and saves no tensors."""

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (False,) * inputs

    def save_for_backward(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass
