"""FP8State: a module's scales and amax histories, the formula of new scales, the saved header."""

from __future__ import annotations

import json
import reprlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ...ops.amax_scale_update import PreparedUpdate, amax_scale_update
from ...recipe import DelayedScaling, Format
from ..scheme.base import GemmSlots, Slot, Slots
from ..tensor import formats_of
from .ranks import ScaleSync, amax_groups, registry

_FLT_MAX = torch.finfo(torch.float32).max
_nonfinite: dict[torch.device, torch.Tensor] = {}


def nonfinite_count(device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns the number of Inf and NaN amax values that scale updates have found, int32 ``[1]``.

    The tensor is the counter itself, so later updates add to it.

    Args:
        device: device whose amax values are counted, and on which the tensor lives.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    count = _nonfinite.get(device)
    if count is None:
        with torch.inference_mode(False):
            count = _nonfinite[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return count


def nonfinite_counts() -> list[torch.Tensor]:
    """Returns the results of ``nonfinite_count`` for all devices that have one."""
    return list(_nonfinite.values())


def update_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    scale_invs: Sequence[torch.Tensor],
    fp8_max: list[float],
    recipe: DelayedScaling,
    nonfinite: torch.Tensor | None,
) -> None:
    """Appends recorded amax values to histories and sets the new scales, in place.

    Row 0 of a history, fp32 ``[length, slots]``, has the amax values recorded since the last
    update, and becomes 0. ``nonfinite``, int32 ``[1]``, is increased by the number of Inf and NaN
    amax values.
    """
    if not recipe.uses_callables:
        options = _options(recipe, nonfinite)
        amax_scale_update(histories, scales, scale_invs, fp8_max, **options)
        return
    with torch.no_grad():
        for slots in zip(histories, scales, scale_invs, fp8_max, strict=True):
            UserUpdate.computed(*slots, recipe).commit(nonfinite)


def prepared_update(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    scale_invs: Sequence[torch.Tensor],
    fp8_max: list[float],
    recipe: DelayedScaling,
    nonfinite: torch.Tensor | None,
) -> PreparedUpdate:
    """Returns an object whose ``run`` is ``update_scales``, for recipes without user functions."""
    options = _options(recipe, nonfinite)
    return PreparedUpdate(histories, scales, scale_invs, fp8_max, **options)


def _options(recipe: DelayedScaling, nonfinite: torch.Tensor | None) -> dict[str, Any]:
    """Returns the keyword arguments of ``amax_scale_update`` for a recipe without functions."""
    return {
        "margin": recipe.margin,
        "algo": recipe.amax_compute_algo,
        "pow2": recipe.scaling_factor_compute_algo == "pow2",
        "nonfinite_count": nonfinite,
    }


class UserUpdate(NamedTuple):
    """Named tuple of a history's update by user functions, computed but not yet written.

    ``last`` has the recorded amax values; the scales of slots in ``keep`` do not change.
    """

    history: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor
    last: torch.Tensor
    new: torch.Tensor
    keep: torch.Tensor

    @classmethod
    def computed(
        cls,
        history: torch.Tensor,
        scale: torch.Tensor,
        scale_inv: torch.Tensor,
        fp8_max: float,
        recipe: DelayedScaling,
    ) -> UserUpdate:
        """Computes the update of one history; a slot with amax 0, Inf or NaN keeps its scale."""
        last = history[0].clone()
        algo = recipe.amax_compute_algo
        if callable(algo):
            amax = _checked("amax_compute_algo", algo(history.clone()), last)
        else:
            amax = last if algo == "most_recent" else history.amax(0)
        new = _new_scale(amax, scale, fp8_max, recipe)
        new = torch.where(torch.isinf(new), torch.full_like(new, _FLT_MAX), new)
        valid = torch.isfinite(last) & (last != 0)
        keep = ~valid | ~torch.isfinite(amax) | (amax <= 0) | ~(new > 0)
        keep |= ~torch.isfinite(torch.reciprocal(new))
        return cls(history, scale, scale_inv, last, new, keep)

    def commit(self, nonfinite: torch.Tensor | None) -> None:
        """Writes the update; adds the number of Inf and NaN amax values to ``nonfinite``."""
        history, scale, scale_inv, last, new, keep = self
        finite = torch.isfinite(last)
        if nonfinite is not None:
            nonfinite.add_((~finite).sum().to(torch.int32))
        scale.copy_(torch.where(keep, scale, new))
        scale_inv.copy_(torch.where(keep, scale_inv, torch.reciprocal(new)))
        if history.shape[0] > 1:
            rolled = torch.cat([history[:1], history[2:], last[None]])
            history.copy_(torch.where(finite & (last != 0), rolled, history))
        history[0].zero_()


def _new_scale(
    amax: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling
) -> torch.Tensor:
    """Returns a recipe's scales ``[slots]`` for ``amax`` ``[slots]``; scales may be Inf or NaN."""
    algo = recipe.scaling_factor_compute_algo
    if callable(algo):
        new = algo(amax.clone(), scale.clone(), fp8_max, recipe)
        return _checked("scaling_factor_compute_algo", new, amax)
    # Not number / tensor, which torch computes as a reciprocal and a product, rounding twice.
    if algo == "pow2":
        ratio = (torch.full_like(amax, fp8_max) / amax).clamp(max=_FLT_MAX)
        power = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)
        return (power * 2.0**-recipe.margin).clamp(max=2.0**127)
    return torch.full_like(amax, fp8_max * 2.0**-recipe.margin) / amax


def _checked(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    """Returns a user function's result in the dtype and on the device of ``like``."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"DelayedScaling: {name} must return a tensor, got {type(value).__name__}")
    if value.shape != like.shape:
        raise ValueError(
            f"DelayedScaling: {name} must return shape {list(like.shape)}, got {list(value.shape)}"
        )
    return value.to(like)


class FirstSteps:
    """Flags of the slots of one FP8 state whose first scale is due (not computed yet).

    A slot is due while its flag in ``due`` is True, and its int32 flag in ``on_device``, if any, is
    not 0. Only the device knows whether groups of rows are empty. ``on_device`` has tensors of
    flags by tuples of slots.
    """

    __slots__ = ("due", "on_device")

    due: list[bool]
    on_device: dict[tuple[int, ...], torch.Tensor]

    def __init__(self, slots: int) -> None:
        self.begin(slots)

    def begin(self, slots: int) -> None:
        """Makes all ``slots`` slots due, with a new list ``due`` and no flags on the device."""
        self.due = [True] * slots
        self.on_device = {}

    def still_due(self) -> list[bool]:
        """Returns a bool per slot, True if its first scale is missing; waits for the device."""
        due = list(self.due)
        for slots, flags in self.on_device.items():
            if any(due[slot] for slot in slots):
                for slot, flag in zip(slots, flags.tolist(), strict=True):
                    due[slot] = due[slot] and flag != 0
        return due

    def set(self, due: list[bool]) -> None:
        """Sets which slots are due; flags on the device keep their addresses."""
        self.due[:] = due
        with torch.inference_mode(False), torch.no_grad():
            for slots, flags in self.on_device.items():
                flags.copy_(torch.tensor([due[slot] for slot in slots], dtype=torch.int32))

    def end(self) -> None:
        """Marks the first scales of all slots as set, on the host."""
        self.due[:] = [False] * len(self.due)

    def move(self, device: torch.device) -> None:
        """Moves the flags to ``device``."""
        for slots, flags in self.on_device.items():
            self.on_device[slots] = flags.to(device, copy=True)


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


# Slots of each GEMM.
FORWARD_SLOTS = 3  # input, weight, output
BACKWARD_SLOTS = 2  # grad_output, grad_input
TENSORS = (
    "scale_fwd",
    "scale_inv_fwd",
    "amax_history_fwd",
    "scale_bwd",
    "scale_inv_bwd",
    "amax_history_bwd",
)


class FP8State:
    """Scales and amax histories of one module, fp32, allocated at its first FP8 forward.

    The tensors keep their addresses from then on, until the module changes device or the histories
    change their length. Below, ``G`` is the number of GEMMs of the module and ``L`` the length of
    the histories. Each GEMM has three forward slots (input, weight, output) and two backward slots
    (grad_output, grad_input).

    Attributes:
        scale_fwd, scale_inv_fwd: ``[3 G]``.
        scale_bwd, scale_inv_bwd: ``[2 G]``.
        amax_history_fwd, amax_history_bwd: ``[L, 3 G]`` and ``[L, 2 G]``. Casts record their amax
            values in row 0 until the next update. Row 1 is the oldest amax, row ``L - 1`` the
            newest.
        pending_scale_fwd: ``[3 G]``, the forward scales that the next update will give; only
            evaluations write and read them (``preview_scales``).
        gemms: ``G``.
        allocated: True once the tensors exist.
        device: device of the tensors; meta before they exist.
        first_steps: ``FirstSteps`` that tells the slots whose first scale is still to be computed,
            with ``first_step="current"``.
        recipe: recipe of the scales; None until a forward or a loaded state sets it.
        sync: ``ScaleSync``, a record of two sets of ranks: those over which updates reduce the amax
            values, and those known to have equal scales. They may differ after scales are loaded.
    """

    scale_fwd: torch.Tensor
    scale_inv_fwd: torch.Tensor
    amax_history_fwd: torch.Tensor
    scale_bwd: torch.Tensor
    scale_inv_bwd: torch.Tensor
    amax_history_bwd: torch.Tensor
    pending_scale_fwd: torch.Tensor
    _drop_views: weakref.WeakMethod[Callable[[], None]] | None = None

    def __init__(self, gemms: int = 1) -> None:
        self.gemms = gemms
        self.allocated = False
        self.device = torch.device("meta")
        self.recipe: DelayedScaling | None = None
        self.first_steps = FirstSteps(self.num_slots)
        self.sync = ScaleSync()

    def on_replaced(self, drop_views: Callable[[], None]) -> None:
        """Registers a method that drops views of the tensors; called when these are replaced.

        Args:
            drop_views: bound method without arguments; its object is held weakly.
        """
        self._drop_views = weakref.WeakMethod(drop_views)

    @property
    def num_slots(self) -> int:
        """Number of slots, forward and backward."""
        return (FORWARD_SLOTS + BACKWARD_SLOTS) * self.gemms

    @property
    def history_length(self) -> int:
        """Rows of the amax histories, including row 0, which collects amax values."""
        return self.amax_history_fwd.shape[0]

    @property
    def header(self) -> torch.Tensor:
        """Header that a state dict has beside the tensors: JSON text as a uint8 tensor."""
        number, pending = self._clock()
        recipe = {} if self.recipe is None else recipe_entries(self.recipe)
        return encode_header(
            {
                "version": VERSION,
                "history": self.history_length,
                "pending": pending,
                "scope": number,
                "equal": self.sync.fingerprint(),
                "first_due": self.first_steps.still_due(),
                **recipe,
            }
        )

    def _clock(self) -> tuple[int | None, int]:
        """Returns the number of the amax group, or None, and of regions since its last update."""
        group = self.sync.amax_group
        return (None, amax_groups.pending) if group is None else (group.number, group.pending)

    def slots(self, handle: torch.Tensor) -> Slots:
        """Returns the views of the tensors that a scheme's quantizers use; ``handle`` as there."""

        def forward(i: int) -> Slot:
            scale, inverse = self.scale_fwd[i : i + 1], self.scale_inv_fwd[i : i + 1]
            amax, pending = self.amax_history_fwd[0, i : i + 1], self.pending_scale_fwd[i : i + 1]
            return Slot(scale, inverse, amax, pending, i)

        def backward(i: int) -> Slot:
            scale, inverse = self.scale_bwd[i : i + 1], self.scale_inv_bwd[i : i + 1]
            number = FORWARD_SLOTS * self.gemms + i
            return Slot(scale, inverse, self.amax_history_bwd[0, i : i + 1], None, number)

        gemms = tuple(
            GemmSlots(forward(FORWARD_SLOTS * g), forward(FORWARD_SLOTS * g + 1),
                      backward(BACKWARD_SLOTS * g))
            for g in range(self.gemms)
        )  # fmt: skip
        first = self.first_steps
        return Slots(gemms, first.due, first.on_device, self.sync, update_scales, handle)

    def fit(self, recipe: DelayedScaling, device: torch.device) -> None:
        """Makes scales and amax histories fit ``recipe``.

        Allocates them if missing, and changes the length of the histories to the recipe's. If
        format or margin differ from those of the last recipe, each scale is multiplied by the new
        ``fp8_max / 2**margin`` over the old one. Exceptions: scales never set stay 1, and all
        scales stay if either recipe has a function as ``scaling_factor_compute_algo``.
        """
        if not self.allocated or self.device.type == "meta":
            self.allocate(recipe.amax_history_len, device)
        elif self.history_length != recipe.amax_history_len:
            self.resize(recipe.amax_history_len)
        if self.recipe != recipe:
            if self.recipe is not None:
                self._rescale(self.recipe, recipe)
            registry.changed()
        self.recipe = recipe

    def allocate(self, length: int, device: torch.device) -> None:
        """Allocates the tensors, with scales of 1 and histories of 0.

        Args:
            length: rows of the histories, including row 0, which collects amax values.
            device: device of the tensors.
        """

        def ones(slots: int) -> torch.Tensor:
            return torch.ones(slots, dtype=torch.float32, device=device)

        def zeros(slots: int) -> torch.Tensor:
            return torch.zeros(length, slots, dtype=torch.float32, device=device)

        # Inference tensors could not be updated in a later training step.
        forward, backward = FORWARD_SLOTS * self.gemms, BACKWARD_SLOTS * self.gemms
        with torch.inference_mode(False):
            scales = ones(forward), ones(forward), ones(forward), ones(backward), ones(backward)
            histories = zeros(forward), zeros(backward)  # last: they may not fit into memory
        self.scale_fwd, self.scale_inv_fwd, self.pending_scale_fwd = scales[:3]
        self.scale_bwd, self.scale_inv_bwd = scales[3:]
        self.amax_history_fwd, self.amax_history_bwd = histories
        self.first_steps.begin(self.num_slots)
        self.allocated = True
        self.sync.renewed()
        self._replaced()

    def reset(self) -> None:
        """Restores the initial values in place; does nothing if nothing is allocated."""
        if self.allocated:
            with torch.no_grad():
                for name in (*TENSORS, "pending_scale_fwd"):
                    getattr(self, name).fill_(0.0 if "history" in name else 1.0)
            self.first_steps.set([True] * self.num_slots)
            self.sync.renewed()
            registry.changed()

    def move(self, device: torch.device) -> None:
        """Moves the tensors to ``device``; to or from meta, the values become initial ones."""
        if not self.allocated or device == self.device:
            return
        if device.type == "meta" or self.device.type == "meta":
            self.allocate(self.history_length, device)
            return
        with torch.inference_mode(False), torch.no_grad():
            moved = {name: getattr(self, name).to(device, copy=True) for name in TENSORS}
            for name, tensor in moved.items():
                setattr(self, name, tensor)
            self.pending_scale_fwd = self.pending_scale_fwd.to(device, copy=True)
            self.first_steps.move(device)
        self._replaced()

    def resize(self, length: int) -> None:
        """Trims or pads the histories to ``length`` rows, with the newest amax values kept."""
        old = self.history_length
        if length == old:
            return
        warn_resized(old, length)
        with torch.inference_mode(False), torch.no_grad():
            names = ("amax_history_fwd", "amax_history_bwd")
            resized = [resized_history(getattr(self, name), length) for name in names]
            for name, history in zip(names, resized, strict=True):
                setattr(self, name, history)
        self._replaced()

    def _rescale(self, old: DelayedScaling, new: DelayedScaling) -> None:
        """Adapts scales, computed for the recipe ``old``, to the format and margin of ``new``."""
        if callable(old.scaling_factor_compute_algo) or callable(new.scaling_factor_compute_algo):
            return  # what such a scale depends on is not known; the next update sets it
        margin = 2.0 ** (old.margin - new.margin)
        for way in ("fwd", "bwd"):
            before, after = (
                getattr(formats_of(r.fp8_format, self.device), f"max_{way}") for r in (old, new)
            )
            factor = after / before * margin
            if factor == 1.0:
                continue
            scale, history = getattr(self, f"scale_{way}"), getattr(self, f"amax_history_{way}")
            with torch.inference_mode(False), torch.no_grad():
                is_set = (scale != 1) | (history[1:] != 0).any(0)
                moved = (scale * factor).clamp(max=torch.finfo(torch.float32).max)
                scale.copy_(torch.where(is_set, moved, scale))
                getattr(self, f"scale_inv_{way}").copy_(torch.reciprocal(scale))

    def _replaced(self) -> None:
        """Calls the method given to ``on_replaced``, and drops the plans in the registry."""
        self.device = self.scale_fwd.device
        drop_views = None if self._drop_views is None else self._drop_views()
        if drop_views is not None:
            drop_views()
        registry.changed()

    def __getstate__(self) -> dict[str, Any]:
        # A copy made inside an evaluation reads the scales that the evaluation reads.
        kept = {"gemms", "allocated", "device", "recipe", "pending_scale_fwd", *TENSORS}
        values = {key: value for key, value in self.__dict__.items() if key in kept}
        return values | {"first_due": self.first_steps.still_due(), "clock": self._clock()}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        number, pending = kept.pop("clock", (None, 0))
        self.first_steps = FirstSteps(0)
        self.first_steps.due = kept.pop("first_due")
        self.__dict__.update(kept)
        self.sync = ScaleSync()
        if self.allocated:
            self.sync.loaded(None)
            if "pending_scale_fwd" not in kept:  # a pickle of an earlier version
                self.pending_scale_fwd = self.scale_fwd.clone()
            if pending:
                amax_groups.loaded(self.sync, number, pending, is_copy=True)


_warned: set[tuple[int, int]] = set()


def warn_resized(old: int, new: int) -> None:
    """Warns, once for each pair of lengths, that histories change their length."""
    if (old, new) not in _warned:
        _warned.add((old, new))
        what = "trimmed" if new < old else "padded"
        warnings.warn(f"FP8State: amax history {what} from length {old} to {new}", stacklevel=3)


def resized_history(history: torch.Tensor, length: int) -> torch.Tensor:
    """Returns an amax history of another length, with row 0 and the newest rows."""
    new = history.new_zeros(length, history.shape[1])
    new[0] = history[0]
    kept = min(history.shape[0], length) - 1
    if kept:
        new[-kept:] = history[-kept:]
    return new


class ScaleSnapshot:
    """Copies of scales, with version counters that show which scales were written later."""

    __slots__ = ("__weakref__", "copies", "tensors", "versions")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.versions = [tensor._version for tensor in tensors]
        with torch.inference_mode(False), torch.no_grad():
            self.copies = [tensor.clone() for tensor in tensors]

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        """Returns True if the snapshot is of exactly ``tensors``, and none was written since."""
        return len(tensors) == len(self.tensors) and all(
            new is old and new._version == version
            for new, old, version in zip(tensors, self.tensors, self.versions, strict=True)
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager inside which scales have the values of the snapshot again."""
        moved = []
        with torch.no_grad():
            for tensor, version, copy in zip(self.tensors, self.versions, self.copies, strict=True):
                if tensor._version != version:
                    moved.append((tensor, tensor.clone()))
                    tensor.copy_(copy)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in moved:
                    tensor.copy_(value)
