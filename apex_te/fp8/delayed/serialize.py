"""FP8 state in a state dict: tensors and a header, all checked before any is loaded."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...recipe import MAX_HISTORY_LENGTH
from .ranks import amax_groups
from .state import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    TENSORS,
    FP8State,
    Header,
    check_readable,
    decode_header,
    resized_history,
    warn_resized,
)

if TYPE_CHECKING:
    from ..module_fp8 import ModuleFP8

NAMES = (*TENSORS, "header")
# Inverses off by more than a copy in bf16 makes them are no inverses.
_SAME, _ROUNDED = 1e-5, 2.0**-6


def save_state(state: FP8State, destination: dict[str, Any], prefix: str) -> None:
    """Puts copies of the state's tensors, if allocated, and its header into a state dict."""
    if not state.allocated:
        _watch_distributed_loads(prefix)
    if not state.allocated or state.device.type == "meta":
        return
    for name in TENSORS:
        destination[prefix + name] = getattr(state, name).detach().clone()
    destination[prefix + "header"] = state.header


# Prefixes of states that were not allocated when a state dict was made.
_unallocated: set[str] = set()


def _watch_distributed_loads(prefix: str) -> None:
    """Has ``torch.distributed.checkpoint`` warn of saved FP8 state that it is not asked to load."""
    planners: Any = sys.modules.get("torch.distributed.checkpoint.default_planner")
    _unallocated.add(prefix)
    if planners is None or hasattr(planners.DefaultLoadPlanner.set_up_planner, "__wrapped__"):
        return
    set_up_planner = planners.DefaultLoadPlanner.set_up_planner

    @functools.wraps(set_up_planner)
    def watched(self: Any, state_dict: Any, metadata: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = set_up_planner(self, state_dict, metadata, *args, **kwargs)
        saved = getattr(metadata, "state_dict_metadata", None) or ()
        _warn_of_left_out(self.state_dict, saved)
        return result

    planners.DefaultLoadPlanner.set_up_planner = watched


def _warn_of_left_out(wanted: Iterable[str], saved: Iterable[str]) -> None:
    """Warns if a checkpoint has FP8 state of modules whose weights alone are wanted."""
    wanted = set(wanted)
    parents = {key.rpartition(".")[0] for key in wanted}
    left_out = []
    for key in saved:
        prefix, _, name = key.rpartition("header")
        if name or key in wanted or not prefix.endswith("."):
            continue
        if not any(prefix == own or prefix.endswith(f".{own}") for own in _unallocated):
            continue
        if prefix[:-1].rpartition(".")[0] in parents:
            left_out.append(prefix[:-1])
    if left_out:
        warnings.warn(
            f"FP8State: the checkpoint has the FP8 state of {len(left_out)} modules, from "
            f"{left_out[0]} on, that is not loaded, as the model has none yet: "
            "call apex_te.init_fp8_state(model, recipe) before model.state_dict()",
            stacklevel=3,
        )


class LoadedState(NamedTuple):
    """Named tuple of a state dict's checked entries for one FP8 state; all None without any."""

    tensors: dict[str, torch.Tensor] | None = None
    header: Header | None = None

    def commit(self, module: ModuleFP8, device: torch.device) -> None:
        """Writes the entries to a module's FP8 state; allocates the state if needed."""
        state, found, header = module.state, self.tensors, self.header
        if found is None or header is None:
            state.reset()
            return
        length = found["amax_history_fwd"].shape[0]
        if not state.allocated:
            state.allocate(length, device)
        module.move(device)
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
            state.pending_scale_fwd.copy_(state.scale_fwd)  # for an evaluation that has begun
        state.first_steps.set(header.first_due)
        # The next recorded forward brings the values to its own recipe.
        state.recipe = header.recipe or state.recipe
        amax_groups.loaded(state.sync, header.group_number, header.pending)
        state.sync.loaded(header.equal)


def read_state(
    module: ModuleFP8,
    tensors: dict[str, Any],
    prefix: str,
    missing_keys: list[str],
    error_msgs: list[str],
) -> LoadedState | None:
    """Reads and checks the entries for a module's FP8 state, which is not changed.

    A rounded ``scale_inv``, as in a 16-bit copy, is recomputed with a warning. Missing keys are
    added to ``missing_keys`` only if other keys exist. Returns None if some are missing or wrong.
    """
    found = {name: tensors[prefix + name] for name in NAMES if prefix + name in tensors}
    if not found:
        return LoadedState()
    if _on_meta(module) and all(getattr(v, "is_meta", False) for v in found.values()):
        return LoadedState()
    absent = [prefix + name for name in NAMES if name not in found]
    if absent:
        missing_keys.extend(absent)
        return None
    try:
        entries = decode_header(found["header"])
        header = Header.checked(entries, module.num_slots)
        length = _check_shapes(found, module.state.gemms)
        if entries.get("history") != length:
            raise ValueError(
                f"header must have the length of amax_history_fwd, {length}, as history, "
                f"got {entries.get('history')!r}"
            )
        values = {name: _on_cpu(name, found[name]) for name in TENSORS}
        for way in ("fwd", "bwd"):
            _check_values(values, way, prefix)
    except ValueError as error:
        error_msgs.append(f"FP8State: {prefix}{error}")
        return None
    return LoadedState(values, header)


def load_state(
    module: ModuleFP8,
    tensors: dict[str, Any],
    prefix: str,
    device: torch.device,
    missing_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Sets a module's FP8 state from a state dict; wrong entries are reported and change nothing.

    Without entries in the state dict, the state is initialised.
    """
    loaded = read_state(module, tensors, prefix, missing_keys, error_msgs)
    if loaded is not None:
        loaded.commit(module, device)


def _on_meta(module: ModuleFP8) -> bool:
    """Returns True if the module is on the meta device: loaded tensors then need no values."""
    device = module.owner_device()
    return device is not None and device.type == "meta"


def _on_cpu(name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the tensor ``value`` as fp32 on the CPU."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return value.detach().to("cpu", torch.float32, copy=True)
    except Exception as error:  # a tensor subclass may refuse in a way of its own
        raise ValueError(f"{name} must be readable, got {error}") from error


def _check_shapes(found: dict[str, Any], gemms: int) -> int:
    """Checks the types and shapes of a state's tensors, and returns the history length."""
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
        check_readable(name, value)
    return length


def _check_values(values: dict[str, torch.Tensor], way: str, prefix: str) -> None:
    """Checks one direction's values, and recomputes a ``scale_inv`` that was rounded, in place."""
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
