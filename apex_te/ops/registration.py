"""Registers the ops' functions with torch.library, which compiled regions call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .. import runtime

_library = torch.library.Library("apex_te", "DEF")


def register(schema: str, call: Callable[..., Any]) -> None:
    """Defines `apex_te::<op>` for CPU and CUDA from a schema whose outputs are all arguments.

    Such an op returns nothing, so its fake does nothing either; no build is triggered by tracing.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, call, key)
    torch.library.register_fake(f"apex_te::{name}", lambda *args: None, lib=_library)


def bind(op: str, schema: str) -> Callable[..., None]:
    """Registers a function of an op and returns what its Python calls.

    Eager calls go straight to the library; under torch.compile they go through `torch.ops`.

    Args:
        op: stem of the op, whose library has the function.
        schema: the function's torch.library schema; its name and the order of its arguments are
            those of the C function.
    """
    name = schema.partition("(")[0]
    lib = runtime.ops(op)

    def in_library(*args: Any) -> None:
        getattr(lib, name)(*args)

    register(schema, in_library)
    registered = getattr(torch.ops.apex_te, name)

    def call(*args: Any) -> None:
        if torch.compiler.is_compiling():
            registered(*args)
        else:
            try:
                getattr(lib, name)(*args)
            except TypeError:
                if not _on_meta(args):
                    raise
                registered(*args)

    return call


def _on_meta(args: tuple[Any, ...]) -> bool:
    """Whether the tensors of a call are all on the meta device, where they have shapes only."""
    tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,))]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    return bool(tensors) and all(t.is_meta for t in tensors)


def note_written(*tensors: torch.Tensor | None) -> None:
    """Tells autograd that the caller's tensors were overwritten; torch.compile does so itself."""
    given = [t for t in tensors if t is not None]
    if given and not torch.compiler.is_compiling():
        increment_version(given)
