"""Binding of op libraries' C functions to Python callables; libraries are built if missing."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from ..op_builder import OpenedLibrary, get_builder
from ..op_builder.core import CoreBuilder
from ..op_builder.jit.backends.archs import device_capability
from ..op_builder.jit.build.service import load_library
from ..op_builder.jit.errors import build_errors
from .imports import check_torch

check_torch()
ABI = 1

_lock = threading.RLock()
_core: ModuleType | None = None
_functions: dict[tuple[str, str], Any] = {}
_handles: dict[tuple[str, str], int] = {}


def _forked() -> None:
    """Replaces the lock in a forked child process: another thread may have held it at the fork."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)


def _import_core(opened: OpenedLibrary) -> ModuleType:
    """Returns the opened dispatcher, imported as ``apex_te_core``."""
    loader = importlib.machinery.ExtensionFileLoader("apex_te_core", opened.proc_path)
    spec = importlib.util.spec_from_loader("apex_te_core", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def core() -> ModuleType:
    """Returns the dispatcher, module ``apex_te_core``; the first call opens or builds it.

    Raises:
        BuildError: it can be neither found nor built.
    """
    global _core
    if _core is None:
        with _lock:
            if _core is None:
                _core = load_library(CoreBuilder(), "cpu", None, _import_core)
    return _core


def _open(op: str, device: str, device_index: int) -> int:
    """Opens the library of an op for a device type, once, and checks its ABI number."""
    with _lock:
        handle = _handles.get((op, device))
        if handle is None:
            capability = device_capability(device_index) if device == "cuda" else None
            dispatcher = core()
            with build_errors(op):
                builder = get_builder(op)

            def use(opened: OpenedLibrary) -> int:
                """Returns the handle of an opened library; refuses one with another ABI."""
                handle: int = dispatcher.open_library(opened.proc_path)
                address = dispatcher.symbol(handle, "apex_te_abi")
                abi = dispatcher.read_int32(address) if address else None
                if abi != ABI:
                    raise ImportError(f"it must have ABI {ABI}, got {abi}")
                return handle

            handle = _handles[op, device] = load_library(builder, device, capability, use)
        return handle


def _resolve(op: str, name: str, signature: str, device: str, device_index: int) -> int:
    """Returns the address of a C function whose compiled signature equals ``signature``."""
    dispatcher = core()
    handle = _open(op, device, device_index)
    address = dispatcher.symbol(handle, f"apex_te_{name}")
    if not address:
        raise NotImplementedError(f"{name}: {device} tensors are not supported by this function")
    text = dispatcher.symbol(handle, f"apex_te_{name}_signature")
    compiled = dispatcher.read_string(text) if text else None
    if compiled != signature:
        raise ImportError(f"{name}: the compiled signature must be '{signature}', got '{compiled}'")
    return address


def signature(op: str, name: str) -> str:
    """Returns a C function's signature in its op's header; raises AttributeError without one."""
    with build_errors(op):
        spec = get_builder(op).functions().get(name)
    if spec is None:
        raise AttributeError(f"op {op} has no function {name}")
    return spec.signature


def function(op: str, name: str) -> Any:
    """Returns a callable for one C function of an op; it takes torch tensors and scalars.

    Args:
        op: name of the op, such as "cast_transpose".
        name: the function's name in the op's header, without ``apex_te_``.

    Raises:
        AttributeError: the op has no function of this name.
        UnknownOpError: there is no such op.
        BuildError: the dispatcher cannot be built. The first call on a device builds the op's
            library.
    """
    bound = _functions.get((op, name))
    if bound is None:
        text = signature(op, name)
        with _lock:
            bound = _functions.setdefault(
                (op, name),
                core().Function(
                    name, text, lambda device, index: _resolve(op, name, text, device, index)
                ),
            )
    return bound


def tensor_list(tensors: Iterable[torch.Tensor]) -> Any:
    """Returns tensors as a list that ops take instead of a plain list, at a fraction of its cost.

    The first call that uses the list checks the tensors in full, and raises the errors of that op.
    Each later call reads only their addresses, shapes and strides. For eager calls only:
    torch.compile needs a plain list.

    Args:
        tensors: the tensors; a tensor may be resized or get other storage later.

    Raises:
        TypeError: ``tensors`` is not iterable.
    """
    return core().TensorList(tensors)


class _Ops:
    """Namespace of the functions of one op, each bound when its attribute is first read."""

    def __init__(self, op: str) -> None:
        self._op = op

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        bound = function(self._op, name)
        self.__dict__[name] = bound
        return bound


def ops(op: str) -> Any:
    """Returns a namespace of an op's C functions, e.g. ``ops("cast_transpose").cast_transpose``.

    Errors are those of ``function``, when an attribute is first read.
    """
    return _Ops(op)
