"""The one collective of a scale update: the largest staged amax of every slot over ranks.

The buffer has the slots of every FP8 module that the process has constructed, in that order,
whether it has run (else 0) and still exists or not: then the ranks' buffers agree even where they
skip modules or collect garbage at different times. A header says how many modules there are, of
which sizes and classes and in which layers. The buffer's size is a multiple of 16384 numbers, so
that ranks that differ still take part in the same collective and learn from the header that they
do.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from .distributed.collectives import max_over_ranks

__all__ = ["RankMismatchError", "RankReduction"]

_HEADER = 4
_QUANTUM = 16384
_TOP = 0x7FFFFFFF


class RankMismatchError(RuntimeError):
    """The ranks of ``fp8_group`` have different FP8 modules."""


class RankReduction:
    """Reduces rows of staged amaxes, and sees to it that the ranks mean the same by them.

    Args:
        sizes, labels: slots of each module of the process, in the order of construction, and what
            all ranks call it.
        rows: fp32 rows to be reduced and where each begins among the slots.
        device: of the collective, if there is no row.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        labels: Sequence[str],
        rows: list[tuple[int, torch.Tensor]],
        device: torch.device,
    ) -> None:
        if rows:
            device = rows[0][1].device
        self._modules = len(sizes)
        used = _HEADER + sum(sizes)
        capacity = -(-used // _QUANTUM) * _QUANTUM
        with torch.inference_mode(False):
            self._buffer = torch.zeros(capacity, dtype=torch.float32, device=device)
            digest = zlib.crc32(repr((list(sizes), list(labels))).encode()) & _TOP
            header = [self._modules, _TOP - self._modules, digest, _TOP - digest]
            self._own = torch.tensor(header, dtype=torch.int32).to(device)
            self._found = torch.empty(_HEADER, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._rows = [row for _, row in rows]
        starts = [_HEADER + start for start, _ in rows]
        self._parts = [
            self._buffer[start : start + row.numel()]
            for start, row in zip(starts, self._rows, strict=True)
        ]
        self._copied: Any = None  # the event after which `_found` holds the last header
        self._checked: list[Any] = []  # groups whose ranks were found to agree

    def run(self, group: Any) -> None:
        """One collective over ``group``.

        The header is read at once where a group is new, later at the next call: no step waits.

        Errors: RankMismatchError on every rank.
        """
        self._check_last(group)
        capturing = self._buffer.is_cuda and torch.cuda.is_current_stream_capturing()
        with torch.no_grad():
            self._buffer.zero_()
            self._buffer[:_HEADER].view(torch.int32).copy_(self._own)
            if self._parts:
                torch._foreach_copy_(self._parts, self._rows)
            max_over_ranks(self._buffer, group)
            if not capturing:
                header = self._buffer[:_HEADER].view(torch.int32)
                self._found.copy_(header, non_blocking=self._buffer.is_cuda)
                self._copied = torch.cuda.Event() if self._buffer.is_cuda else True
                if self._buffer.is_cuda:
                    self._copied.record()
            if not capturing and not any(group is known for known in self._checked):
                self._check_last(group)
                self._checked.append(group)
            if self._parts:
                torch._foreach_copy_(self._rows, self._parts)

    def _check_last(self, group: Any) -> None:
        if self._copied is None:
            return
        if self._buffer.is_cuda:
            self._copied.synchronize()
        self._copied = None
        most, least, digest, other = self._found.tolist()
        if most == _TOP - least and digest == _TOP - other:
            return
        hint = ""
        if most == _TOP - least:
            hint = (
                ", whose sizes, classes or layer numbers differ: are there ranks of another "
                "pipeline stage among them?"
            )
        what = "the whole world" if group is None else f"ranks {_ranks(group)}"
        raise RankMismatchError(
            f"fp8_autocast: every rank of fp8_group ({what}) must have constructed the same FP8 "
            f"modules in the same order; this rank has {self._modules}, the ranks have from "
            f"{_TOP - least} to {most}{hint}"
        )


def _ranks(group: Any) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)
