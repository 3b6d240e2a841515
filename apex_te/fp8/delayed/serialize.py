"""How FP8 state enters and leaves a state dict: plain tensors and a small JSON header."""

from __future__ import annotations

import json
import warnings
from typing import Any, NamedTuple

import torch

from ...recipe import MAX_HISTORY_LENGTH, DelayedScaling, Format
from .first_step import set_first_due, still_due
from .state import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    TENSORS,
    FP8State,
    registry,
    resized_history,
    warn_resized,
)

__all__ = ["LoadedState", "header_of", "load_state", "read_state", "save_state"]

VERSION = 1
# Fixed for a number of GEMMs, so that checkpoints of one model always have the same shapes.
HEADER_BYTES = 512
HEADER_BYTES_PER_SLOT = 6
NAMES = (*TENSORS, "header")
_SCOPES = 256  # the most that a file may ask for
# Inverses off by more than a copy in bf16 makes them are no inverses.
_SAME, _ROUNDED = 1e-5, 2.0**-6


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
    _check_readable("header", blob)
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


class LoadedState(NamedTuple):
    """Entries of a state dict that were found to make a state.

    Attributes:
        tensors: fp32 on the CPU, by name; None where the state dict has none: initial state.
        pending, first_due, recipe, scope, equal: of the header.
    """

    tensors: dict[str, torch.Tensor] | None
    pending: int = 0
    first_due: list[bool] | None = None
    recipe: DelayedScaling | None = None
    scope: int | None = None
    equal: int | None = None

    def commit(self, state: FP8State, device: torch.device) -> None:
        """Write to ``state``, which is allocated on ``device`` if it is not yet."""
        found = self.tensors
        if found is None:
            state.reset()
            return
        length = found["amax_history_fwd"].shape[0]
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
        with torch.inference_mode(False), torch.no_grad():
            for name in TENSORS:
                getattr(state, name).copy_(found[name])
        assert self.first_due is not None
        set_first_due(state, self.first_due)
        state.take_recipe(self.recipe)
        registry.loaded(state, self.scope, self.pending)
        state.sharing.loaded(self.equal)


def read_state(
    state: FP8State,
    tensors: dict[str, Any],
    prefix: str,
    missing_keys: list[str],
    error_msgs: list[str],
) -> LoadedState | None:
    """Read and check the entries of ``tensors`` under ``prefix``; ``state`` stays as it is.

    Inverse scales that were rounded, as in a copy of the state dict in 16 bits, are made again,
    with a warning.

    Returns:
        What is to be committed; None if entries are missing (``missing_keys``) or wrong
        (``error_msgs``).
    """
    found = {name: tensors[prefix + name] for name in NAMES if prefix + name in tensors}
    if not found:
        return LoadedState(None)
    if _on_meta(state) and all(getattr(v, "is_meta", False) for v in found.values()):
        return LoadedState(None)
    absent = [prefix + name for name in NAMES if name not in found]
    if absent:
        missing_keys.extend(absent)
        return None
    try:
        header = _decode(found["header"])
        pending, due, recipe = _read(header, state.slots)
        scope, equal = _counts(header, "scope", _SCOPES), _counts(header, "equal", 1 << 32)
        length = _check_shapes(found, state.gemms)
        if header.get("history") != length:
            raise ValueError(
                f"header must have the length of amax_history_fwd, {length}, as history, "
                f"got {header.get('history')!r}"
            )
        values = {name: _on_cpu(name, found[name]) for name in TENSORS}
        for way in ("fwd", "bwd"):
            _check_values(values, way, prefix)
    except ValueError as error:
        error_msgs.append(f"FP8State: {prefix}{error}")
        return None
    return LoadedState(values, pending, due, recipe, scope, equal)


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
    loaded = read_state(state, tensors, prefix, missing_keys, error_msgs)
    if loaded is not None:
        loaded.commit(state, device)


def _on_meta(state: FP8State) -> bool:
    """Returns True if the module is on the meta device and can take entries without values."""
    device = state.owner_device()
    return device is not None and device.type == "meta"


def _check_readable(name: str, value: torch.Tensor) -> None:
    """Refuse a tensor without plain values of its own."""
    if value.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {value.layout}")
    if value.device.type == "meta":
        raise ValueError(f"{name} must have values, got a tensor on the meta device")
    if hasattr(value, "device_mesh"):
        raise ValueError(f"{name} must be a plain tensor, got {type(value).__name__}")


def _on_cpu(name: str, value: torch.Tensor) -> torch.Tensor:
    """A copy of ``value`` as fp32 on the CPU, made before anything is written."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return value.detach().to("cpu", torch.float32, copy=True)
    except Exception as error:  # a tensor subclass may refuse in a way of its own
        raise ValueError(f"{name} must be readable, got {error}") from error


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
        if length > MAX_HISTORY_LENGTH:
            raise ValueError(f"{name} must have at most {MAX_HISTORY_LENGTH} rows, got {length}")
        _check_readable(name, value)
    return length


def _check_values(values: dict[str, torch.Tensor], way: str, prefix: str) -> None:
    """Refuse scales and histories that no update makes; make rounded inverse scales again."""
    scale, inverse = values[f"scale_{way}"], values[f"scale_inv_{way}"]
    history = values[f"amax_history_{way}"]
    for name, value in ((f"scale_{way}", scale), (f"scale_inv_{way}", inverse)):
        good = torch.isfinite(value) & torch.isfinite(value.reciprocal()) & (value > 0)
        if not good.all():
            raise ValueError(
                f"{name} must be finite and above 0, as must be its inverse, "
                f"got {value[~good][0].item():g}"
            )
    # Rows but the first have been through an update; the first awaits it, with NaN if one was seen.
    wrong = history < 0
    wrong[1:] |= ~torch.isfinite(history[1:])
    if wrong.any():
        raise ValueError(
            f"amax_history_{way} must be finite and at least 0, got {history[wrong][0].item():g}"
        )
    off = (scale.double() * inverse.double() - 1).abs()
    if off.max() > _ROUNDED:
        at = int(off.argmax())
        raise ValueError(
            f"scale_inv_{way} must be the inverse of scale_{way}, got {inverse[at].item():g} "
            f"for {scale[at].item():g}"
        )
    if off.max() > _SAME:
        torch.reciprocal(scale, out=inverse)
        warnings.warn(
            f"FP8State: {prefix}scale_inv_{way} was rounded and is made again from scale_{way}",
            stacklevel=3,
        )
