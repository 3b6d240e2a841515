"""Builders of the ops, in the table of builtin.py or, one op each, in files that are added here.

Importing this package compiles nothing and does not import torch.
"""

from __future__ import annotations

import importlib

from .builder import CPUOpBuilder, CUDAOpBuilder, OpBuilder, added, builder_names, register
from .core import BUILDERS
from .jit.errors import BuildError, DuplicateOpError, UnknownOpError, unknown_op
from .jit.find.cache import OpenedLibrary
from .spec import FunctionSpec
from .user_ops import builders as user_builders
from .user_ops import find as _find_user_builder
from .user_ops import names as _user_names


def get_builder(name: str) -> OpBuilder:
    """Returns the builder of op ``name``, of the dispatcher or of the handlers for JAX.

    These two are named "apex_te_core" and "apex_te_jax".

    apex_te's own ops are searched first, then ops that ``register`` added, then the entry points of
    other installed packages.

    Raises:
        UnknownOpError: no op has this name, or its builder cannot be imported.
        DuplicateOpError: two other packages have an op of this name.
    """
    builder = _suite_builder(name) or _find_user_builder(name)
    if builder is None:
        raise unknown_op(name, builder_names(), _user_names())
    return builder


_suite: dict[str, OpBuilder] = {}


def _suite_builder(name: str) -> OpBuilder | None:
    """Returns apex_te's builder of op ``name``, made once per process; None for any other name."""
    if name in _suite:
        return _suite[name]
    if name in BUILDERS:
        return _suite.setdefault(name, BUILDERS[name]())
    if name not in builder_names():
        return None
    file = added().get(name, name)
    try:
        module = importlib.import_module(f"{__name__}.{file}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, OpBuilder) and name == value.NAME:
                return _suite.setdefault(name, value())
    except Exception as error:  # a file that a user added
        raise UnknownOpError(
            f"{name}: its builder {__name__}.{file} cannot be imported:"
            f" {type(error).__name__}: {error}"
        ) from error
    raise UnknownOpError(f"{module.__file__} must define a builder with NAME = {name!r}")


def all_builders() -> dict[str, OpBuilder]:
    """Returns the builders of apex_te's own ops by op name, without the dispatcher's."""
    return {name: get_builder(name) for name in builder_names()}


__all__ = [
    "BuildError",
    "CPUOpBuilder",
    "CUDAOpBuilder",
    "DuplicateOpError",
    "FunctionSpec",
    "OpBuilder",
    "OpenedLibrary",
    "UnknownOpError",
    "added",
    "all_builders",
    "builder_names",
    "get_builder",
    "register",
    "user_builders",
]
