"""FP8 state of a module (scales, amax histories) and the process-wide order in which it moves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from ...comm.groups import is_process_group
from ...recipe import DelayedScaling, Recipe, chosen_recipe
from ...runtime.tracing import untraced
from ..formats import formats_of
from .first_step import set_first_due, still_due
from .history import resized_history, warn_resized
from .labels import label_of, number_layer
from .reduce_group import AmaxGroup, ScaleSync
from .registry import intern, recipe_named, registry

if TYPE_CHECKING:
    from ..scheme import QuantizerSets
    from ..scheme.base import Slots
    from .compiled_weight import TracedWeight

__all__ = [
    "FP8State",
    "flush_fp8_state",
    "init_fp8_state",
    "intern",
    "nonfinite_count",
    "number_layer",
    "registry",
]

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


class Compiled:
    """For each recipe's name its quantizers and what `staging` gives; the weights that are kept.

    Attributes, since torch.compile would not see what is added to a dict while it traces.
    """


class FP8State:
    """Scales and amax histories of one module, fp32, allocated at its first FP8 forward.

    ``registered=False``: none of the process's states, whose scales move and which ranks compare.

    Attributes (``L`` = history length, ``G`` = GEMMs of the module; forward slots of a GEMM: input,
    weight, output; backward slots: grad_output, grad_input):
        scale_fwd, scale_inv_fwd: ``[3 G]``; scale_bwd, scale_inv_bwd: ``[2 G]``.
        amax_history_fwd: ``[L, 3 G]``; amax_history_bwd: ``[L, 2 G]``. Row 0 is the staging row
            into which casts write, row 1 the oldest, row ``L - 1`` the newest.
        pending_scale_fwd: ``[3 G]``, what the forward scales become with the next update; written
            and read by evaluations only (``Registry.preview``).
        first_due: per slot, True while ``first_step="current"`` has still to set its scale, as far
            as the host knows; ``still_due(state)`` is what is true.
        first_on_device: the same of slots whose data's rows only the device counts: int32
            ``[slots]`` for a tuple of slots.
        label: the module's class and its layer's number or pipeline stage, where known.
        recipe: the recipe of the last forward that keeps state, or None.
        sharing: over which ranks the scales move, and are equal.

    The tensors keep their addresses from then on, until the module changes device or the
    history its length.
    """

    scale_fwd: torch.Tensor
    scale_inv_fwd: torch.Tensor
    amax_history_fwd: torch.Tensor
    scale_bwd: torch.Tensor
    scale_inv_bwd: torch.Tensor
    amax_history_bwd: torch.Tensor
    pending_scale_fwd: torch.Tensor
    number: int  # in the registry
    label = ""
    update_failed = False  # the last one, which a recipe's function did not survive
    handle: torch.Tensor  # its number, for compiled code
    _wrap: Callable[[QuantizerSets], QuantizerSets] | None = None
    _first_traced = False  # and the code sets the first scales
    _traced = False  # torch.compile has code that uses this state

    def __init__(self, gemms: int = 1, owner: Any = None, registered: bool = True) -> None:
        self.gemms = gemms
        self._owner = None if owner is None else weakref.ref(owner)
        self.label = label_of(owner)
        self.allocated = False
        self.device = torch.device("meta")
        self.recipe: DelayedScaling | None = None
        self.first_due = [True] * self.slots
        self.first_on_device: dict[tuple[int, ...], torch.Tensor] = {}
        self.sharing = ScaleSync()
        self.forget()
        if registered:
            registry.add(self)

    def forget(self) -> None:
        """Drop the quantizers, which hold views of the tensors and know their device."""
        self._sets: dict[str, QuantizerSets] = {}
        self.compiled = Compiled()
        self._active_key = ""
        self._active: QuantizerSets | None = None

    def observe(self, wrap: Callable[[QuantizerSets], QuantizerSets] | None) -> None:
        """Have the quantizers that modules get pass through ``wrap``; None ends that."""
        self._wrap = wrap
        self.forget()

    @property
    def header(self) -> torch.Tensor:
        """What a state dict says of these tensors, JSON text as uint8."""
        from .serialize import header_of

        return header_of(self)

    @property
    def slots(self) -> int:
        """Scales of the module, forward and backward."""
        return (FORWARD_SLOTS + BACKWARD_SLOTS) * self.gemms

    def quantizers(
        self,
        key: str,
        recipe: Recipe,
        device: torch.device,
        records: bool = True,
        scope: AmaxGroup | None = None,
    ) -> QuantizerSets:
        """The quantizers for ``recipe``, interned as ``key``; a recording state adapts to them."""
        if torch.compiler.is_compiling():
            if torch.compiler.is_dynamo_compiling():  # which runs the marked function by itself
                self._prepare(key, device.type, device.index, records)
            else:  # torch.export would make the state of its own tensors
                with untraced():
                    self._prepare(key, device.type, device.index, records)
            return getattr(self.compiled, key)[0]
        active = self._active
        entered = scope is None or scope is self.sharing.scope
        if active is not None and self._active_key == key and entered:
            return active
        self.enter(scope)
        return self.adapt(key, recipe, device, records)

    def _prepare(self, key: str, device: str, index: int | None, records: bool) -> bool:
        """Adapt while torch.compile traces, which could not trace the allocations itself.

        A method, so that nothing of one state becomes a condition of the compiled code, which the
        layers of a model then share; those that have not run yet are adapted with it, or each would
        be compiled anew.
        """
        where = torch.device(device) if index is None else torch.device(device, index)
        recipe = recipe_named(key)
        scope = registry.scope if records and recipe.keeps_state else None
        self.enter(scope)
        self.adapt(key, recipe, where, records)
        set_first_due(self, still_due(self))
        self._traced = True
        self._first_traced |= records and recipe.keeps_state
        for state in registry.living():
            if not state._sets and state.owner_device() == where:
                state.enter(scope)
                state.adapt(key, recipe, where, records)
                state._traced = True
                state._first_traced |= records and recipe.keeps_state
        return True

    # What torch.compiler.assume_constant_result does, without the second that importing it takes.
    _prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def staging(self, key: str) -> list[torch.Tensor]:
        """What the forward of compiled code reads and writes with the recipe called ``key``."""
        return getattr(self.compiled, key)[1]

    def traced_weight(self, gemm: int, dtype: torch.dtype, *sizes: int) -> TracedWeight:
        """Where compiled code keeps the FP8 copies of a weight; ``sizes``: rows, cols, sources."""
        name = f"weight_{gemm}"  # of one dtype, the same in all formats
        self._prepare_weight(name, dtype, *sizes)
        return getattr(self.compiled, name)

    def _prepare_weight(
        self, name: str, dtype: torch.dtype, rows: int, cols: int, sources: int
    ) -> bool:
        if not hasattr(self.compiled, name):
            from .compiled_weight import TracedWeight

            setattr(self.compiled, name, TracedWeight(rows, cols, dtype, sources, self.device))
        return True

    _prepare_weight._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def described(self) -> str:
        """The module of this state, for messages."""
        owner = None if self._owner is None else self._owner()
        name = self.label or ("a module" if owner is None else type(owner).__name__)
        return name if owner is None else f"{name}({owner.extra_repr()})"

    def belong_to(self, owner: Any) -> None:
        """Remember the module of this state, weakly."""
        self._owner = weakref.ref(owner)

    def owner_device(self) -> torch.device | None:
        """Where the module of this state has its parameters."""
        owner = None if self._owner is None else self._owner()
        return None if owner is None else owner._state_device()

    def adapt(
        self, key: str, recipe: Recipe, device: torch.device, records: bool = True
    ) -> QuantizerSets:
        """Allocate on ``device`` or resize for ``recipe``, and build quantizers it has not yet."""
        from ..scheme import build_quantizers

        exists = self.allocated and self.device.type != "meta"
        if recipe.keeps_state and (records or not exists):
            self._fit(cast(DelayedScaling, recipe), device)
        sets = self._sets.get(key)
        if sets is None:
            slots = self._slot_views() if recipe.keeps_state else None
            sets = build_quantizers(recipe, slots, self.gemms, device)
            if self._wrap is not None:
                sets = self._wrap(sets)
            self._sets[key] = sets
            forward = [q for gemm in sets.recording for q in (gemm.input, gemm.weight)]
            setattr(
                self.compiled,
                key,
                (sets, [tensor for q in forward for tensor in q.state_tensors()]),
            )
            with torch.inference_mode(False):
                self.handle = torch.tensor([self.number], device="cpu")
        if records:
            self._active_key, self._active = key, sets
        return sets

    def _slot_views(self) -> Slots:
        """Returns the views of this state over which quantizers are built."""
        from ..scheme.base import GemmSlots, Slot, Slots
        from .update import update_scales

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
        return Slots(gemms, self.first_due, self.first_on_device, self.sharing, update_scales)

    def enter(self, scope: AmaxGroup | None) -> None:
        """The module runs in a region of ``scope``, if that is known."""
        if scope is not None:
            if scope is not self.sharing.scope:
                registry.changed()
            self.sharing.enter(scope)

    def follow(self, key: str, recipe: DelayedScaling) -> None:
        """Do on entry to a region what compiled code cannot: end the first step, adapt."""
        if self._first_traced:
            self._first_traced = False
            self.first_due[:] = [False] * len(self.first_due)
        if self._traced and key in self._sets and self.recipe != recipe:
            self._fit(recipe, self.device)
            self._active = None

    def _fit(self, recipe: DelayedScaling, device: torch.device) -> None:
        """Have tensors of the size that ``recipe`` needs."""
        if not self.allocated or self.device.type == "meta":
            self.allocate(recipe.amax_history_len, device)
        elif self.history_length != recipe.amax_history_len:
            self.resize(recipe.amax_history_len)
        if self.recipe != recipe:
            if self.recipe is not None:
                self._rescale(self.recipe, recipe)
            registry.changed()
        self.recipe = recipe

    def take_recipe(self, recipe: DelayedScaling | None) -> None:
        """Say with which recipe values that were loaded were made; None if that is not known.

        The next recorded forward brings them to its own.
        """
        if recipe is not None and recipe != self.recipe:
            self.recipe = recipe
            self._active = None

    def _rescale(self, old: DelayedScaling, new: DelayedScaling) -> None:
        """Bring scales that were set for ``old`` to the format and the margin of ``new``."""
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

    @property
    def history_length(self) -> int:
        """Rows of the amax histories, the staging row included."""
        return self.amax_history_fwd.shape[0]

    def allocate(self, length: int, device: torch.device) -> None:
        """Give the state its initial values on ``device``: scales 1, histories 0."""

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
        self.first_due = [True] * self.slots
        self.first_on_device = {}
        self.allocated = True
        self.sharing.renewed()
        self._replaced()

    def reset(self) -> None:
        """Back to initial values, in place; nothing happens where nothing is allocated."""
        if self.allocated:
            with torch.no_grad():
                for name in TENSORS:
                    getattr(self, name).fill_(0.0 if "history" in name else 1.0)
            set_first_due(self, [True] * self.slots)
            self.sharing.renewed()
            registry.changed()

    def move(self, device: torch.device) -> None:
        """Follow the module to ``device``; nothing is kept across the meta device."""
        self.forget()
        if not self.allocated or device == self.device:
            return
        if device.type == "meta" or self.device.type == "meta":
            self.allocate(self.history_length, device)
            return
        with torch.inference_mode(False), torch.no_grad():
            moved = {name: getattr(self, name).to(device, copy=True) for name in TENSORS}
            for name, tensor in moved.items():
                setattr(self, name, tensor)
            self.pending_scale_fwd = self.scale_fwd.clone()
            for slots, flags in self.first_on_device.items():
                self.first_on_device[slots] = flags.to(device, copy=True)
        self._replaced()

    def resize(self, length: int) -> None:
        """Trim or pad the histories to ``length`` rows, keeping the newest amaxes; warns once."""
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

    def _replaced(self) -> None:
        """Tensors have new addresses: drop every view of the old ones."""
        self.device = self.scale_fwd.device
        self.forget()
        registry.changed()

    def __getstate__(self) -> dict[str, Any]:
        kept = {"gemms", "label", "allocated", "device", "recipe", *TENSORS}
        values = {key: value for key, value in self.__dict__.items() if key in kept}
        scope = self.sharing.scope
        clock = (None, registry.pending) if scope is None else (scope.number, scope.pending)
        return values | {"first_due": still_due(self), "clock": clock}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        number, pending = kept.pop("clock", (None, 0))
        self.__dict__.update(kept)
        self.first_on_device = {}
        self.sharing = ScaleSync()
        if self.allocated:
            self.sharing.loaded(None)
            self.pending_scale_fwd = self.scale_fwd.clone()
        self._owner = None
        self.forget()
        registry.add(self)
        if self.allocated and pending:
            registry.unpickled(self, number, pending)


def flush_fp8_state(group: Any = None) -> None:
    """Apply pending scale updates now; collective over the ``fp8_group`` of the regions.

    Scales otherwise move on entering the next ``fp8_autocast``. Call it before saving where all
    ranks must save the same scales. Does nothing if no region has run since the last update.

    ``group``: update only what ran in regions with this ``fp8_group``; None: all, each over its
    own. Errors: TypeError for what is no process group; ValueError for a group of no region; the
    error of a recipe's function that raised, after all other modules were updated.
    """
    if group is not None and not is_process_group(group):
        raise TypeError(
            "flush_fp8_state: group must be a torch.distributed.ProcessGroup, "
            f"got {type(group).__name__}"
        )
    registry.flush(group)


def init_fp8_state(model: torch.nn.Module, recipe: Recipe | str | None = None) -> None:
    """Allocate the FP8 state of every module in ``model`` now, before its first forward.

    A distributed checkpoint needs it, because it loads only keys that the model already has.
    State that exists is kept. ``recipe``, a recipe or its name, gives the history length, default
    ``DelayedScaling()``; one that keeps no state allocates nothing.
    """
    recipe = chosen_recipe("init_fp8_state", "recipe", recipe)
    for module in model.modules():
        init = getattr(module, "_init_fp8_state", None)
        if init is not None:
            init(recipe)


def nonfinite_count(device: torch.device | str = "cpu") -> torch.Tensor:
    """Number of amaxes that were Inf or NaN at an update: int32 ``[1]``, living on ``device``."""
    from .update import nonfinite_count as count

    return count(device)
