"""Tensor subclass for weights in bf16 or fp32 that FSDP2 gathers as FP8 data.

A ``ShardedWeight`` has a storage of its own, as a plain tensor has, and the two hooks of FSDP2's
extension for all-gathers. Shards, moves to other devices and casts of it are ``ShardedWeight``s
with the same hooks; results of all other ops, such as an optimizer's arithmetic, are plain tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from ...fp8.parameter.parameter import FP8Parameter

_aten = torch.ops.aten
# Ops whose result is a ShardedWeight again: FSDP2's shards, padding and copies; a module's moves.
_KEEPING = {
    _aten.detach.default, _aten.alias.default, _aten.slice.Tensor, _aten.new_zeros.default,
    _aten._to_copy.default, _aten.empty_like.default, _aten._pin_memory.default,
}  # fmt: skip


class _BeforeGather:
    """Callable hook ``fsdp_pre_all_gather`` of a ``ShardedWeight``."""

    __slots__ = ("weight",)

    __signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("mesh", "outer_size", "outer_stride", "module", "mp_policy")
        ]
    )

    def __init__(self, weight: ShardedWeight) -> None:
        self.weight = weight

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        return self.weight.source.payload(self.weight, mesh, outer_size, mp_policy)


class ShardedWeight(torch.Tensor):
    """Weight in bf16 or fp32, complete or this rank's rows, that FSDP2 gathers as FP8 data.

    Each op that writes to it increments ``source.changes``. ``copy.deepcopy`` and ``pickle`` return
    plain tensors.
    """

    source: Any

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(plain: torch.Tensor, source: Any) -> ShardedWeight:
        """Returns a weight with the storage of ``plain``; ``source`` is its ``HookedParam``."""
        weight = torch.Tensor._make_subclass(ShardedWeight, plain)
        weight.source = source
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(kind is not cls and issubclass(kind, FP8Parameter) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for x in _written(func, args, kwargs):
                if type(x) is cls:
                    x.source.changes += 1
        with torch._C._DisableTorchDispatch():
            out = func(*args, **kwargs)
        # Shards and moves of the matrix; a flat copy is FSDP2's own.
        if func in _KEEPING and type(out) is torch.Tensor and out.dim() == 2:
            return cls.of(out, args[0].source)
        return out

    def plain(self) -> torch.Tensor:
        """Returns a plain tensor that shares this weight's storage and version counter."""
        with torch._C._DisableTorchDispatch():
            return self.detach()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.plain()!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        found = memo.get(id(self))
        if found is None:
            found = self.plain().clone()
            if getattr(self, "_is_param", False):
                found = torch.nn.Parameter(found, self.requires_grad)
            memo[id(self)] = found
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.plain()
        if getattr(self, "_is_param", False):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)

    @property
    def fsdp_pre_all_gather(self) -> _BeforeGather:
        """Returns the hook that makes the FP8 data of this shard, padded as FSDP2 expects."""
        return _BeforeGather(self)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Returns ``(weight, ())``, made from the gathered FP8 data; None if ``out`` is given."""
        return self.source.whole(all_gather_outputs, metadata, param_dtype, out)


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yields the arguments that an op's schema marks as written to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from given if isinstance(given, (list, tuple)) else (given,)


def local_of(parameter: Any) -> torch.Tensor | None:
    """Returns the local tensor of a DTensor, None for other objects; does not import DTensor."""
    return getattr(parameter, "_local_tensor", None)
