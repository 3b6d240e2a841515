"""How FP8 state enters and leaves a state dict: plain tensors and a small JSON header."""

from __future__ import annotations

import json
from typing import Any

import torch

from ._first_due import set_first_due, still_due
from .recipe import DelayedScaling, Format
from .state import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    TENSORS,
    FP8State,
    registry,
    resized_history,
    warn_resized,
)

__all__ = ["header_of", "load_state", "save_state"]

VERSION = 1
# Fixed for a number of GEMMs, so that checkpoints of one model always have the same shapes.
HEADER_BYTES = 512
HEADER_BYTES_PER_SLOT = 6
NAMES = (*TENSORS, "header")
_SCOPES = 256  # the most that a file may ask for


def save_state(state: FP8State, destination: dict[str, Any], prefix: str) -> None:
    """Put copies of the tensors and the header into ``destination`` under ``prefix``."""
    if not state.allocated or state.device.type == "meta":
        return
    for name in TENSORS:
        destination[prefix + name] = getattr(state, name).detach().clone()
    destination[prefix + "header"] = header_of(state)


def header_of(state: FP8State) -> torch.Tensor:
    """The header of ``state``: JSON text, uint8, of one size for a number of GEMMs."""
    return _encode(_header(state), HEADER_BYTES + HEADER_BYTES_PER_SLOT * state.slots)


def _header(state: FP8State) -> dict[str, Any]:
    scope = state.sharing.scope
    header: dict[str, Any] = {
        "version": VERSION,
        "history": state.history_length,
        "pending": registry.pending if scope is None else scope.pending,
        "scope": None if scope is None else scope.number,
        "equal": state.sharing.fingerprint(),
        "first_due": still_due(state),
    }
    recipe = state.recipe
    if recipe is not None:
        header["format"] = recipe.fp8_format.name
        # A function cannot be saved: the recipe of the next region then finishes the update.
        if not recipe.uses_callables:
            header["recipe"] = {
                "margin": recipe.margin,
                "amax_compute_algo": recipe.amax_compute_algo,
                "scaling_factor_compute_algo": recipe.scaling_factor_compute_algo,
                "reduce_amax": recipe.reduce_amax,
                "first_step": recipe.first_step,
            }
    return header


def _encode(header: dict[str, Any], size: int) -> torch.Tensor:
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _decode(blob: torch.Tensor) -> dict[str, Any]:
    if not isinstance(blob, torch.Tensor) or blob.dtype != torch.uint8 or blob.numel() > 65536:
        raise ValueError("header must be a uint8 tensor of at most 65536 bytes")
    try:
        header = json.loads(bytes(blob.detach().cpu().reshape(-1).tolist()))
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ValueError(f"header must be JSON text, got {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"header must be a JSON object, got {type(header).__name__}")
    if header.get("version") != VERSION:
        raise ValueError(
            f"version must be {VERSION} (written by another release?), "
            f"got {header.get('version')!r}"
        )
    return header


def _read(header: dict[str, Any], slots: int) -> tuple[int, list[bool], DelayedScaling | None]:
    """Pending regions, first steps to come and the recipe, all checked."""
    pending, due = header.get("pending"), header.get("first_due")
    if type(pending) is not int or pending < 0:
        raise ValueError(f"pending must be a count, got {pending!r}")
    if not isinstance(due, list) or len(due) != slots or not all(type(d) is bool for d in due):
        raise ValueError(f"first_due must be {slots} bools, got {due!r}")
    kept = header.get("recipe")
    if kept is None:
        return pending, due, None
    try:
        recipe = DelayedScaling(
            margin=kept["margin"],
            fp8_format=Format[header["format"]],
            amax_history_len=header["history"],
            amax_compute_algo=kept["amax_compute_algo"],
            scaling_factor_compute_algo=kept["scaling_factor_compute_algo"],
            reduce_amax=kept["reduce_amax"],
            first_step=kept["first_step"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"recipe must be the one that was saved, got {error!r}") from error
    return pending, due, recipe


def _counts(header: dict[str, Any], name: str, limit: int) -> int | None:
    """A number below ``limit``, None where there is none."""
    value = header.get(name)
    if value is not None and not (type(value) is int and 0 <= value < limit):
        raise ValueError(f"{name} must be a count below {limit}, got {value!r}")
    return value


def load_state(
    state: FP8State,
    tensors: dict[str, Any],
    prefix: str,
    device: torch.device,
    missing_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set ``state`` from the entries of ``tensors`` under ``prefix``, allocating it on ``device``.

    Missing entries leave initial state. What does not fit is reported in ``error_msgs`` and
    leaves the state as it was.
    """
    found = {name: tensors[prefix + name] for name in NAMES if prefix + name in tensors}
    if not found:
        state.reset()
        return
    absent = [prefix + name for name in NAMES if name not in found]
    if absent:
        missing_keys.extend(absent)
        return
    try:
        header = _decode(found["header"])
        pending, due, recipe = _read(header, state.slots)
        scope, equal = _counts(header, "scope", _SCOPES), _counts(header, "equal", 1 << 32)
        length = _check_shapes(found, state.gemms)
    except ValueError as error:
        error_msgs.append(f"FP8State: {prefix}{error}")
        return
    if not state.allocated:
        state.allocate(length, device)
    state.move(device)
    if state.device.type == "meta":
        return
    wanted = state.history_length
    if wanted != length:
        warn_resized(length, wanted)
        for name in ("amax_history_fwd", "amax_history_bwd"):
            found[name] = resized_history(found[name], wanted)
    with torch.no_grad():
        for name in TENSORS:
            getattr(state, name).copy_(found[name])
    set_first_due(state, due)
    if state.recipe is None:
        state.recipe = recipe
        registry.changed()
    registry.loaded(state, scope, pending)
    state.sharing.loaded(equal)


def _check_shapes(found: dict[str, Any], gemms: int) -> int:
    """History length of a loaded state whose shapes fit together."""
    history = found["amax_history_fwd"]
    length = history.shape[0] if isinstance(history, torch.Tensor) and history.dim() else 0
    for name in TENSORS:
        slots = gemms * (FORWARD_SLOTS if name.endswith("fwd") else BACKWARD_SLOTS)
        shape = [length, slots] if "history" in name else [slots]
        value = found[name]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {type(value).__name__}")
        if list(value.shape) != shape or length < 1:
            raise ValueError(f"{name} must have shape {shape}, got {list(value.shape)}")
    return length
