"""Agreement between ranks: checks, before other collectives, that all ranks call them alike.

Without the check, ranks that differ (in the number of tensors, in shapes, in dtypes) would pair one
collective with another: they would hang, or read data that was meant for something else. Each rank
describes what it is about to do by a header of ``HEADER`` int32 numbers::

    count, TOP - count, digest, TOP - digest, flag

The element-wise maximum of the headers of all ranks tells the largest and the smallest count,
whether all digests are equal, and the largest flag. Two kinds of collectives carry headers:

- a MAX all-reduce of numbers that begin with the header: the caller builds it by ``header``, runs
  the all-reduce, and reads the result by ``compared``;
- an all-gather of descriptions as text, after which messages can say which rank has which value:
  ``check_same`` does all of it.

The size of both collectives is the same whatever a rank describes, so that ranks that differ still
take part in one and the same collective.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from .collectives import world_size

HEADER = 5
TOP = 0x7FFFFFFF  # the largest int32; a maximum of TOP - x tells the smallest x
_BYTES = 4096  # of a description, its header included
_HEADER_BYTES = 4 * HEADER
_REFUSED = "arguments"
_SHOWN = 16  # ranks in a message


class RankMismatchError(RuntimeError):
    """Error raised if ranks of a process group differ in what a collective needs to be equal.

    Ranks may differ, for example, in FP8 modules, in trained parameters, in the arguments of a
    tensor-parallel layer, or in the dtype of an expert-parallel layer's tokens.
    """


def header(count: int, content: bytes, flag: int = 0) -> list[int]:
    """Returns this rank's ``HEADER`` int32 numbers, to reduce by MAX and pass to ``compared``."""
    digest = zlib.crc32(content) & TOP
    return [count, TOP - count, digest, TOP - digest, flag]


class Comparison(NamedTuple):
    """Outcome of comparing all ranks' headers: the range of counts, and the largest flag."""

    least: int
    most: int
    same_digest: bool
    flag: int

    @property
    def agrees(self) -> bool:
        """Returns True if all ranks sent the same count and digest."""
        return self.least == self.most and self.same_digest

    def error(self, message: str, count: int, hint: str = "") -> RankMismatchError:
        """Returns the error that the caller raises if the ranks differ."""
        return RankMismatchError(
            f"{message}; this rank has {count}, the ranks have from {self.least} to {self.most}"
            f"{hint}"
        )


def compared(numbers: Sequence[int]) -> Comparison:
    """Compares all ranks, given the element-wise maximum of their headers."""
    most, least, largest, smallest, flag = numbers
    return Comparison(TOP - least, most, largest == TOP - smallest, flag)


def check_same(
    owner: str,
    group_name: str,
    group: Any,
    values: Mapping[str, object],
    device: torch.device,
    error: Exception | None = None,
    wanted: str = "arguments must fit",
) -> None:
    """Checks that ``values`` are equal on all ranks of ``group``; None is the whole world.

    Collective; the host waits. If this rank has an ``error``, of its arguments or of what
    ``wanted`` says, that is raised after the collective, and the other ranks raise
    ``RankMismatchError`` instead of waiting forever.
    Values are compared as text: enums by name, callables by qualified name, others by ``str``.
    """
    if error is not None:
        values = {_REFUSED: f"{type(error).__name__}: {error}"}
    descriptions = _gathered(_description(values, error is not None), group, device)
    if error is not None:
        raise error
    headers = (struct.unpack_from(f"<{HEADER}i", found) for found in descriptions)
    found = compared([max(numbers) for numbers in zip(*headers, strict=True)])
    if found.agrees and len(set(descriptions)) == 1:
        return
    known = [_read(description) for description in descriptions]
    ranks = distributed.get_process_group_ranks(distributed.group.WORLD if group is None else group)
    where = f"the ranks of {group_name} ({_named(ranks)})"
    if found.flag:
        refused = _by_value(_REFUSED, ranks, known)
        raise RankMismatchError(f"{owner}: {wanted} on all of {where}, got {refused}")
    differing = [
        f"{key} (got {_by_value(key, ranks, known)})"
        for key, value in known[0].items()
        if all(key in found for found in known) and any(found[key] != value for found in known)
    ]
    what = "; ".join(differing) or f"description beyond {_BYTES} bytes"
    raise RankMismatchError(f"{owner}: {where} must have the same {what}")


def _description(values: Mapping[str, object], has_error: bool) -> bytes:
    """Returns the header and as many lines ``name=value`` as fit, padded to ``_BYTES`` bytes."""
    lines = [f"{key}={' '.join(str(_word(value)).split())}" for key, value in values.items()]
    text = "\n".join(lines).encode()
    numbers = header(len(text), text, int(has_error))
    return (struct.pack(f"<{HEADER}i", *numbers) + text)[:_BYTES].ljust(_BYTES, b"\0")


def _word(value: object) -> object:
    """Returns what to compare ``value`` by: a callable's own ``str`` may hold an address."""
    if isinstance(value, enum.Enum):
        return value.name
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else value


def _gathered(description: bytes, group: Any, device: torch.device) -> list[bytes]:
    """Gathers the ``_BYTES`` bytes of each rank, by rank in the group; the host waits."""
    if distributed.get_backend(group) == "gloo":
        device = torch.device("cpu")
    row = torch.frombuffer(bytearray(description), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(row) for _ in range(world_size(group))]
    distributed.all_gather(rows, row, group=group)
    return [bytes(found.tolist()) for found in torch.stack(rows).cpu()]


def _read(description: bytes) -> dict[str, str]:
    """Parses a rank's description; what did not fit in it is cut off or missing."""
    text = description[_HEADER_BYTES:].rstrip(b"\0").decode(errors="replace")
    return {key: value for key, _, value in (line.partition("=") for line in text.split("\n"))}


def _by_value(key: str, ranks: list[int], known: list[dict[str, str]]) -> str:
    """Returns text for a message: each value of ``key``, and the ranks that sent it."""
    found: dict[str, list[int]] = {}
    for rank, values in zip(ranks, known, strict=True):
        if key in values:
            found.setdefault(values[key], []).append(rank)
    return " and ".join(f"{value} on {_named(which)}" for value, which in found.items())


def _named(ranks: list[int]) -> str:
    """Returns text for a message, such as "ranks 0, 1", that names up to ``_SHOWN`` ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    return f"ranks {shown}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
