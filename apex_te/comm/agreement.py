"""Whether the ranks of a group are about to do the same: one small gather, where it first counts.

Ranks that differ would pair one collective with another: they would hang, or go on with what was
meant for something else. The descriptions that they exchange have a fixed size, so that they meet
in the same collective whatever they differ in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from ..fp8.delayed.amax_allreduce import RankMismatchError
from ..recipe import Format, Recipe
from .collectives import world_size

__all__ = ["check_same", "recipe_values"]

_BYTES = 4096  # of a description; its digest first, for what does not fit
_DIGEST = 16
_REFUSED = "arguments"
_SHOWN = 16  # ranks in a message


def check_same(
    owner: str,
    group_name: str,
    group: Any,
    values: Mapping[str, object],
    device: torch.device,
    error: Exception | None = None,
) -> None:
    """Compares what is named in ``values`` over the ranks of ``group``; collective, waited for.

    ``error``: what keeps this rank from going on, raised here once the others know of it.
    ``device``: of the tensors that the ranks are about to send.

    Errors: ``error``, else RankMismatchError on every rank whose neighbours differ or have one.
    """
    if error is not None:
        values = {_REFUSED: f"{type(error).__name__}: {error}"}
    lines = [f"{key}={' '.join(str(value).split())}" for key, value in values.items()]
    text = "\n".join(lines).encode()
    own = hashlib.blake2b(text, digest_size=_DIGEST).digest() + text[: _BYTES - _DIGEST]
    if distributed.get_backend(group) == "gloo":
        device = torch.device("cpu")
    row = torch.frombuffer(bytearray(own.ljust(_BYTES, b"\0")), dtype=torch.uint8)
    row = row.to(device)
    rows = [torch.empty_like(row) for _ in range(world_size(group))]
    distributed.all_gather(rows, row, group=group)
    descriptions = [bytes(found.tolist()) for found in torch.stack(rows).cpu()]
    if error is not None:
        raise error
    if len(set(descriptions)) == 1:
        return
    known = [_read(found) for found in descriptions]
    ranks = distributed.get_process_group_ranks(distributed.group.WORLD if group is None else group)
    where = f"the ranks of {group_name} ({_named(ranks)})"
    if any(_REFUSED in found for found in known):
        refused = _by_value(_REFUSED, ranks, known)
        raise RankMismatchError(f"{owner}: arguments must fit on all of {where}, got {refused}")
    differing = [
        f"{key} (got {_by_value(key, ranks, known)})"
        for key, value in known[0].items()
        if all(key in found for found in known) and any(found[key] != value for found in known)
    ]
    what = "; ".join(differing) or f"description beyond {_BYTES} bytes"
    raise RankMismatchError(f"{owner}: {where} must have the same {what}")


def _read(description: bytes) -> dict[str, str]:
    text = description[_DIGEST:].rstrip(b"\0").decode(errors="replace")
    return {key: value for key, _, value in (line.partition("=") for line in text.split("\n"))}


def _by_value(key: str, ranks: list[int], known: list[dict[str, str]]) -> str:
    """Each value that some ranks have, and which ranks these are."""
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


def recipe_values(recipe: Recipe | None) -> dict[str, object]:
    """What a recipe says, in words that do not depend on the process; None is no FP8."""
    if recipe is None:
        return {"recipe": "none"}
    found: dict[str, object] = {"recipe": type(recipe).__name__}
    for name, value in vars(recipe).items():
        if isinstance(value, Format):
            value = value.name
        elif callable(value):
            value = getattr(value, "__qualname__", type(value).__name__)
        found[f"recipe.{name}"] = value
    return found
