"""Registers the ops' functions with torch.library, which modes and compiled regions call."""

from __future__ import annotations

import string
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from .. import runtime
from ..runtime.dispatcher import signature
from ..runtime.tracing import dispatch_modes, jit_tracing, transforms_active

_library = torch.library.Library("apex_te", "DEF")


def register(schema: str, call: Callable[..., Any]) -> Any:
    """Defines ``apex_te::<op>`` for CPU and CUDA from a schema whose outputs are all arguments.

    Such an op returns nothing, so its fake does nothing either; no build is triggered by tracing.
    Under ``torch.func.vmap`` the op runs once for each sample.

    Returns:
        ``torch.ops.apex_te.<op>``.
    """
    name = schema.partition("(")[0]
    _library.define(schema)

    def run(*args: Any) -> None:
        _runs.count += 1
        call(*args)

    def fake(*args: Any) -> None:
        _runs.count += 1

    def batched(*args: Any) -> None:
        from . import transforms  # here, because importing it takes a while

        transforms.run_samples(registered, args)

    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    _library.impl(name, batched, "FuncTorchBatched")
    torch.library.register_fake(f"apex_te::{name}", fake, lib=_library)
    registered = getattr(torch.ops.apex_te, name)
    return registered


def bind(
    op: str, name: str, function: Callable[..., None] | None = None, *, without: Sequence[str] = ()
) -> Callable[..., None]:
    """Registers a function of an op and returns what its Python calls.

    Args:
        op: stem of the op, whose library has the function.
        name: name of a function that the op's header declares, or a whole torch.library schema.
        function: Python function to call in place of the C function.
        without: parameters of the C function that ``function`` supplies by itself.

    Raises:
        AttributeError: the header declares no such function.
    """
    schema = name if "(" in name else _schema(name, signature(op, name), without)
    if function is not None:
        return bind_call(schema, function)
    return _bind(schema, runtime.ops(op))


def bind_call(schema: str, function: Callable[..., None]) -> Callable[..., None]:
    """Registers a Python function that no header declares, as ``bind`` does."""
    return _bind(schema, SimpleNamespace(**{schema.partition("(")[0]: function}))


def _schema(name: str, signature: str, without: Sequence[str] = ()) -> str:
    """Returns the torch.library schema of a C signature: "out: Tensor!" is "Tensor(a!) out"."""
    aliases = iter(string.ascii_lowercase)
    arguments = []
    for parameter in signature.split(","):
        label, _, kind = (part.strip() for part in parameter.partition(":"))
        if label not in without:
            kind = kind.replace("!", f"({next(aliases)}!)") if "!" in kind else kind
            arguments.append(f"{kind} {label}")
    return f"{name}({', '.join(arguments)}) -> ()"


def _bind(schema: str, functions: Any) -> Callable[..., None]:
    """Returns a callable that goes straight to the function, or through ``torch.ops``.

    Through ``torch.ops`` go the calls that torch must see: of compiled regions, modes, transforms.
    """
    name = schema.partition("(")[0]
    registered = register(schema, lambda *args: getattr(functions, name)(*args))

    def call(*args: Any) -> None:
        if torch.compiler.is_compiling():
            registered(*args)
        elif (
            dispatch_modes()
            or transforms_active()
            or jit_tracing()
            or forward_ad._current_level >= 0
        ):
            _observed(registered, args)
        else:
            try:
                getattr(functions, name)(*args)
            except TypeError:
                if not _without_data(args):
                    raise
                registered(*args)

    return call


class _Runs(threading.local):
    """Number of ops that this thread has run, with data or without."""

    count = 0


_runs = _Runs()


def _observed(registered: Any, args: tuple[Any, ...]) -> None:
    """Calls the registered op where a mode of torch sees it.

    Raises:
        NotImplementedError: a transform would need a derivative that the op does not have, or a
            mode answered in place of the op.
    """
    name = registered.__name__
    if jit_tracing() and any(_writes_list(a) for a in registered.default._schema.arguments):
        raise NotImplementedError(
            f"{name}: torch.jit.trace drops what is written into tensors of lists; "
            "torch.export and make_fx keep it"
        )
    if transforms_active() or forward_ad._current_level >= 0:
        from . import transforms

        transforms.refuse_derivatives(name, args)
    before = _runs.count
    # A prepared list is none that the schema knows.
    registered(*(list(a) if isinstance(a, runtime.core().TensorList) else a for a in args))
    if _runs.count == before and dispatch_modes() and not _without_data(args):
        raise NotImplementedError(
            f"{name}: a torch dispatch mode must run it, as its results are written into its "
            "arguments; a policy of selective activation checkpointing must have it recomputed"
        )


def _writes_list(argument: Any) -> bool:
    is_written = argument.alias_info is not None and argument.alias_info.is_write
    return is_written and "List" in str(argument.type)


def _without_data(args: Sequence[Any]) -> bool:
    """Returns True if every tensor is a meta or fake one, which has a shape and no values."""
    tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,))]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    return bool(tensors) and all(t.is_meta or _is_fake(t) for t in tensors)


def _is_fake(t: torch.Tensor) -> bool:
    if type(t) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)


def note_written(*tensors: torch.Tensor | None) -> None:
    """Tells autograd that the caller's tensors were overwritten; torch.compile does so itself."""
    given = [t for t in tensors if t is not None]
    if given and not torch.compiler.is_compiling():
        increment_version(given)
