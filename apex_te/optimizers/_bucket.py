"""Buckets: parameters of one group and device with one step count, updated by one launch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import runtime
from ..ops import multi_tensor
from ._sharded import local, placed, with_part

MASTER = "master_param"
STEP = "step"
# Elements whose float32 copies are in memory at a time where moments are kept in bfloat16.
WIDE_ELEMENTS = 1 << 25

State = dict[str, Any]


def needs_copy(param: torch.Tensor) -> bool:
    """Returns True if a parameter has no plain storage (FP8), so that values go in by ``copy_``."""
    return is_traceable_wrapper_subclass(local(param))


def has_master(param: torch.Tensor) -> bool:
    """Returns True if a parameter needs a master weight, as all but plain float32 ones do."""
    return param.dtype is not torch.float32 or needs_copy(param)


def new_state(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros of the parameter's shape, device, placement and memory format.

    The result is a DTensor for a DTensor, and plain inside.
    """
    part = local(param)
    if needs_copy(part):
        zeros = torch.zeros(part.shape, dtype=dtype, device=part.device)
    else:
        zeros = torch.zeros_like(part, dtype=dtype, requires_grad=False)
    return with_part(param, zeros)


def new_master(param: torch.Tensor) -> torch.Tensor:
    """Returns a float32 copy of ``param``, of the value before quantization if that is kept."""
    part = local(param)
    source: torch.Tensor | None = None
    if hasattr(part, "get_high_precision_init_val"):
        source = part.get_high_precision_init_val()
    with torch.no_grad():
        master = new_state(param, torch.float32)
        local(master).copy_(part.detach() if source is None else source)
    if source is not None:
        part.clear_high_precision_init_val()  # type: ignore[attr-defined]
    return master


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the permutation that makes a tensor contiguous, None if none is needed or helps."""
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


class Source(NamedTuple):
    """Source of a parameter's gradient: the master's ``.grad`` or its own."""

    param: torch.Tensor
    master: torch.Tensor | None
    order: tuple[int, ...] | None
    is_sharded: bool

    def grad(self, owner: str) -> torch.Tensor:
        """Returns this rank's part of the gradient, contiguous; ``owner`` is for messages."""
        grad = self.param.grad
        if self.master is not None and self.master.grad is not None:
            grad = self.master.grad
        assert grad is not None
        if self.is_sharded:
            grad = local(placed(owner, "gradients", grad, self.param))
        return grad if self.order is None else grad.permute(self.order)


class Bucket:
    """Prepared lists of parameters, masters and moments, and the step count they share.

    Attributes:
        params, masters, moments: lists for the launch; of DTensors this rank's parts.
        step: a number on the host, a float32 scalar on the device, or None if none is counted.
        owners: the parameters as the user knows them.
        sharded: those of them that are DTensors.
        wrapped: ``(param, master)`` of parameters without plain storage.
        device: the device of all.
    """

    __slots__ = ("_parts", "_plain", "_sources", "_states", "device", "masters", "moments",
                 "owners", "params", "sharded", "step", "wrapped")  # fmt: skip

    def __init__(self, params: list[torch.Tensor], states: list[State], names: tuple[str, ...]):
        parts = [local(p) for p in params]
        orders = [None if needs_copy(p) else dense_order(p) for p in parts]
        masters: list[Any] = [s.get(MASTER) for s in states]
        splits = [part is not param for part, param in zip(parts, params, strict=True)]
        self.device = parts[0].device
        self._states = states
        self._sources = [Source(*s) for s in zip(params, masters, orders, splits, strict=True)]
        self._plain = not any(orders) and masters[0] is None and not any(splits)
        self.owners = params
        self._parts = parts
        self.sharded = [param for param, split in zip(params, splits, strict=True) if split]
        self.step: int | torch.Tensor | None = states[0].get(STEP)
        masters = [None if master is None else local(master) for master in masters]
        self.wrapped = list(zip(parts, masters, strict=True)) if needs_copy(parts[0]) else []

        def prepared(tensors: list[Any]) -> Any:
            pairs = zip(tensors, orders, strict=True)
            return runtime.tensor_list([t.detach().permute(o) if o else t for t, o in pairs])

        self.params = prepared(masters if self.wrapped else parts)
        has_masters = masters[0] is not None and not self.wrapped
        self.masters = prepared(masters) if has_masters else None
        self.moments = [prepared([local(s[name]) for s in states]) for name in names]

    def watched(self) -> Iterator[tuple[Callable[[], int], int]]:
        """Yields checks that tell when the lists are out of date.

        Yields:
            ``(function, value)``: the function returns another value once parameters have moved:
            the address of storage that the lists view, or if DTensors have the same parts.
        """
        for part, source in zip(self._parts, self._sources, strict=True):
            if source.order is not None:
                yield part.data_ptr, part.data_ptr()
        if self.sharded:
            yield self._has_parts, True

    def _has_parts(self) -> bool:
        return all(map(operator.is_, map(local, self.owners), self._parts))

    def grads(self, owner: str) -> list[torch.Tensor]:
        """Returns the gradients in the order of the lists; ``owner`` is for messages."""
        if self._plain:
            return [source.param.grad for source in self._sources]  # type: ignore[misc]
        return [source.grad(owner) for source in self._sources]

    def set_step(self, step: int | torch.Tensor) -> None:
        """Gives every parameter this step count; a tensor is shared."""
        self.step = step
        for state in self._states:
            state[STEP] = step

    def advance(self, found_inf: torch.Tensor | None) -> None:
        """Counts one step, on the device if a flag there says whether the step is taken."""
        step = self.step
        if step is None:
            return
        if found_inf is not None and not isinstance(step, torch.Tensor):
            self.set_step(torch.full((), step, dtype=torch.float32, device=self.device))
        if not isinstance(self.step, torch.Tensor):
            self.set_step(self.step + 1)  # type: ignore[operator]
        elif found_inf is None:
            self.step.add_(1)
        else:
            self.step.add_(found_inf.reshape(()) == 0)

    def run(self, op: Callable[..., None], grads: list[torch.Tensor], options: State) -> None:
        """Runs an optimizer step of ``ops.multi_tensor_optim`` on the lists, then ``finish``."""
        self.update(op, grads, options)
        self.finish()

    def update(self, op: Callable[..., None], grads: list[torch.Tensor], options: State) -> None:
        """Runs an optimizer step on the lists without ``finish``."""
        moments = [_widened(narrow) for narrow in self.moments]
        op(self.params, grads, *moments, masters=self.masters, **options)
        for narrow, wide in zip(self.moments, moments, strict=True):
            if wide is not narrow:
                multi_tensor.scale(wide, narrow, 1.0)

    def finish(self) -> None:
        """Copies masters to parameters without plain storage, and tells autograd of new values."""
        for param, master in self.wrapped:
            param.copy_(master)
        if self.sharded:  # a DTensor counts its versions beside its part's
            increment_version(self.sharded)


def _widened(moments: Any) -> Any:
    """Returns float32 moments as they are, float32 copies of bfloat16 ones in one allocation."""
    if moments[0].dtype is torch.float32:
        return moments
    sizes = [-(-m.numel() // 4) * 4 for m in moments]  # 16-byte starts
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=moments[0].device)
    pieces = zip(flat.split(sizes), moments, strict=True)
    wide = [piece[: m.numel()].view(m.shape) for piece, m in pieces]
    multi_tensor.scale(moments, wide, 1.0)
    return wide


def partition(
    params: list[torch.Tensor], states: list[State], names: tuple[str, ...]
) -> Iterator[list[int]]:
    """Yields indices of the parameters that go together: one device, one kind, one step count."""
    together: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    for i, (param, state) in enumerate(zip(params, states, strict=True)):
        step = state.get(STEP)
        count = id(step) if isinstance(step, torch.Tensor) else step
        key = (param.device, needs_copy(param), MASTER in state, type(step), count)
        narrow = any(state[name].dtype is not torch.float32 for name in names)
        size = sizes.get(key, 0) + param.numel()
        if narrow and key in together and size > WIDE_ELEMENTS:
            yield together.pop(key)
            size = param.numel()
        together.setdefault(key, []).append(i)
        sizes[key] = size
    yield from together.values()
