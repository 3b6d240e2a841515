"""The input that a thread's region cast last, for layers that take the same input."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch

from ...fp8.autocast import local
from ...fp8.tensor import QuantizedTensor


class Entry(NamedTuple):
    """An input, and the data that a layer made from it.

    Attributes:
        inp: weak reference to the input as the caller passed it.
        key: ``Quantizer.cast_key()`` of the quantizer that made the rowwise copy ``quantized``.
        alias: the input as an output of the autograd function that took it last, or None.
        grad_fn: the input's node in autograd's graph when ``alias`` was made.
        first: the weight of the layer that took the input first.
    """

    inp: weakref.ref
    version: int
    stream: int
    key: tuple | None
    quantized: QuantizedTensor | None
    alias: torch.Tensor | None
    grad_fn: Any
    first: torch.Tensor

    def taken(self, inp: torch.Tensor) -> torch.Tensor:
        """Returns the alias, or ``inp`` if the input was detached after the alias was made."""
        alias = self.alias
        if alias is None or not inp.requires_grad or inp.grad_fn is not self.grad_fn:
            return inp
        return alias


class _InputRef(weakref.ref):
    """Weak reference to an input, which knows the ``LastInput`` whose entry has it."""

    __slots__ = ("owner",)
    owner: weakref.ref


def _forget(ref: Any) -> None:
    """Drops the entry of an input that is no more."""
    owner = ref.owner()
    if owner is not None and owner.entry is not None and owner.entry.inp is ref:
        owner.entry = None


class LastInput:
    """Holder of the ``Entry`` of the input that was noted last.

    The entry is dropped at the end of its region or of the input's life, by the next input, or by
    the first backward of a layer that noted it. Each thread has its own holder, but a backward may
    drop the entry in any thread.
    """

    __slots__ = ("__weakref__", "entry")

    def __init__(self) -> None:
        self.entry: Entry | None = None

    def find(self, inp: torch.Tensor, weight: torch.Tensor) -> Entry | None:
        """Returns the entry if it is for ``inp`` on this stream, and ``inp`` was not written since.

        The layer that took the input first gets None: a collective or the replay of a CUDA graph
        may have written the next batch without a new version.
        """
        entry = self.entry
        if entry is None or entry.inp() is not inp or inp._version != entry.version:
            return None
        if entry.first is weight:
            return None
        return entry if entry.stream == _stream(inp) else None

    def note(
        self,
        inp: torch.Tensor,
        key: tuple | None,
        quantized: QuantizedTensor | None,
        alias: torch.Tensor | None,
        first: torch.Tensor,
    ) -> None:
        """Replaces the entry by one of the ``Entry``'s attributes."""
        ref = _InputRef(inp, _forget)
        ref.owner = weakref.ref(self)
        node = None if alias is None else inp.grad_fn
        self.entry = Entry(ref, inp._version, _stream(inp), key, quantized, alias, node, first)

    def clear(self) -> None:
        """Drops the entry."""
        self.entry = None


class _Recompute(threading.local):
    """Holds the ``LastInput`` of forwards that run outside of a region, in a backward."""

    def __init__(self) -> None:
        self.last = LastInput()


_recompute = _Recompute()


def last_input(inp: torch.Tensor) -> LastInput | None:
    """Returns the holder for an input in this thread and region; None if nothing may be shared.

    Nothing may be shared in inference mode, which counts no versions, and while a CUDA graph is
    captured, because replays do not run what was computed before.
    """
    if inp.is_inference() or (inp.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    region = local.region
    if region is None:
        return _recompute.last
    if region.last_input is None:
        region.last_input = LastInput()
    return region.last_input


def cast_once(entry: Entry | None, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
    """Returns the rowwise copy of an input: the entry's if a cast would be bitwise equal."""
    if entry is not None and entry.quantized is not None:
        key = quantizer.cast_key()
        if key is not None and key == entry.key:
            return entry.quantized
    return quantizer.quantize(x, True, False)[0]


def _stream(x: torch.Tensor) -> int:
    """Returns the handle of the current CUDA stream of a tensor's device; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
