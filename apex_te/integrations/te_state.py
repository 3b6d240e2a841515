"""Reader of the FP8 state that TransformerEngine saves as ``_extra_state``, which executes nothing.

A release of TransformerEngine saves this for a module:

    2.x       uint8 tensor, a pickled dict with a recipe object; empty where FP8 never ran
    1.x, 0.x  uint8 tensor or io.BytesIO with a torch.save file, a dict without recipe
    0.3       that dict itself
    0.1, 0.2  a list: scale_fwd, amax_history_fwd, scale_bwd, amax_history_bwd, ...

The format, by the values ``fp8_max``, and the margin of a recipe of 2.x are kept with the scales,
which so move with those of the next recipe. Scales of releases before are taken to fit it.

Scales and amax values are fp32. Each GEMM has 3 forward slots (input, weight, output) and 2
backward slots (grad_output, grad_input); releases 0.x have 2 and 1, without output and grad_input.

The rows of an amax history are in apex_te's order. Slots are sorted by GEMM, except in the
``GroupedLinear`` of earlier releases, which has the inputs of all GEMMs first, then their weights,
then their outputs. The slots of outputs, whose amax values are all 0, tell the two orders apart.

Bytes that apex_te itself has saved under the same key (``_extra_state_bytes.py``) are read, too.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch

from ..fp8.delayed.ranks import amax_groups
from ..fp8.delayed.serialize import load_state, save_state
from ..fp8.delayed.state import BACKWARD_SLOTS, FORWARD_SLOTS, FP8State, Header, decode_header
from ..module._core.fp8_module import STATE_PREFIX, FP8Module
from ..module.grouped.linear import GroupedLinear
from ..recipe import MAX_HISTORY_LENGTH, DelayedScaling, Format
from ..runtime.named_arguments import check_model, named_arguments
from ._extra_state_bytes import own_header
from ._tensor_pickle import Inert, TensorPickleError, read_pickle, read_saved

KEY = "_extra_state"


class TEStateError(ValueError):
    """Error for an ``_extra_state`` that is damaged, does not fit or is not TransformerEngine's."""


class TEState(NamedTuple):
    """Delayed-scaling state of one module of TransformerEngine, fp32 on the CPU.

    Attributes:
        scale_fwd, scale_bwd: ``[slots]``.
        amax_history_fwd, amax_history_bwd: ``[length, slots]``. Row 0 has the amax values recorded
            for the next update. Saved values of Inf or NaN are 0.
        pending: True if scales must still be updated from these amax values before the next
            forward, as in releases with a global buffer of amax values.
    """

    scale_fwd: torch.Tensor
    amax_history_fwd: torch.Tensor
    scale_bwd: torch.Tensor
    amax_history_bwd: torch.Tensor
    pending: bool


def _unfit(name: str, wanted: str, got: object) -> TEStateError:
    """Returns an error with the message ``"<name> must <wanted>, got <got>"``."""
    return TEStateError(f"read_te_extra_state: {name} must {wanted}, got {got}")


def read_te_extra_state(extra_state: Any) -> TEState | None:
    """Reads the FP8 state from an ``_extra_state`` of any release of TransformerEngine.

    Nothing in the object is imported or called. Amax values that are not finite become 0, with a
    warning.

    Args:
        extra_state: value of a module's key ``_extra_state`` in a state dict.

    Returns:
        The state; None if the module had not run in FP8 or its recipe keeps no state.

    Raises:
        TypeError: no release saves an object of this type.
        TEStateError: unpickling the object would run code, or it is damaged: a scale or its inverse
            is not finite and positive, an amax value is negative, or a history has more than 16384
            rows.
    """
    return _te_state(_decoded(extra_state))


def _te_state(saved: Any) -> TEState | None:
    """Returns the state in a decoded ``_extra_state``; see ``read_te_extra_state``."""
    if isinstance(saved, list):  # releases 0.1 and 0.2
        if len(saved) < 4:
            raise TEStateError(f"read_te_extra_state: list must have 4 items, got {len(saved)}")
        saved = dict(zip(TEState._fields[:4], saved, strict=False)) | {"global_fp8_buffer": None}
    if saved is None:
        return None
    if not isinstance(saved, dict):
        raise _unfit("extra_state", "hold a dict", type(saved).__name__)
    if not any(name in saved for name in TEState._fields[:4]):
        return None  # a recipe without state
    is_own = own_header(saved) is not None
    scale_fwd, history_fwd = _direction(saved, "fwd", is_own)
    scale_bwd, history_bwd = _direction(saved, "bwd", is_own)
    if history_fwd.shape[0] != history_bwd.shape[0]:
        wanted = f"have the length of amax_history_fwd, {history_fwd.shape[0]}"
        raise _unfit("amax_history_bwd", wanted, history_bwd.shape[0])
    pending = "global_fp8_buffer" in saved
    return TEState(scale_fwd, history_fwd, scale_bwd, history_bwd, pending)


def _decoded(extra_state: Any) -> Any:
    """Returns the dict or list that was saved as ``_extra_state``, None if that is empty."""
    try:
        if isinstance(extra_state, torch.Tensor):
            if extra_state.dtype != torch.uint8 or extra_state.dim() != 1:
                raise TypeError(
                    "read_te_extra_state: extra_state must be a uint8 vector, "
                    f"got {extra_state.dtype} {list(extra_state.shape)}"
                )
            if not extra_state.numel():
                return None
            data = extra_state.detach().cpu().contiguous().numpy().tobytes()
            return read_saved(data) if data[:2] == b"PK" else read_pickle(data)
        if isinstance(extra_state, io.BytesIO):
            return read_saved(extra_state.getvalue())
    except TensorPickleError as error:
        raise TEStateError(
            f"read_te_extra_state: extra_state must hold tensors and plain values, but {error}"
        ) from error
    if extra_state is None or type(extra_state) in (dict, list):
        return extra_state
    raise TypeError(
        "read_te_extra_state: extra_state must be a uint8 tensor, an io.BytesIO, a dict or a list, "
        f"got {type(extra_state).__name__}"
    )


def _direction(
    saved: dict[str, Any], direction: str, is_own: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns checked scales ``[slots]`` and histories ``[length, slots]``, fp32 on the CPU."""
    scale = _checked_tensor(saved, f"scale_{direction}", 1)
    history = _checked_tensor(saved, f"amax_history_{direction}", 2)
    if not ((scale > 0) & torch.isfinite(scale) & torch.isfinite(scale.reciprocal())).all():
        wanted = "be finite and above 0, as must be its inverse"
        got = f"{scale.min().item():g} to {scale.max().item():g}"
        raise _unfit(f"scale_{direction}", wanted, got)
    if (history < 0).any():
        got = f"{history.nan_to_num(nan=0.0).min().item():g}"
        raise _unfit(f"amax_history_{direction}", "be at least 0", got)
    finite = torch.isfinite(history)
    if is_own:
        finite[0] = True
    if not finite.all():
        warnings.warn(
            f"read_te_extra_state: {int((~finite).sum())} amaxes of amax_history_{direction} are "
            "not finite and are dropped",
            stacklevel=3,
        )
        history = torch.where(finite, history, torch.zeros_like(history))
    if history.shape[1] != scale.shape[0]:
        wanted = f"have {scale.shape[0]} columns"
        raise _unfit(f"amax_history_{direction}", wanted, list(history.shape))
    return scale, history


def _checked_tensor(saved: dict[str, Any], name: str, dims: int) -> torch.Tensor:
    """Returns a tensor of the saved dict with ``dims`` dimensions, in fp32 on the CPU."""
    value = saved.get(name)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise _unfit(name, "be a floating-point tensor", type(value).__name__)
    if value.dim() != dims or not value.shape[0]:
        raise _unfit(name, f"have {dims} dimension(s) and a row", list(value.shape))
    if value.shape[0] > MAX_HISTORY_LENGTH and dims == 2:
        raise _unfit(name, f"have at most {MAX_HISTORY_LENGTH} rows", value.shape[0])
    if value.layout is not torch.strided or value.device.type == "meta":
        got = f"layout {value.layout} on {value.device}"
        raise _unfit(name, "be a dense tensor with values", got)
    return value.detach().to("cpu", torch.float32)


@named_arguments()
def load_te_extra_state(
    model: torch.nn.Module, state_dict: MutableMapping[str, Any], prefix: str = ""
) -> list[str]:
    """Loads TransformerEngine's FP8 state into ``model``, and prepares ``state_dict`` for loading.

    Every ``<prefix><module>._extra_state`` is removed from ``state_dict``, except for modules whose
    class itself saves an extra state. If the module is an FP8 module of apex_te, its scales and
    amax histories are set; histories are trimmed or padded to the module's length. The state is
    also added to ``state_dict`` under apex_te's keys, so a strict
    ``model.load_state_dict(state_dict)`` afterwards loads everything.

    Args:
        model: a model or one module.
        state_dict: state dict of a model with TransformerEngine's modules; changed in place.
        prefix: text before the names of the model's modules in ``state_dict``, such as
            ``"model."``.

    Returns:
        The names of the modules whose state was set.

    Raises:
        TypeError: an argument has a wrong type, or an extra state has a type that no release of
            TransformerEngine saves.
        TEStateError: an extra state is damaged, would run code when unpickled, or has another
            number of slots than the module.

    After an error, whose message names the key, ``model`` and ``state_dict`` are unchanged.
    """
    check_model("load_te_extra_state", model)
    if not isinstance(state_dict, MutableMapping):
        raise TypeError(
            f"load_te_extra_state: state_dict must be a dict, got {type(state_dict).__name__}"
        )
    modules = dict(model.named_modules())
    read: dict[str, SavedState] = {}
    dropped = []
    for key in state_dict:
        if not key.startswith(prefix) or not (key == prefix + KEY or key.endswith("." + KEY)):
            continue
        name = key[len(prefix) : -len(KEY)].rstrip(".")
        module = modules.get(name)
        if module is not None and _saves_its_own(module):
            continue
        dropped.append(key)
        if not isinstance(module, FP8Module):
            continue
        try:
            found = saved_state(state_dict[key], module)
        except (TEStateError, TypeError) as error:
            raise type(error)(f"{key}: {error}") from error
        if found is not None:
            read[name] = found
    for key in dropped:
        del state_dict[key]
    if any(found.pending for found in read.values()):
        amax_groups.pending = max(amax_groups.pending, 1)
    for name, found in read.items():
        path = f"{prefix}{name}.{STATE_PREFIX}" if name else prefix + STATE_PREFIX
        state_dict.update(found.entries(path))
        module = modules[name]
        errors: list[str] = []
        device = module._state_device()
        load_state(module._fp8, state_dict, path, device, [], errors)  # type: ignore[arg-type]
        assert not errors, errors  # what saved_state has checked is as save_state has it
    return list(read)


class SavedState(NamedTuple):
    """FP8 state, on the CPU, of one apex_te module, read from an ``_extra_state``."""

    state: FP8State
    header: torch.Tensor | None
    pending: bool

    def entries(self, prefix: str) -> dict[str, Any]:
        """Returns the state's entries in a state dict of apex_te; keys begin with ``prefix``."""
        found: dict[str, Any] = {}
        save_state(self.state, found, prefix)
        if self.header is not None:
            found[prefix + "header"] = self.header
        return found


def saved_state(extra_state: Any, module: FP8Module) -> SavedState | None:
    """Returns the FP8 state in an ``_extra_state`` of either library; None if it has none."""
    saved = _decoded(extra_state)
    found = _te_state(saved)
    if found is None:
        return None
    own, gemms = own_header(saved), module.fp8_state.gemms
    if own is None:
        by_kind = _goes_by_kind(found.amax_history_fwd, gemms)
        state = _converted(found, gemms, by_kind)
        state.recipe = _recipe(saved, state.history_length)
        return SavedState(state, None, found.pending)
    by_kind = isinstance(module, GroupedLinear) and gemms > 1
    state = _converted(found, gemms, by_kind)
    # Unlike Transformer Engine's, an own slot without an amax may have a scale.
    scaled = torch.cat([state.scale_fwd != 1, state.scale_bwd != 1]).tolist()
    due = [due and not has for due, has in zip(state.first_steps.due, scaled, strict=True)]
    try:
        header = own.fitted(found[:4], due)
        entries = decode_header(header)
        Header.checked(entries, state.num_slots)
        if entries.get("history") != state.history_length:
            raise ValueError(
                f"history must be {state.history_length}, got {entries.get('history')!r}"
            )
    except ValueError as error:
        raise TEStateError(f"read_te_extra_state: header of apex_te: {error}") from error
    return SavedState(state, header, False)


def _recipe(saved: Any, length: int) -> DelayedScaling | None:
    """Returns a recipe with the format and margin of saved scales, None if these are not known."""
    recipe = saved.get("recipe") if isinstance(saved, dict) else None
    extra = saved.get("extra_fp8_variables") if isinstance(saved, dict) else None
    if not isinstance(recipe, Inert) or not isinstance(extra, dict):
        return None
    largest = (extra.get("fp8_max_fwd"), extra.get("fp8_max_bwd"))
    formats = [f for f in (Format.E4M3, Format.HYBRID) if f.value[:2] == largest]
    margin = recipe.state.get("margin")
    if not isinstance(margin, int):  # which an error of the recipe would print, whatever it is
        return None
    if not formats or recipe.state.get("scaling_factor_compute_algo") is not None:
        return None
    try:
        return DelayedScaling(fp8_format=formats[0], margin=margin, amax_history_len=length)
    except (TypeError, ValueError):
        return None


def _saves_its_own(module: torch.nn.Module) -> bool:
    """Returns True if the class of ``module`` defines ``get_extra_state``."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _converted(found: TEState, gemms: int, by_kind: bool) -> FP8State:
    """Converts TransformerEngine's state to that of ``gemms`` GEMMs, on the CPU."""
    directions = (("fwd", FORWARD_SLOTS), ("bwd", BACKWARD_SLOTS))
    for direction, slots in directions:
        number = getattr(found, f"scale_{direction}").numel()
        # Releases 0.x lack the last slot of each GEMM.
        if number not in (slots * gemms, (slots - 1) * gemms):
            wanted = f"have {slots * gemms} slots for {gemms} GEMM(s), or {(slots - 1) * gemms} in"
            raise _unfit(f"scale_{direction}", f"{wanted} releases 0.x", number)
    state = FP8State(gemms)
    state.allocate(found.amax_history_fwd.shape[0], torch.device("cpu"))
    for direction, slots in directions:
        given_scale: torch.Tensor = getattr(found, f"scale_{direction}")
        given_history: torch.Tensor = getattr(found, f"amax_history_{direction}")
        present = given_scale.numel() // gemms
        for name, given in (("scale", given_scale), ("amax_history", given_history)):
            target: torch.Tensor = getattr(state, f"{name}_{direction}")
            rows = target.shape[:-1]
            if by_kind:
                given = given.reshape(*rows, present, gemms).transpose(-1, -2)
            target.view(*rows, gemms, slots)[..., :present] = given.reshape(*rows, gemms, present)
        scale: torch.Tensor = getattr(state, f"scale_{direction}")
        torch.reciprocal(scale, out=getattr(state, f"scale_inv_{direction}"))
    # A slot without an amax has no scale yet; first_step="current" takes it from the first tensor.
    seen = [history.any(0) for history in (state.amax_history_fwd, state.amax_history_bwd)]
    state.first_steps.set((~torch.cat(seen)).tolist())
    return state


def _goes_by_kind(history: torch.Tensor, gemms: int) -> bool:
    """Returns True if forward slots are sorted by kind (inputs, weights, outputs), not by GEMM."""
    if gemms == 1 or history.shape[1] != FORWARD_SLOTS * gemms:
        return False
    used = history.any(0)
    outputs_by_gemm, outputs_by_kind = used.view(gemms, -1)[:, -1], used.view(-1, gemms)[-1]
    return bool(outputs_by_gemm.any()) and not bool(outputs_by_kind.any())
