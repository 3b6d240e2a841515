"""Builders of the ops: each module of this folder builds the op of its own name.

Importing this package compiles nothing and does not import torch.
"""

from __future__ import annotations

import functools
import importlib
import os

from .builder import CPUOpBuilder, CUDAOpBuilder, FunctionSpec, OpBuilder, OpenedLibrary
from .jit.errors import BuildError, UnknownOpError

_NOT_OPS = frozenset(("__init__", "builder", "core"))


def builder_names() -> list[str]:
    """Names of all ops that have a builder, found by looking at this folder."""
    names = (os.path.splitext(entry) for entry in os.listdir(os.path.dirname(__file__)))
    return sorted(stem for stem, ending in names if ending == ".py" and stem not in _NOT_OPS)


@functools.cache
def get_builder(name: str) -> OpBuilder:
    """The builder of op ``name``, or of the dispatcher, "apex_te_core". Raises UnknownOpError."""
    if name == "apex_te_core":
        from .core import CoreBuilder

        return CoreBuilder()
    if name not in builder_names():
        raise UnknownOpError(
            f"there is no op {name!r}; there are: {', '.join(builder_names()) or 'none'}"
        )
    module = importlib.import_module(f"{__name__}.{name}")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, OpBuilder) and name == value.NAME:
            return value()
    raise UnknownOpError(f"{module.__file__} must define a builder with NAME = {name!r}")


def all_builders() -> dict[str, OpBuilder]:
    """All builders by op name."""
    return {name: get_builder(name) for name in builder_names()}


__all__ = [
    "BuildError",
    "CPUOpBuilder",
    "CUDAOpBuilder",
    "FunctionSpec",
    "OpBuilder",
    "OpenedLibrary",
    "UnknownOpError",
    "all_builders",
    "builder_names",
    "get_builder",
]
