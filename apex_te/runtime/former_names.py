"""Former names of keyword arguments, fields and functions, which warn and work for one release."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["find_former_functions", "former_fields", "former_keywords"]

_C = TypeVar("_C", bound=type)
_KEYWORDS = {
    "codes": "fp8_data",
    "out_transposed": "out_columnwise",
    "transposed": "columnwise",
}


def _warn(former: str, name: str, stacklevel: int) -> None:
    text = f"{former} is now called {name}; the former name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)


def former_keywords(
    function: Callable[..., Any], kwargs: dict[str, Any], owner: str
) -> dict[str, Any] | None:
    """Returns keyword arguments by their present names, or None if none has a former one.

    To be called once a call has failed, so that calls by present names pay nothing.
    """
    taken = function.__annotations__
    given = [name for name in kwargs if name in _KEYWORDS and name not in taken]
    now = {name: _KEYWORDS[name] for name in given if _KEYWORDS[name] in taken}
    if not now or any(name in kwargs for name in now.values()):
        return None
    for former, name in now.items():
        _warn(f"{owner}: {former}", name, stacklevel=3)
    return {now.get(name, name): value for name, value in kwargs.items()}


def former_fields(**names: str) -> Callable[[_C], _C]:
    """Decorates a class whose fields had other names: ``former_fields(former="present")``."""

    def decorate(cls: _C) -> _C:
        for former, name in names.items():
            setattr(cls, former, property(_reader(f"{cls.__name__}.{former}", name)))
        return cls

    return decorate


def _reader(former: str, name: str) -> Callable[[Any], Any]:
    def read(self: Any) -> Any:
        _warn(former, name, stacklevel=2)
        return getattr(self, name)

    return read


def find_former_functions(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a module whose functions had other names."""

    def get(former: str) -> Any:
        name = names.get(former)
        if name is None:
            raise AttributeError(f"module {module!r} has no attribute {former!r}")
        _warn(f"{module}.{former}", name, stacklevel=2)
        return getattr(sys.modules[module], name)

    return get
