"""Detection of the modes of torch that must see every op: a library's call would pass unseen."""

from __future__ import annotations

import torch
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _is_tracing as jit_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes

__all__ = ["dispatch_modes", "is_traced", "jit_tracing", "transforms_active"]


def is_traced() -> bool:
    """Whether a call must go through ``torch.ops`` instead of straight to a library.

    True under torch.compile and torch.export, in a TorchDispatchMode (make_fx, FakeTensorMode,
    selective activation checkpointing, counters), in a transform of torch.func and in
    torch.jit.trace.
    """
    # Dynamo knows the first, and does not look at the others.
    return torch.compiler.is_compiling() or bool(
        dispatch_modes() or transforms_active() or jit_tracing()
    )
