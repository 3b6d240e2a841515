"""Errors of calls that do not fit a function's signature, or whose numbers are not numbers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ...runtime.named_arguments import binding_error, op_function_name

_F = TypeVar("_F", bound=Callable[..., Any])


def checked(function: _F) -> _F:
    """Decorates a public function of an op as ``apex_te.ops.binding.checked`` does."""
    owner = op_function_name(function)
    parameters = inspect.signature(function).parameters
    floats = {each for each, p in parameters.items() if p.annotation == "float"}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for each, value in (*zip(parameters, args, strict=False), *kwargs.items()):
            if each in floats and not _is_number(value):
                raise TypeError(f"{owner}: {each} must be a float, got {type(value).__name__}")
        try:
            return function(*args, **kwargs)
        except TypeError:
            refused = binding_error(owner, function, args, kwargs)
            if refused is None:
                raise
            raise refused from None

    return call  # type: ignore[return-value]


def _is_number(value: Any) -> bool:
    """Returns True for what ``float`` takes, except text; False for a traced value."""
    if type(value) is float:
        return True
    try:
        float(value)
    except TypeError:
        return False
    return not isinstance(value, (str, bytes))
