"""Detection of tracing: modes in which torch must see every op, as a direct library call is not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import compiler
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._C import _is_tracing as jit_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import _disable_current_modes as untraced

__all__ = [
    "dispatch_modes", "is_compiling", "is_traced", "is_transformed", "jit_tracing", "refuse_state",
    "transforms_active", "untraced",
]  # fmt: skip


def is_compiling() -> bool:
    """Returns True under torch.compile and torch.export, in less time than torch's own function."""
    # Dynamo knows the first, and does not look at the flag, which torch's function reads behind
    # one more call.
    return is_dynamo_compiling() or compiler._is_compiling_flag


def is_traced() -> bool:
    """Returns True if a call must go through ``torch.ops`` instead of straight to a library.

    True under torch.compile and torch.export, in a TorchDispatchMode (make_fx, FakeTensorMode,
    selective activation checkpointing, counters), in a transform of torch.func and in
    torch.jit.trace.
    """
    return is_compiling() or bool(dispatch_modes() or transforms_active() or jit_tracing())


def is_transformed(tensors: Iterable[torch.Tensor]) -> bool:
    """Returns True if a transform of torch.func wraps one of the tensors, which has no memory."""
    return transforms_active() and any(map(is_functorch_wrapped_tensor, tensors))


def refuse_state(owner: str) -> None:
    """Raises NotImplementedError under a tracer whose tensors must not be kept as FP8 state.

    Those of torch.export, torch.func, torch.jit.trace and FakeTensorMode would break every later
    call. torch.compile, and modes that see real tensors, are fine.
    """
    if is_compiling():
        # Not is_exporting(): before torch 2.13, Dynamo takes it for True under torch.compile, too.
        where = "torch.export" if compiler._is_exporting_flag else None
    elif transforms_active():
        where = "a transform of torch.func"
    elif jit_tracing():
        where = "torch.jit.trace"
    elif dispatch_modes() and _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None:
        where = "FakeTensorMode"
    else:
        return
    if where is not None:
        raise NotImplementedError(
            f"{owner}: a recipe that keeps state, as DelayedScaling does, cannot record inside of "
            f"{where}; CurrentScaling and BlockScaling can be used there"
        )
