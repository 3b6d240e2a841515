"""Registers the ops' functions with ``torch.library``.

Plain eager calls go to the C functions directly. Compiled regions, dispatch modes and torch.func's
transforms call the registered op ``torch.ops.apex_te.<name>``, which they can see.
"""

from __future__ import annotations

import string
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch._C import _increment_version as increment_version
from torch.autograd import forward_ad

from .. import runtime
from ..contract import parse
from ..runtime.dispatcher import signature
from ..runtime.tracing import dispatch_modes, is_compiling, jit_tracing, transforms_active

_library = torch.library.Library("apex_te", "DEF")


class Launch(NamedTuple):
    """One call of a C function that has the effect of a registered op.

    Attributes:
        function: the callable of ``runtime.function``.
        args: its arguments; ``WORKSPACE`` stands for scratch memory of the current stream.
        products: number of GEMMs of quantized operands in the call.
    """

    function: Any
    args: tuple[Any, ...]
    products: int


WORKSPACE = object()
_launches: dict[str, Callable[..., Launch | None]] = {}
_functions: dict[str, Any] = {}


def launch_of(name: str, args: Sequence[Any]) -> Launch | None:
    """Returns the one C call that a registered op makes for ``args``; None if it does more.

    Args:
        name: the op's name without its namespace.
        args: the op's arguments by position.
    """
    launch = _launches.get(name)
    return None if launch is None else launch(*args)


def function_of(name: str) -> Callable[..., None]:
    """Returns the function that runs the registered op ``name`` in plain eager mode."""
    return getattr(_functions[name], name)


def register(schema: str, call: Callable[..., Any]) -> Any:
    """Defines ``torch.ops.apex_te.<name>`` for CPU and CUDA tensors.

    The op writes its results into arguments and returns nothing. Its implementation for fake
    tensors therefore does nothing, and tracing triggers no build. Under ``torch.func.vmap`` the op
    runs once for each sample.

    Args:
        schema: torch.library schema that begins with the op's name and ends in ``-> ()``.
        call: function that is called with the op's arguments.

    Returns:
        The overload packet ``torch.ops.apex_te.<name>``.
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
    op: str,
    name: str,
    function: Callable[..., None] | None = None,
    *,
    without: Sequence[str] = (),
    launch: Callable[..., Launch | None] | None = None,
) -> Callable[..., None]:
    """Registers a C function of an op with ``torch.library`` and returns a callable for it.

    Args:
        op: name of the op, such as "rms_norm", whose library has the function.
        name: name of a function that the op's header declares, or a whole torch.library schema.
        function: Python function to call instead of the C function; it calls the C function itself.
        without: parameters of the C function that ``function`` supplies; the registered schema
            omits them.
        launch: function that returns the ``Launch`` for the arguments of ``function``, or None
            if ``function`` does more than launch one kernel.

    Returns:
        A callable that takes the arguments by position and returns None.

    Raises:
        AttributeError: the header declares no function of that name.
    """
    schema = name if "(" in name else _schema(name, signature(op, name), without)
    short = schema.partition("(")[0]
    if function is not None:
        if launch is not None:
            _launches[short] = launch
        return bind_call(schema, function)
    _launches[short] = lambda *args: Launch(runtime.function(op, short), args, 0)
    return _bind(schema, runtime.ops(op))


def bind_call(schema: str, function: Callable[..., None]) -> Callable[..., None]:
    """Registers a Python function as the op that a torch.library schema describes.

    Unlike ``bind``, it takes no signature from a C header.

    Args:
        schema: torch.library schema that ends in ``-> ()``.
        function: takes the schema's arguments by position and writes its results into them.

    Returns:
        A callable that takes the same arguments as ``function`` and returns None.
    """
    return _bind(schema, SimpleNamespace(**{schema.partition("(")[0]: function}))


def _schema(name: str, signature: str, without: Sequence[str] = ()) -> str:
    """Returns a C signature's torch.library schema: "out: Tensor!" becomes "Tensor(a!) out"."""
    aliases = iter(string.ascii_lowercase)
    arguments = []
    for p in parse(signature).params.values():
        if p.name not in without:
            written = f"Tensor({next(aliases)}!)" if p.is_written else "Tensor"
            kind = p.kind.replace("Tensor", written)
            arguments.append(f"{kind}{'?' * p.is_optional} {p.name}")
    return f"{name}({', '.join(arguments)}) -> ()"


def _bind(schema: str, functions: Any) -> Callable[..., None]:
    """Registers a function and returns a callable that skips ``torch.ops`` in plain eager mode.

    Compiled regions, dispatch modes, ``torch.jit.trace`` and transforms go through ``torch.ops``.
    """
    name = schema.partition("(")[0]
    registered = register(schema, lambda *args: getattr(functions, name)(*args))
    _functions[name] = functions

    def call(*args: Any) -> None:
        if is_compiling():
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
    """Count, for each thread, of registered ops that were run with real or with fake tensors."""

    count = 0


_runs = _Runs()


def _observed(registered: Any, args: tuple[Any, ...]) -> None:
    """Calls a registered op through ``torch.ops``, so that active tracers and transforms see it.

    Refuses a call whose results would be lost or that needs a derivative. Prepared lists
    (``runtime.tensor_list``) are passed on as plain lists.
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
    # The schema knows lists, not the prepared lists of ``tensor_list``.
    registered(*(list(a) if isinstance(a, runtime.core().TensorList) else a for a in args))
    if _runs.count == before and dispatch_modes() and not _without_data(args):
        raise NotImplementedError(
            f"{name}: a torch dispatch mode must run it, as its results are written into its "
            "arguments; a policy of selective activation checkpointing must have it recomputed"
        )


def _writes_list(argument: Any) -> bool:
    """Returns True if an argument of a torch.library schema is a list whose tensors are written."""
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
    """Increments the version counters of tensors that an op has overwritten, for autograd.

    Under torch.compile it does nothing, since torch derives writes from the op's schema.

    Args:
        tensors: the written tensors; None is skipped.
    """
    given = [t for t in tensors if t is not None]
    if given and not is_compiling():
        increment_version(given)
