"""Full names of Transformer Engine's classes, and refusals of what is not supported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

__all__ = ["named", "neutral", "not_served"]

_T = TypeVar("_T", bound=Callable[..., Any])


def named(module: str) -> Callable[[_T], _T]:
    """Returns a decorator that sets ``__module__`` of a class or function to ``module``."""

    def decorate(target: _T) -> _T:
        target.__module__ = module
        return target

    return decorate


def not_served(name: str, reason: str, base: type = object) -> Any:
    """Returns a class or function that can be imported and raises an error when it is used.

    A last part of the full ``name`` that begins with a capital letter makes a class, with ``base``,
    for annotations, ``isinstance`` and subclasses; any other makes a function. ``reason`` says why
    it is not supported and what to use instead.
    """
    module, _, last = name.rpartition(".")
    text = f"{name} is not available in apex_te: {reason}"
    doc = f"Raises NotImplementedError: {reason}."

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(text)

    if last[:1].isupper():
        return type(last, (base,), {"__module__": module, "__doc__": doc, "__new__": refuse})
    refuse.__name__ = refuse.__qualname__ = last
    refuse.__module__ = module
    refuse.__doc__ = doc
    return refuse


def neutral(owner: str, **keywords: tuple[Any, Any]) -> None:
    """Checks that keywords which apex_te does not serve have values that ask for nothing.

    Each keyword has its value, and the allowed value or a tuple of allowed values, as in
    ``neutral("Linear", ub_overlap_ag=(ub_overlap_ag, False))``.
    """
    for keyword, (value, allowed) in keywords.items():
        choices = allowed if isinstance(allowed, tuple) else (allowed,)
        if not any(_same(value, choice) for choice in choices):
            wanted = " or ".join(repr(choice) for choice in choices)
            raise NotImplementedError(
                f"{owner}: {keyword} must be {wanted}, since apex_te has nothing for other values, "
                f"got {value!r}"
            )


def _same(value: Any, choice: Any) -> bool:
    """Compares a keyword's value with an allowed one; a tensor, for one, equals none."""
    if value is choice:
        return True
    plain = isinstance(value, (bool, int, float, str))
    return plain and isinstance(choice, (bool, int, float, str)) and value == choice
