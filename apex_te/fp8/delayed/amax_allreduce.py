"""All-reduce of staged amax values, the one collective of a scale update; it takes the maximum.

Its buffer has an element for each slot of every FP8 module that the process has constructed, in the
order of construction: 0 if the module has not run or is gone. So the ranks' buffers agree
even if ranks skip modules or collect garbage at different times. A header in front describes the
modules: their number, and a digest of their sizes and labels.

A collective over a group has as many numbers as its ranks last agreed on, 16384 before they ever
did, so that ranks whose modules differ still run one collective of equal size and learn from the
header that they differ. If more numbers are needed, a first collective sends the header and as many
numbers as were agreed, and a second one the rest; further calls need one collective for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from ...comm.agreement import HEADER, TOP, Comparison, compared, header
from ...comm.collectives import max_over_ranks
from ...comm.groups import ranks_of

_QUANTUM = 16384


class SlotRange(NamedTuple):
    """Adjacent slots of one FP8 state; ``at`` is the first one's index among the process's slots.

    ``history`` is fp32 ``[length, slots]``, whose row 0 collects the current amax values; scales
    are fp32 ``[slots]``.
    """

    at: int
    history: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor


class _Channel:
    """Facts that one amax reduction over a process group leaves for the next one.

    ``wanted`` is the longest amax history of ranks that ask for equal scales; 0 if none does.
    """

    __slots__ = ("_copied", "_found", "capacity", "wanted")

    def __init__(self, device: torch.device) -> None:
        self.capacity = _QUANTUM
        self.wanted = 0
        self._copied: Any = None  # event of the last header's copy; None once it was read
        with torch.inference_mode(False):
            self._found = torch.empty(HEADER, dtype=torch.int32, pin_memory=device.type == "cuda")

    @staticmethod
    def of(group: Any, device: torch.device) -> _Channel:
        """Returns the channel of a process group (None: the world); it is made if missing."""
        key = distributed.group.WORLD if group is None else group
        channel = _channels.get(key)
        if channel is None:
            channel = _channels[key] = _Channel(device)
        return channel

    def store(self, reduced: torch.Tensor) -> None:
        """Copies a reduced header, int32 ``[HEADER]``, to the host; does not wait for it."""
        self._found.copy_(reduced, non_blocking=reduced.is_cuda)
        self._copied = torch.cuda.Event() if reduced.is_cuda else True
        if reduced.is_cuda:
            self._copied.record()

    def read(self) -> Comparison | None:
        """Waits for the last header stored and compares the ranks by it; None if already read."""
        if self._copied is None:
            return None
        if self._copied is not True:
            self._copied.synchronize()
        self._copied = None
        found = compared(self._found.tolist())
        self.wanted = found.flag if found.agrees else 0
        return found


_channels: weakref.WeakKeyDictionary[Any, _Channel] = weakref.WeakKeyDictionary()


class RankReduction:
    """Reduces recorded amax values over ranks; checks that all ranks have the same modules.

    ``unsure`` is True if scales and histories may differ between ranks, as after loading. ``sizes``
    are numbers of slots, in the order of modules' construction.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        labels: Sequence[str],
        slots: Sequence[SlotRange],
        device: torch.device,
        unsure: bool = False,
    ) -> None:
        if slots:
            device = slots[0].history.device
        self._modules = len(sizes)
        self._total = sum(sizes)
        self._slots = slots
        self._length = max((s.history.shape[0] for s in slots), default=0)
        capacity = -(-(HEADER + self._total) // _QUANTUM) * _QUANTUM
        with torch.inference_mode(False):
            self._buffer = torch.zeros(capacity, dtype=torch.float32, device=device)
            modules = repr((list(sizes), list(labels))).encode()
            self._own = torch.tensor(header(len(sizes), modules), dtype=torch.int32).to(device)
        if unsure:
            self._own[-1:].fill_(self._length)
        self._rows = [s.history[0] for s in slots]
        starts = [HEADER + s.at for s in slots]
        self._parts = [
            self._buffer[start : start + row.numel()]
            for start, row in zip(starts, self._rows, strict=True)
        ]
        self._agreed: _Channel | None = None  # the channel whose ranks were found to agree

    def run(self, group: Any) -> bool:
        """Reduces recorded amax values over ``group``; returns True if it made all scales equal.

        A new group's header is checked at once, others in the next call, so that no step waits. If
        some rank is unsure, the next call equalises scales and histories by one more collective.

        Raises:
            RankMismatchError: on every rank, if the ranks have different modules.
        """
        buffer, channel = self._buffer, _Channel.of(group, self._buffer.device)
        capturing = buffer.is_cuda and torch.cuda.is_current_stream_capturing()
        equalise = False
        if not capturing:
            self._check(channel, group)
            equalise, channel.wanted = channel.wanted > 0, 0
        used = channel.capacity
        rest = buffer.numel() > used
        with torch.no_grad():
            said = self._fill(equalise)
            max_over_ranks(buffer[:used] if rest else buffer, group)
            if not capturing:
                channel.store(said)
                if equalise or rest or self._agreed is not channel:
                    self._check(channel, group)
                    self._agreed = channel
            if rest:
                max_over_ranks(buffer[used:], group)
                channel.capacity = buffer.numel()
            if self._parts:
                torch._foreach_copy_(self._rows, self._parts)
            if equalise:
                _equalise(self._slots, self._total, channel.wanted, buffer.device, group)
                channel.wanted = 0
                self._own[-1:].zero_()
        return equalise

    def _fill(self, equalise: bool) -> torch.Tensor:
        """Writes header and staged amax values into the buffer; returns the header's view."""
        self._buffer.zero_()
        said = self._buffer[:HEADER].view(torch.int32)
        said.copy_(self._own)
        if equalise:
            said[-1:].fill_(self._length)
        if self._parts:
            torch._foreach_copy_(self._parts, self._rows)
        return said

    def _check(self, channel: _Channel, group: Any) -> None:
        """Raises RankMismatchError if a header not read before shows that ranks' modules differ."""
        found = channel.read()
        if found is None or found.agrees:
            return
        hint = ""
        if found.most == found.least:
            hint = (
                ", whose sizes, classes, layer numbers or stages differ: are there ranks of "
                "another pipeline stage among them?"
            )
        what = "the whole world" if group is None else f"ranks {list(ranks_of(group))}"
        raise found.error(
            f"fp8_autocast: every rank of fp8_group ({what}) must have constructed the same FP8 "
            "modules in the same order",
            self._modules,
            hint,
        )


def _equalise(
    slots: Sequence[SlotRange], total: int, length: int, device: torch.device, group: Any
) -> None:
    """Gives all ranks each slot's smallest scale and largest amax values, by one collective.

    Histories shorter than ``length`` are aligned by their newest rows. Slots that were never set,
    with scale 1 and an empty history, do not count.
    """
    rows = max(length, 1) + 1  # the staging row, which is not sent, gives way to two of scales
    buffer = torch.zeros(rows, total, dtype=torch.float32, device=device)
    bits = buffer.view(torch.int32)
    for at, history, scale, scale_inv in slots:
        mine = slice(at, at + scale.numel())
        is_set = (scale != 1) | (history[1:] != 0).any(0)
        # Positive numbers order as their bits do: the largest of what is left of the top.
        bits[0, mine] = torch.where(is_set, TOP - scale.view(torch.int32), 0)
        buffer[1, mine] = torch.where(is_set, scale_inv, 0.0)
        if history.shape[0] > 1:
            buffer[rows + 1 - history.shape[0] :, mine] = history[1:]
    max_over_ranks(buffer, group)
    for at, history, scale, scale_inv in slots:
        mine = slice(at, at + scale.numel())
        left = bits[0, mine]
        scale.copy_(torch.where(left != 0, (TOP - left).view(torch.float32), scale))
        scale_inv.copy_(torch.where(left != 0, buffer[1, mine], scale_inv))
        if history.shape[0] > 1:
            history[1:] = buffer[rows + 1 - history.shape[0] :, mine]
