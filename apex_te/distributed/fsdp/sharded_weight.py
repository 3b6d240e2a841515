"""A weight in high precision whose FSDP2 shards are gathered as FP8 data.

Its parameter is a ``ShardedWeight``: an ordinary tensor with a storage that knows how it is to be
gathered, and passes this on to its shards, moves and casts. FSDP2 sees the two hooks of its
extension; an optimizer sees the tensor, and results of its arithmetic are plain tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from ...fp8.parameter.parameter import FP8Parameter

__all__ = ["ShardedWeight", "local_of"]

_aten = torch.ops.aten
# Ops whose result is a ShardedWeight again: FSDP2's shards, padding and copies; a module's moves.
_KEEPING = {
    _aten.detach.default, _aten.alias.default, _aten.slice.Tensor, _aten.new_zeros.default,
    _aten._to_copy.default, _aten.empty_like.default, _aten._pin_memory.default,
}  # fmt: skip


class _BeforeGather:
    """FSDP2's first hook; its fixed signature is fast to read, which FSDP2 does at every gather."""

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
    """A weight, or this rank's rows of it, that FSDP2 gathers with the hooks of its ``source``.

    ``copy.deepcopy`` and pickles of it are plain.

    Attributes:
        source: the ``HookedParam``, whose ``changes`` counts the writes to the weight.
    """

    source: Any

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(plain: torch.Tensor, source: Any) -> ShardedWeight:
        """Returns ``plain`` as a ShardedWeight that shares its storage."""
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
        """Returns the values as a plain tensor that shares storage and version."""
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
        """Makes the whole weight of the gathered FP8 data; from the second time on in ``out``."""
        return self.source.whole(all_gather_outputs, metadata, param_dtype, out)


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yields the tensors that an op writes to.

    Versions do not tell: those of tensors in DTensor's lists stay as they are.
    """
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from given if isinstance(given, (list, tuple)) else (given,)


def local_of(parameter: Any) -> torch.Tensor | None:
    """Returns the local tensor of a DTensor, else None; does not import torch's DTensor."""
    return getattr(parameter, "_local_tensor", None)
