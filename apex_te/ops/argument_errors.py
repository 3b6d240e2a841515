"""Raises errors that name the wrong argument; arguments are examined only after a call failed."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import runtime
from ..runtime.named_arguments import former_keywords, named_arguments, op_function_name

__all__ = ["check_dense", "checked", "under_name"]

_F = TypeVar("_F", bound=Callable[..., Any])
_OWN_ERROR = re.compile(r"[A-Za-z_][\w.]*: ")
_NUMBER_OF = {"int": "an int", "float": "a float", "bool": "a bool", "str": "a str"}
# What torch and Python raise for an argument that does not fit.
_VAGUE = (
    AssertionError, AttributeError, IndexError, OverflowError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def checked(function: _F) -> _F:
    """Decorates a public function so that a failed call raises an error naming the bad argument.

    A bad argument that the function does not check itself causes some error of torch or Python. The
    decorator catches it and compares the arguments with their annotations. A call that succeeds
    is not checked. Former keywords of arguments are accepted, too.
    """
    owner = op_function_name(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _VAGUE as error:
            named = former_keywords(function, kwargs, owner) if kwargs else None
            if named is not None:
                return call(*args, **named)
            better = _explained(owner, function, args, kwargs, error)
            if better is None:
                raise
            raise better from error

    return call  # type: ignore[return-value]


def check_dense(owner: str, **tensors: torch.Tensor | None) -> None:
    """Checks tensors that a function passes to torch, where none of the kernels checks them.

    In a compiled region it does nothing, because torch checks them there.

    Args:
        owner: name of the function, for errors.
        tensors: arguments of the function by name; None for one that is not given.

    Raises:
        TypeError: an argument is not a dense tensor with a real dtype.
        ValueError: the given tensors are on different devices.
    """
    if torch.compiler.is_compiling():
        return  # a compiler refuses layouts in a backward, and traces tensors that it checks itself
    device = first = None
    for name, value in tensors.items():
        if value is None:
            continue
        problem = _tensor_problem(f"{owner}: {name}", value, may_be_meta=True)
        if problem is not None:
            raise problem
        if device is None:
            device, first = value.device, name
        elif value.device != device:
            raise ValueError(
                f"{owner}: {name} must be on {device} like {first}, got {value.device}"
            )


def under_name(owner: str, error: Exception) -> Exception:
    """Returns the error of an op that ran in place of ``owner``, with ``owner`` as the op's name.

    Args:
        owner: the op that the user called.
        error: error about an argument that both ops have.
    """
    text = str(error)
    own = _OWN_ERROR.match(text)
    return type(error)(f"{owner}: {text[own.end() if own else 0 :]}")


def _explained(
    owner: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,
) -> Exception | None:
    """Returns an error that names a failed call's wrong argument, or None to keep ``error``."""
    if isinstance(error, RuntimeError) and type(error) not in (RuntimeError, NotImplementedError):
        return None  # of a build, a device or its memory: no argument's doing
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        try:  # arguments that do not bind run nothing
            named_arguments(owner)(function)(*args, **kwargs)
        except TypeError as refused:
            return refused
        return None
    scope = function.__globals__
    own = _OWN_ERROR.match(str(error))
    is_own = own is not None
    for argument, value in given.items():
        wanted = function.__annotations__.get(argument, "Any")
        better = _problem(f"{owner}: {argument}", str(wanted), value, scope)
        # For a value out of range, or of a tensor, the function's own error says more.
        is_told = own is not None and str(error).startswith(f"{own[0]}{argument} ")
        is_tensor = isinstance(value, torch.Tensor) and isinstance(error, ValueError)
        is_range = is_own and isinstance(better, ValueError)
        if better is not None and not (is_range or (is_told and is_tensor)):
            return better
    if is_own or runtime.is_traced():
        return None
    if isinstance(error, RuntimeError) and not _is_of_shapes(error):
        return None
    described = ", ".join(f"{k} {_described(v)}" for k, v in given.items() if _described(v))
    return ValueError(f"{owner}: the arguments must fit to each other, got {described}")


def _is_of_shapes(error: RuntimeError) -> bool:
    """Returns True if an argument may have caused the error, False if memory or device did."""
    text = str(error)
    return type(error) is RuntimeError and "CUDA" not in text and "allocate" not in text


def _problem(place: str, wanted: str, value: Any, scope: dict[str, Any]) -> Exception | None:
    """Returns the error for an argument that its annotation does not allow, or None if it does."""
    kinds = [kind.strip() for kind in wanted.split(" | ")]
    if value is None and "None" in kinds:
        return None
    if isinstance(value, torch.Tensor) and "torch.Tensor" in kinds:
        return _tensor_problem(place, value)
    if any(kind in ("Tensors", "Sequence[torch.Tensor]") for kind in kinds):
        return _list_problem(place, value)
    if "tuple[float, float]" in kinds:
        is_pair = isinstance(value, (list, tuple)) and len(value) == 2
        if not is_pair or any(_number_problem(place, ["float"], v) for v in value):
            return TypeError(f"{place} must be a tuple of two floats, got {value!r}")
        return None
    if "list[float]" in kinds:
        if not isinstance(value, (list, tuple)):
            return TypeError(f"{place} must be a list of floats, got {_type(value)}")
        found = (_number_problem(f"{place}[{i}]", ["float"], v) for i, v in enumerate(value))
        return next(filter(None, found), None)
    if any(kind in _NUMBER_OF for kind in kinds):
        return _number_problem(place, kinds, value)
    for kind in filter("None".__ne__, kinds):
        expected = _class(kind, scope)
        if expected is None or isinstance(value, expected):
            break
    else:
        return TypeError(f"{place} must be a {kinds[0]}, got {_type(value)}")
    # A tuple of tensors, such as an op's output given back to be written again.
    for name in getattr(value, "_fields", ()):
        part = getattr(value, name)
        if isinstance(part, torch.Tensor):
            better = _tensor_problem(f"{place}.{name}", part)
            if better is not None:
                return better
    return None


def _class(kind: str, scope: dict[str, Any]) -> Any:
    """Returns the class that ``kind``, a dotted name, denotes in ``scope``, or None if none."""
    value: Any = None
    for part in kind.split("."):
        value = scope.get(part) if value is None else getattr(value, part, None)
    return value if isinstance(value, type) else None


def _tensor_problem(place: str, value: Any, may_be_meta: bool = False) -> Exception | None:
    """Returns the error for a value that is not a dense tensor of a real dtype, else None."""
    actual = None
    if not isinstance(value, torch.Tensor):
        return TypeError(f"{place} must be a torch.Tensor, got {_type(value)}")
    if value.is_nested:
        actual = "a nested one"
    elif value.is_quantized:
        actual = f"a quantized one ({value.dtype})"
    elif value.layout is not torch.strided:
        actual = f"one of layout {value.layout}"
    elif value.is_meta and not may_be_meta and not runtime.is_traced():
        actual = "one without values, on the meta device, beside others that have them"
    elif value.is_complex():
        return TypeError(f"{place} must have a real dtype, got {value.dtype}")
    return None if actual is None else TypeError(f"{place} must be a dense tensor, got {actual}")


def _list_problem(place: str, value: Any) -> Exception | None:
    """Returns the error for an argument that is not a list of dense tensors; None if it is one."""
    if not isinstance(value, (list, tuple, runtime.core().TensorList)):
        return TypeError(f"{place} must be a list or tuple of tensors, got {_type(value)}")
    if not len(value):
        return ValueError(f"{place} must have a tensor at least, got none")
    found = (_tensor_problem(f"{place}[{i}]", item) for i, item in enumerate(value))
    return next(filter(None, found), None)


def _number_problem(place: str, kinds: list[str], value: Any) -> Exception | None:
    """Returns the error for a value that is of none of some plain types, else None."""
    expected = " or ".join(_NUMBER_OF.get(kind, kind) for kind in kinds)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and "float" in kinds:
        try:
            float(value)
        except OverflowError:
            return ValueError(f"{place} must be in the range of float, got {_large(value)}")
        return None
    if is_int and "int" in kinds:
        if not -(2**63) <= value < 2**63:
            return ValueError(f"{place} must be in the range of int64, got {_large(value)}")
        return None
    python = {"bool": bool, "float": float, "str": str}
    if any(kind in kinds and isinstance(value, python[kind]) for kind in python):
        return None
    return TypeError(f"{place} must be {expected}, got {_type(value)}")


def _large(value: int) -> str:
    return str(value) if value.bit_length() <= 128 else f"an int of {value.bit_length()} bits"


def _type(value: Any) -> str:
    return type(value).__name__


def _described(value: Any) -> str:
    """Returns dtype and shape of a tensor, or of each in a list, for messages; else ""."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return f"[{', '.join(map(_described, value[:4]))}{', ..' if len(value) > 4 else ''}]"
    return ""
