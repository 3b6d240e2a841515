"""ValuesView: a copy of an FP8 weight's values where torch has a view, which refuses writes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from ...runtime.tracing import is_traced

# Methods whose names end as those of writes do, and which leave the values alone.
_HARMLESS = frozenset({"requires_grad_", "detach_", "share_memory_"})
_OPERATORS = frozenset({"__setitem__", *(f"__i{name}__" for name in (
    "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
    "rshift",
))})  # fmt: skip


class ValuesView(torch.Tensor):
    """Values of an FP8 weight, transposed, expanded or with a further dimension.

    They are a copy, although a plain weight would give a view; so a write raises
    NotImplementedError.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(written, cls) for written in _written(func, args, kwargs)):
            raise NotImplementedError(
                f"FP8Parameter: {func.__name__} must write to the whole weight, by copy_ for "
                "example, got a transposed or expanded view of it, whose values are a copy"
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "numpy":
            out.flags.writeable = False
            return out
        given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, cls)]
        if type(out) in (list, tuple):  # views by chunk, split and unbind
            return type(out)(_as_given(part, given) for part in out)
        return _as_given(out, given)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _as_given(out: Any, given: list[ValuesView]) -> Any:
    """Returns a plain tensor over the memory of one of ``given`` as a ValuesView, else ``out``."""
    alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
    if type(out) is torch.Tensor and any(alias(out, view) for view in given):
        return out.as_subclass(ValuesView)
    return out


def guarded(values: torch.Tensor) -> torch.Tensor:
    """Returns a ``ValuesView`` over plain values; in traced code the argument itself."""
    if type(values) is not torch.Tensor or is_traced():
        return values
    return values.as_subclass(ValuesView)


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yields the arguments that a function of torch writes to, told by its name."""
    name = getattr(func, "__name__", "").partition(".")[0]  # of an overload, its op
    is_write = name in _OPERATORS or (
        name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    )
    first = (*args[:1], kwargs.get("tensor")) if is_write else ()  # torch.nn.init names it
    for given in (*first, kwargs.get("out")):
        if isinstance(given, (list, tuple)):
            yield from given
        else:
            yield given


def _plain(values: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return values.as_subclass(torch.Tensor)
