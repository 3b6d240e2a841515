"""Logits of a head that are computed when something uses them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..fp8.autocast import fp8_autocast, is_fp8_enabled
from ..runtime.stamp import watch_fused_optimizers
from ..runtime.tracing import is_transformed

# Names of the operators of tensors, without their underscores.
_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
    "mod", "rmod", "pow", "rpow", "matmul", "rmatmul", "neg", "pos", "abs", "invert", "lt", "le",
    "eq", "ne", "gt", "ge", "getitem", "setitem", "contains", "len", "iter", "reversed", "bool",
    "float", "int", "complex", "index", "array", "array_wrap", "dlpack", "dlpack_device", "format",
    "deepcopy", "reduce_ex",
)  # fmt: skip
# Names of those that write to the tensor.
_INPLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")
_OWN = frozenset(
    ("head", "hidden", "_weight", "_bias", "_versions", "_is_autocast", "_autocast_dtype",
     "_is_recorded", "_dtype", "_logits")
)  # fmt: skip


class LazyLogits:
    """Logits of a head on ``hidden`` ``[..., in]``, computed on first use and then kept.

    An object can be used like the tensor of logits, but is not an instance of ``torch.Tensor``:
    functions that ask for one, such as accelerate's ``gather``, need ``logits.compute()``.
    ``shape``, ``dtype``, ``device`` and ``float()`` compute nothing. Pickling it saves a tensor.
    Backward of the loss does not give it a gradient.
    """

    __array_priority__ = 1000  # as a tensor's, by which NumPy leaves operators to it

    def __init__(self, head: nn.Module, hidden: torch.Tensor) -> None:
        watch_fused_optimizers()  # whose steps leave versions as they are
        self.head, self.hidden = head, hidden
        self._weight: Any = head.weight
        self._bias: Any = head.bias
        self._versions = self._current_versions()
        kind = hidden.device.type
        self._is_autocast = torch.is_autocast_enabled(kind)
        self._autocast_dtype = torch.get_autocast_dtype(kind)
        self._is_recorded = torch.is_grad_enabled()
        self._dtype = self._autocast_dtype if self._is_autocast else hidden.dtype
        self._logits: torch.Tensor | None = None

    def _current_versions(self) -> list[tuple[int, int]]:
        """Returns versions and addresses of what the logits are computed from."""
        return [_version(one) for one in (self.hidden, self._weight, self._bias)]

    @property
    def is_unused(self) -> bool:
        """Returns True if the logits were not computed yet, so nothing can have changed them."""
        return self._logits is None

    @property
    def shape(self) -> torch.Size:
        """Returns ``[..., vocabulary]``."""
        return torch.Size((*self.hidden.shape[:-1], self._weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the logits."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Returns the device of the logits."""
        return self.hidden.device

    def contiguous(self, **options: Any) -> Any:
        """Returns this object, or a tensor if logits are computed or options are given."""
        return self if self.is_unused and not options else self.compute().contiguous(**options)

    def float(self, **options: Any) -> Any:
        """Returns the logits in fp32 without computing them; accelerate calls this on outputs."""
        if not self.is_unused or options:
            return self.compute().float(**options)
        if self.dtype is torch.float32:
            return self
        result = object.__new__(LazyLogits)
        vars(result).update({**vars(self), "_dtype": torch.float32})
        return result

    def compute(self) -> torch.Tensor:
        """Returns the tensor of logits, ``[..., vocabulary]``, as the head computes it."""
        if self._logits is None:
            self._check_sources()
            kind = self.device.type
            # As where the head was called, whatever surrounds the first use: later ones may need
            # the graph, and a tensor that is computed again has lost changes that were made to it.
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(self._is_recorded),
                torch.autocast(kind, self._autocast_dtype, self._is_autocast),
                fp8_autocast(enabled=False) if is_fp8_enabled() else nullcontext(),
            ):
                self._logits = self._product().to(self._dtype)
        return self._logits

    def _product(self) -> torch.Tensor:
        """Returns what the head gives."""
        if self.head.weight is self._weight and self.head.bias is self._bias:
            head: Any = type(self.head)
            return head.forward(self.head, self.hidden)
        return nn.functional.linear(self.hidden, self._weight, self._bias)  # of functional_call

    def _check_sources(self) -> None:
        """Raises an error if the logits cannot be computed as where the head was called."""
        now, weight = self.head.weight, self._weight
        is_plain = type(weight) in (torch.Tensor, nn.Parameter) and not hasattr(now, "to_local")
        # FSDP puts its shard in the place, and frees the memory of what was whole.
        is_whole = now is weight or (
            is_plain and now.shape == weight.shape and weight.untyped_storage().nbytes() > 0
        )
        if not is_whole:
            raise RuntimeError(
                "LazyLogits: logits must be used before the head's weight is replaced or sharded, "
                "got their first use after that"
            )
        for name, before, version in zip(
            ("input", "weight", "bias"), self._versions, self._current_versions(), strict=True
        ):
            if version != before:  # as also by module.to(dtype), which leaves the version
                raise RuntimeError(
                    f"LazyLogits: logits must be used before the head's {name} changes, as in an "
                    "optimizer's step, got their first use after that"
                )

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*_computed(args), **_computed(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that tensors need not have
            raise AttributeError(name)
        return getattr(self.compute(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self if name in _OWN else self.compute(), name, value)

    def __repr__(self) -> str:
        state = "not computed" if self._logits is None else "computed"
        return f"LazyLogits({list(self.shape)}, {self.dtype}, {self.device}, {state})"

    __hash__ = object.__hash__


def _version(x: torch.Tensor | None) -> tuple[int, int]:
    """Returns the version of a tensor and its address, 0 where it has none."""
    if x is None:
        return 0, 0
    is_plain = type(x) in (torch.Tensor, nn.Parameter)
    address = x.data_ptr() if is_plain and not is_transformed([x]) else 0
    return (0 if x.is_inference() else x._version), address


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


def _inplace_operator(name: str) -> Callable[..., Any]:
    """Returns the method of an operator that writes to its first operand."""
    operator = _operator(name)

    def method(self: LazyLogits, *args: Any) -> Any:
        operator(self, *args)
        return self

    method.__name__ = name
    return method


for _name in _OPERATORS:
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))
for _name in _INPLACE:
    setattr(LazyLogits, f"__{_name}__", _inplace_operator(f"__{_name}__"))
