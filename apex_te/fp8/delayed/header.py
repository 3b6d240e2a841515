"""Header of a saved FP8 state: recipe, clock and first steps as JSON text in a uint8 tensor."""

from __future__ import annotations

import json
import reprlib
from typing import Any, NamedTuple

import torch

from ...recipe import DelayedScaling, Format

VERSION = 1
# Fixed for a number of slots, so that checkpoints of one model always have the same shapes.
_BYTES = 512
_BYTES_PER_SLOT = 6
_LONGEST = 200  # characters of a recipe's error
_MAX_GROUPS = 256  # the most amax groups that a file may ask for


def encode_header(header: dict[str, Any]) -> torch.Tensor:
    """Returns ``header`` as JSON text in uint8; its size depends on the number of slots only."""
    size = _BYTES + _BYTES_PER_SLOT * len(header["first_due"])
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def decode_header(blob: torch.Tensor) -> dict[str, Any]:
    """Returns the dict that ``encode_header`` was given."""
    if not isinstance(blob, torch.Tensor) or blob.dtype != torch.uint8 or blob.numel() > 65536:
        raise ValueError("header must be a uint8 tensor of at most 65536 bytes")
    check_readable("header", blob)
    try:
        header = json.loads(bytes(blob.detach().cpu().reshape(-1).tolist()))
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ValueError(f"header must be JSON text, got {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"header must be a JSON object, got {type(header).__name__}")
    if header.get("version") != VERSION:
        raise ValueError(
            f"version must be {VERSION} (written by another release?), "
            f"got {reprlib.repr(header.get('version'))}"
        )
    return header


def check_readable(name: str, value: torch.Tensor) -> None:
    """Raises ValueError for a tensor that is sparse, on the meta device or a DTensor."""
    if value.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {value.layout}")
    if value.device.type == "meta":
        raise ValueError(f"{name} must have values, got a tensor on the meta device")
    if hasattr(value, "device_mesh"):
        raise ValueError(f"{name} must be a plain tensor, got {type(value).__name__}")


class Header(NamedTuple):
    """Checked entries of the header of a saved FP8 state.

    Attributes:
        recipe: recipe under which the values were computed; None if unknown, or if it contains
            functions, which are not saved.
        group_number: number of the state's amax group; None if it was in none.
        equal: ``ScaleSync.fingerprint`` of the ranks whose scales are kept equal, or None.
    """

    pending: int
    first_due: list[bool]
    recipe: DelayedScaling | None
    group_number: int | None
    equal: int | None

    @classmethod
    def checked(cls, header: dict[str, Any], slots: int) -> Header:
        """Checks the entries of a decoded header."""
        pending, due = header.get("pending"), header.get("first_due")
        if type(pending) is not int or pending < 0:
            raise ValueError(f"pending must be a count, got {reprlib.repr(pending)}")
        if not isinstance(due, list) or len(due) != slots or not all(type(d) is bool for d in due):
            raise ValueError(f"first_due must be {slots} bools, got {reprlib.repr(due)}")
        recipe, number = _recipe(header), _count(header, "scope", _MAX_GROUPS)
        return cls(pending, due, recipe, number, _count(header, "equal", 1 << 32))


def recipe_entries(recipe: DelayedScaling) -> dict[str, Any]:
    """Returns the entries of a header from which ``Header.recipe`` is made on loading."""
    entries: dict[str, Any] = {"format": recipe.fp8_format.name}
    # A function, or what a derived class adds, cannot be saved: the recipe of the next region then
    # finishes the update.
    if type(recipe) is DelayedScaling and not recipe.uses_callables:
        entries["recipe"] = {name: getattr(recipe, name) for name in _SAVED}
    return entries


_SAVED = (
    "margin", "amax_compute_algo", "scaling_factor_compute_algo", "reduce_amax", "first_step"
)  # fmt: skip


def _recipe(header: dict[str, Any]) -> DelayedScaling | None:
    """Returns the recipe that a header describes; None if it has none."""
    saved = header.get("recipe")
    if saved is None:
        return None
    try:
        return DelayedScaling(
            fp8_format=Format[header["format"]],
            amax_history_len=header["history"],
            **{name: saved[name] for name in _SAVED},
        )
    except (KeyError, TypeError, ValueError) as error:
        text = repr(error)[:_LONGEST]
        raise ValueError(f"recipe must be the one that was saved, got {text}") from error


def _count(header: dict[str, Any], name: str, limit: int) -> int | None:
    """Returns the entry ``name``, a count below ``limit``; None if the header has none."""
    value = header.get(name)
    if value is not None and not (type(value) is int and 0 <= value < limit):
        raise ValueError(f"{name} must be a count below {limit}, got {reprlib.repr(value)}")
    return value
