"""Logits of a head that are computed when something uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

__all__ = ["LazyLogits"]

# Names of the operators of tensors, without their underscores.
_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
    "mod", "rmod", "pow", "rpow", "matmul", "rmatmul", "neg", "pos", "abs", "invert", "lt", "le",
    "eq", "ne", "gt", "ge", "getitem", "setitem", "contains", "len", "iter", "bool", "float", "int",
    "index", "array", "format", "reduce_ex",
)  # fmt: skip


class LazyLogits:
    """Logits of a head, which the first use computes and which then stay.

    An object of this class can be used as the tensor of logits: in operators, as an argument of
    functions of torch, and through every attribute and method of a tensor; it only is no instance
    of ``torch.Tensor``. ``shape``, ``dtype`` and ``device`` compute nothing. A pickle of it is a
    tensor.

    Args:
        head: the head, an ``nn.Linear`` or ``apex_te.Linear``.
        hidden: hidden states ``[..., in]`` that the head is applied to.

    Attributes:
        head, hidden: the arguments.

    Raises:
        RuntimeError: the logits are used for the first time after the head's weight has changed or
            been sharded.
    """

    def __init__(self, head: nn.Module, hidden: torch.Tensor) -> None:
        self.head, self.hidden = head, hidden
        weight: Any = head.weight
        self._weight, self._version = weight, weight._version
        kind = hidden.device.type
        self._is_autocast = torch.is_autocast_enabled(kind)
        self._autocast_dtype = torch.get_autocast_dtype(kind)
        self._logits: torch.Tensor | None = None

    @property
    def is_unused(self) -> bool:
        """Returns True if the logits were not computed, so that nothing can have changed them."""
        return self._logits is None

    @property
    def shape(self) -> torch.Size:
        """Returns ``[..., vocabulary]``."""
        return torch.Size((*self.hidden.shape[:-1], self._weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the logits."""
        return self._autocast_dtype if self._is_autocast else self.hidden.dtype

    @property
    def device(self) -> torch.device:
        """Returns the device of the logits."""
        return self.hidden.device

    def contiguous(self, **options: Any) -> Any:
        """Returns these logits, since a head's are contiguous; or what their tensor returns."""
        return self if self.is_unused and not options else self.compute().contiguous(**options)

    def compute(self) -> torch.Tensor:
        """Returns the logits, ``[..., vocabulary]``, as the head gives them."""
        is_detached = self._logits is not None and not self._logits.requires_grad
        wants_graph = torch.is_grad_enabled() and (
            self.hidden.requires_grad or self._weight.requires_grad
        )
        if self._logits is None or (is_detached and wants_graph):
            if self.head.weight is not self._weight:  # FSDP puts its shard in the place
                raise RuntimeError(
                    "LazyLogits: logits must be used before the head's weight is replaced or "
                    "sharded, got their first use after that"
                )
            if self._weight._version != self._version:
                raise RuntimeError(
                    "LazyLogits: logits must be used before the head's weight changes, as in an "
                    "optimizer's step, got their first use after that"
                )
            head: Any = type(self.head)
            with torch.autocast(self.device.type, self._autocast_dtype, self._is_autocast):
                self._logits = head.forward(self.head, self.hidden)
        return self._logits

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*_computed(args), **_computed(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that tensors need not have
            raise AttributeError(name)
        return getattr(self.compute(), name)

    def __repr__(self) -> str:
        state = "not computed" if self._logits is None else "computed"
        return f"LazyLogits({list(self.shape)}, {self.dtype}, {self.device}, {state})"

    __hash__ = object.__hash__


def _computed(values: Any) -> Any:
    """Returns values in which tensors stand for lazy logits."""
    return tree_map(
        lambda value: value.compute() if isinstance(value, LazyLogits) else value, values
    )


def _operator(name: str) -> Callable[..., Any]:
    """Returns the method of an operator, which tensors have."""

    def method(self: LazyLogits, *args: Any) -> Any:
        return getattr(self.compute(), name)(*_computed(args))

    method.__name__ = name
    return method


for _name in _OPERATORS:
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))
