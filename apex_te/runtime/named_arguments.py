"""Checks of arguments, errors that name them as the user wrote them, and their former names."""

from __future__ import annotations

import functools
import inspect
import numbers
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..op_builder.jit.text import did_you_mean as did_you_mean
from ..op_builder.jit.text import nearest as nearest


def check_count(owner: str, name: str, value: Any) -> None:
    """Checks that the argument ``name`` of the module ``owner`` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{owner}: {name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {value}")


def check_ints(owner: str, least: int = 1, **values: Any) -> None:
    """Checks that arguments of ``owner``, given by name, are ints of at least ``least``."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{owner}: {name} must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{owner}: {name} must be at least {least}, got {value}")


def check_flags(owner: str, **values: Any) -> None:
    """Checks that arguments of ``owner``, given by name, are bools."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{owner}: {name} must be a bool, got {type(value).__name__}")


_F = TypeVar("_F", bound=Callable[..., Any])
_OWN_ERROR = re.compile(r"([A-Za-z_][\w.]*): ")


def named_arguments(owner: str = "", **names: str) -> Callable[[_F], _F]:
    """Returns a decorator whose function raises errors that name the function and its arguments.

    That goes for calls that Python refuses, and for errors of inner functions about an argument
    that was passed on. Constructors, whose ``owner`` is their class, also check the types of flags,
    functions and devices; other calls that succeed cost no checks.
    """

    def decorate(function: _F) -> _F:
        is_constructor = function.__name__ == "__init__"

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            name = owner or function.__name__
            if is_constructor:
                name = type(args[0]).__name__
                _check_types(name, function, args, kwargs)
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError, RuntimeError, AssertionError) as error:
                refused = binding_error(name, function, args, kwargs)
                if refused is not None:
                    raise refused from None
                if is_constructor:
                    _check_cuda(name, kwargs.get("device"))
                better = renamed(error, name, argument_names(function), names)
                if better is None:
                    raise
                raise better.with_traceback(error.__traceback__) from error.__cause__

        return call  # type: ignore[return-value]

    return decorate


def renamed(
    error: Exception, owner: str, arguments: Iterable[str], names: dict[str, str]
) -> Exception | None:
    """Returns an inner function's error with the names of the function that the user called.

    None if ``owner`` raised it, or if it is not about one of ``arguments``. ``names`` gives the
    outer name of each argument that the inner function knows by another.
    """
    text = str(error)
    own = _OWN_ERROR.match(text)
    if own is None or type(error) not in (TypeError, ValueError, RuntimeError, NotImplementedError):
        return None
    rest = text[own.end() :]
    for inner, outer in names.items():
        rest = re.sub(rf"\b{inner}\b", outer, rest)
    subject = re.match(r"\w+", rest)
    if own[1] == owner or subject is None or subject[0] not in arguments:
        return None
    return type(error)(f"{owner}: {rest}")


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def op_function_name(function: Callable[..., Any]) -> str:
    """Returns an op function's name in errors: ``op.function`` unless it begins with the op's."""
    stem, name = function.__module__.rpartition(".")[2], function.__name__
    return name if name.startswith(stem) else f"{stem}.{name}"


def argument_names(function: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's arguments, without ``self``."""
    return [name for name in _signature(function).parameters if name != "self"]


def binding_error(
    owner: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TypeError | None:
    """Returns the error of a call that does not fit the signature; None if the call fits it."""
    signature = _signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        pass
    else:
        return None
    known = argument_names(function)
    kinds = signature.parameters
    for name in kwargs:
        if name not in known:
            hint = did_you_mean(name, known) or f"; the arguments are {', '.join(known)}"
            return TypeError(f"{owner}: unexpected argument {name!r}{hint}")
    is_positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = [name for name in known if kinds[name].kind is is_positional]
    given = len(args) - len(kinds) + len(known)  # without self
    if given > len(positional):
        if not positional:
            such = f", such as {known[0]}=" if known else ""
            return TypeError(
                f"{owner}: arguments must be given by name{such}, got {given} by position"
            )
        return TypeError(
            f"{owner}: at most {len(positional)} arguments may be given by position "
            f"({', '.join(positional)}), got {given}; give the others by name"
        )
    twice = [name for name in positional[:given] if name in kwargs]
    if twice:
        return TypeError(f"{owner}: {twice[0]} must be given once, got it by position and by name")
    missing = [
        name for name in known[given:]
        if name not in kwargs and kinds[name].default is inspect.Parameter.empty
    ]  # fmt: skip
    return TypeError(f"{owner}: {' and '.join(missing)} must be given, got nothing")


def _check_types(
    owner: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Checks a constructor's flags, functions and device; wrong ones would fail late or never."""
    given = {**dict(zip(_signature(function).parameters, args, strict=False)), **kwargs}
    for name, value in given.items():
        kind = str(function.__annotations__.get(name, ""))
        if kind == "bool" and not _is_flag(value):
            raise TypeError(f"{owner}: {name} must be a bool, got {value!r}")
        if kind.endswith("None") and value is None:
            continue
        if kind.startswith("Callable[") and not callable(value):
            raise TypeError(f"{owner}: {name} must be a callable, got {value!r}")
        if name == "device" and "torch.device" in kind:
            _check_device(owner, value)


def _is_flag(value: Any) -> bool:
    """Returns True for a bool of Python or numpy, and for 0 and 1."""
    return type(value).__name__ in ("bool", "bool_") or (type(value) is int and value in (0, 1))


def _check_device(owner: str, value: Any) -> None:
    """Raises an error if ``value`` is not a device."""
    try:
        sys.modules["torch"].device(value)
    except (RuntimeError, TypeError) as error:
        kind = ValueError if isinstance(value, (str, int)) else TypeError
        raise kind(
            f"{owner}: device must be a torch.device or its name, such as 'cuda:0' or 'cpu', "
            f"got {value!r}"
        ) from error


def _check_cuda(owner: str, device: Any) -> None:
    """Raises an error if a constructor that failed was given a CUDA device and there is none."""
    torch = sys.modules["torch"]
    if device is None or torch.device(device).type != "cuda" or torch.cuda.is_available():
        return
    raise ValueError(
        f"{owner}: device must be one that PyTorch finds, got {device!r} without a CUDA device"
    )


_C = TypeVar("_C", bound=type)
# Former names, which go with the next release.
_KEYWORDS = {"codes": "fp8_data", "out_transposed": "out_columnwise", "transposed": "columnwise"}


def _warn(former: str, name: str, stacklevel: int) -> None:
    """Warns that ``former`` is now called ``name``, at ``stacklevel`` frames above the caller."""
    text = f"{former} is now called {name}; the former name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)


def former_keywords(
    function: Callable[..., Any], kwargs: dict[str, Any], owner: str
) -> dict[str, Any] | None:
    """Returns a failed call's keyword arguments with former names translated, or None.

    None if no keyword is a former name, or an argument is given under both names. Only failed calls
    come here, so that calls with current names have no overhead.
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
    """Returns a class decorator with warning properties for fields' names, ``former="present"``."""

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
    """Returns a ``__getattr__`` for ``module`` that finds functions by former names, and warns."""

    def get(former: str) -> Any:
        name = names.get(former)
        if name is None:
            raise AttributeError(f"module {module!r} has no attribute {former!r}")
        _warn(f"{module}.{former}", name, stacklevel=2)
        return getattr(sys.modules[module], name)

    return get


def check_model(owner: str, model: Any) -> None:
    """Raises TypeError if ``model``, an argument of ``owner``, is not a module."""
    if isinstance(model, sys.modules["torch"].nn.Module):
        return
    got, todo = type(model).__name__, ""
    if isinstance(model, type):
        got, todo = f"the class {model.__name__}", f"; pass an instance, {model.__name__}(...)"
    elif isinstance(model, dict):
        todo = "; pass the model, not its state dict"
    raise TypeError(f"{owner}: model must be a torch.nn.Module, got {got}{todo}")
