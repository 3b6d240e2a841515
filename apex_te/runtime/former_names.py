"""Former names of keyword arguments, fields and functions, which work with a DeprecationWarning.

They go with the next release.
"""

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
    """Warns that ``former`` is now called ``name``, at ``stacklevel`` frames above the caller."""
    text = f"{former} is now called {name}; the former name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)


def former_keywords(
    function: Callable[..., Any], kwargs: dict[str, Any], owner: str
) -> dict[str, Any] | None:
    """Returns a failed call's keyword arguments with former names translated, or None.

    None if none has a former name, or both names of one are given. Calls by present names thus pay
    nothing.
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
    """Returns a class decorator that adds warning properties for the former names of fields.

    Args:
        names: keyword arguments ``former="present"``, the two names of one field each.
    """

    def decorate(cls: _C) -> _C:
        for former, name in names.items():
            setattr(cls, former, property(_reader(f"{cls.__name__}.{former}", name)))
        return cls

    return decorate


def _reader(former: str, name: str) -> Callable[[Any], Any]:
    """Returns a property getter for the field ``name`` that warns of its former name."""

    def read(self: Any) -> Any:
        _warn(former, name, stacklevel=2)
        return getattr(self, name)

    return read


def find_former_functions(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__`` that finds functions by their former names, and warns.

    Args:
        module: full name of the module.
        names: present name of each function by its former name.
    """

    def get(former: str) -> Any:
        name = names.get(former)
        if name is None:
            raise AttributeError(f"module {module!r} has no attribute {former!r}")
        _warn(f"{module}.{former}", name, stacklevel=2)
        return getattr(sys.modules[module], name)

    return get
