"""Agreement between ranks: checks that all ranks of a group are about to do the same.

Ranks that differ would pair one collective with another: they would hang, or go on with data that
was meant for something else. Whatever is compared has a header of ``HEADER`` int32 numbers::

    count, TOP - count, digest, TOP - digest, flag

whose element-wise maximum over ranks tells the largest and the smallest count, whether all digests
are equal, and the largest flag. Two kinds of collectives carry it: a MAX all-reduce of numbers,
where the header comes first (``header``, ``compared``), and a gather of descriptions, which also
tells which rank has which value (``check_same``). Their size does not depend on what a rank
compares, so that ranks that differ still meet in the same collective.
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

__all__ = ["HEADER", "TOP", "Comparison", "RankMismatchError", "check_same", "compared", "header"]

HEADER = 5
TOP = 0x7FFFFFFF  # the largest int32; a maximum of TOP - x tells the smallest x
_BYTES = 4096  # of a description, its header included
_HEADER_BYTES = 4 * HEADER
_REFUSED = "arguments"
_SHOWN = 16  # ranks in a message


class RankMismatchError(RuntimeError):
    """Ranks of a group differ: in their FP8 modules, in what a split layer does, in its tokens."""


def header(count: int, content: bytes, flag: int = 0) -> list[int]:
    """Returns the header of one rank.

    Args:
        count: number of the things that are compared.
        content: description of these things; its digest is sent.
        flag: a number of which the largest is found, not compared.
    """
    digest = zlib.crc32(content) & TOP
    return [count, TOP - count, digest, TOP - digest, flag]


class Comparison(NamedTuple):
    """The headers of all ranks of a group, compared.

    Attributes:
        least: the smallest count.
        most: the largest count.
        same_digest: all ranks sent the same digest.
        flag: the largest flag.
    """

    least: int
    most: int
    same_digest: bool
    flag: int

    @property
    def agrees(self) -> bool:
        """Returns True if all ranks sent the same count and digest."""
        return self.least == self.most and self.same_digest

    def error(self, message: str, count: int, hint: str = "") -> RankMismatchError:
        """Returns the error for ranks that differ; ``count`` is this rank's."""
        return RankMismatchError(
            f"{message}; this rank has {count}, the ranks have from {self.least} to {self.most}"
            f"{hint}"
        )


def compared(numbers: Sequence[int]) -> Comparison:
    """Compares the headers of all ranks, of which ``numbers`` is the element-wise maximum."""
    most, least, largest, smallest, flag = numbers
    return Comparison(TOP - least, most, largest == TOP - smallest, flag)


def check_same(
    owner: str,
    group_name: str,
    group: Any,
    values: Mapping[str, object],
    device: torch.device,
    error: Exception | None = None,
) -> None:
    """Checks that ``values`` are the same on all ranks of ``group``; collective, waited for.

    Args:
        owner: class or function that asks, for messages.
        group_name: argument that ``group`` was given as, for messages.
        group: process group; None is the whole world.
        values: what is compared, by name.
        device: device of the tensors that the ranks are about to send.
        error: reason why this rank cannot go on, raised here once the other ranks know of it.

    Raises:
        Exception: ``error``, on the rank that has it.
        RankMismatchError: on every rank, values differ; or on the others, a rank has an error.
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
        raise RankMismatchError(f"{owner}: arguments must fit on all of {where}, got {refused}")
    differing = [
        f"{key} (got {_by_value(key, ranks, known)})"
        for key, value in known[0].items()
        if all(key in found for found in known) and any(found[key] != value for found in known)
    ]
    what = "; ".join(differing) or f"description beyond {_BYTES} bytes"
    raise RankMismatchError(f"{owner}: {where} must have the same {what}")


def _description(values: Mapping[str, object], has_error: bool) -> bytes:
    """Returns ``_BYTES`` bytes: the header, then as many lines ``name=value`` as fit."""
    lines = [f"{key}={' '.join(str(_word(value)).split())}" for key, value in values.items()]
    text = "\n".join(lines).encode()
    numbers = header(len(text), text, int(has_error))
    return (struct.pack(f"<{HEADER}i", *numbers) + text)[:_BYTES].ljust(_BYTES, b"\0")


def _word(value: object) -> object:
    """Returns a value whose text is the same in each process, as an address is not."""
    if isinstance(value, enum.Enum):
        return value.name
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else value


def _gathered(description: bytes, group: Any, device: torch.device) -> list[bytes]:
    """Gathers the descriptions of all ranks."""
    if distributed.get_backend(group) == "gloo":
        device = torch.device("cpu")
    row = torch.frombuffer(bytearray(description), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(row) for _ in range(world_size(group))]
    distributed.all_gather(rows, row, group=group)
    return [bytes(found.tolist()) for found in torch.stack(rows).cpu()]


def _read(description: bytes) -> dict[str, str]:
    text = description[_HEADER_BYTES:].rstrip(b"\0").decode(errors="replace")
    return {key: value for key, _, value in (line.partition("=") for line in text.split("\n"))}


def _by_value(key: str, ranks: list[int], known: list[dict[str, str]]) -> str:
    """Returns each value of ``key`` and the ranks that have it, for a message."""
    found: dict[str, list[int]] = {}
    for rank, values in zip(ranks, known, strict=True):
        if key in values:
            found.setdefault(values[key], []).append(rank)
    return " and ".join(f"{value} on {_named(which)}" for value, which in found.items())


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    return f"ranks {shown}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
