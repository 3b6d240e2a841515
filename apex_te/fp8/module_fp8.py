"""FP8 side of a module: its FP8 state and, for each recipe, the quantizers over that state."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from .. import runtime
from ..ops.binding import register
from ..recipe import DelayedScaling, Recipe, chosen_recipe
from ..runtime.named_arguments import check_model, named_arguments
from ..runtime.stamp import stamp
from ..runtime.tracing import untraced
from .delayed.ranks import AmaxGroup, amax_groups, label_of, recipe_named, registry
from .delayed.state import FP8State
from .scheme import build_quantizers
from .tensor import QuantizedTensor

if TYPE_CHECKING:
    from .scheme import QuantizerSets

__all__ = ["ModuleFP8", "init_fp8_state"]


class _Compiled:
    """Empty object to which attributes are added for code that torch.compile traces.

    A recipe's key names the pair of ``QuantizerSets`` and ``staging`` tensors, ``weight_<gemm>`` a
    ``TracedWeight``. torch.compile does not see entries added to a dict while it traces.
    """


class ModuleFP8:
    """FP8 state of a module, and its quantizers, which are built once for each recipe.

    Args:
        gemms: number of GEMMs of the module, each with its own quantizers.
        owner: the ``torch.nn.Module`` that the state belongs to, kept as a weak reference; None if
            unknown, until ``belong_to`` sets it.

    Attributes:
        state: the ``FP8State``, whose tensors the first forward allocates.
        number: number of this object in the process's registry.
        handle: ``number`` as int64 ``[1]`` on the CPU, for ops in compiled code.
        label: the module's class, with its layer or pipeline stage if known; equal on all ranks.
    """

    number: int
    update_failed = False
    observer: Callable[[QuantizerSets], QuantizerSets] | None = None
    handle: torch.Tensor
    _is_traced = False  # True if code that torch.compile has made uses this module

    def __init__(self, gemms: int = 1, owner: Any = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._register(FP8State(gemms), label_of(owner))

    def _register(self, state: FP8State, label: str) -> None:
        """Takes over ``state`` and ``label``, and gets a number from the process's registry."""
        self.state = state
        self.label = label
        self._sync = state.sync  # read in every forward
        state.on_replaced(self.forget)
        self.forget()
        registry.add(self)

    @classmethod
    def of_saved(cls, state: FP8State) -> ModuleFP8:
        """Returns a ModuleFP8 over an FP8 state that an earlier version pickled within a module."""
        new = cls.__new__(cls)
        new._owner = None
        new._register(state, state.__dict__.pop("label", ""))
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state, "label": self.label}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self._owner = None
        self._register(kept["state"], kept["label"])

    @property
    def num_slots(self) -> int:
        """Number of slots in the module's state, forward and backward."""
        return self.state.num_slots

    @property
    def recipe(self) -> Recipe | None:
        """Recipe of the state, else of the last forward that recorded an amax; None if unknown."""
        state = self.state
        if state.allocated and state.recipe is not None:
            return state.recipe
        return recipe_named(self._active_key) if self._active_key else None

    def forget(self) -> None:
        """Drops all quantizers, which hold views of the state's tensors; forwards rebuild them."""
        self._sets: dict[str, QuantizerSets] = {}
        self._active_key = ""
        self._active: QuantizerSets | None = None
        self._compiled = _Compiled()

    def move(self, device: torch.device) -> None:
        """Moves the state to ``device``, the module's device; to or from meta, values are lost."""
        self.forget()
        self.state.move(device)

    def observe(self, observer: Callable[[QuantizerSets], QuantizerSets] | None) -> None:
        """Passes quantizers through ``observer`` before the module gets them; None stops this."""
        self.observer = observer
        self.forget()

    def belong_to(self, owner: Any) -> None:
        """Stores a weak reference to the ``torch.nn.Module`` that owns this object."""
        self._owner = weakref.ref(owner)

    def owner_device(self) -> torch.device | None:
        """Returns the device of the owning module's parameters; None if no owner is known."""
        owner = None if self._owner is None else self._owner()
        return None if owner is None else owner._state_device()

    def described(self) -> str:
        """Returns the module's label and constructor arguments, for messages."""
        owner = None if self._owner is None else self._owner()
        name = self.label or ("a module" if owner is None else type(owner).__name__)
        return name if owner is None else f"{name}({owner.extra_repr()})"

    def quantizers(
        self,
        key: str,
        recipe: Recipe,
        device: torch.device,
        records: bool = True,
        amax_group: AmaxGroup | None = None,
    ) -> QuantizerSets:
        """Returns the quantizers for one forward; builds them and allocates the state if needed.

        Args:
            key: name that ``apex_te.fp8.delayed.ranks.intern`` gave the recipe.
            recipe: the region's recipe.
            device: device of the operands, to which the state is moved.
            records: True if the forward records amax values; only it refits an existing state.
            amax_group: ranks that take the maximum of their amax values; None for none.
        """
        if torch.compiler.is_compiling():
            if torch.compiler.is_dynamo_compiling():  # which runs the marked function by itself
                self._prepare(key, device.type, device.index, records)
            else:  # torch.export would make the state of its own tensors
                with untraced():
                    self._prepare(key, device.type, device.index, records)
            return getattr(self._compiled, key)[0]
        active = self.active(key, amax_group)
        if active is not None:
            return active
        self.enter(amax_group)
        return self.adapt(key, recipe, device, records)

    def active(self, key: str, amax_group: AmaxGroup | None) -> QuantizerSets | None:
        """Returns the quantizers of the last recording forward; None if they do not apply now.

        Args:
            key, amax_group: as in ``quantizers``.
        """
        entered = amax_group is None or amax_group is self._sync.amax_group
        return self._active if entered and self._active_key == key else None

    def enter(self, amax_group: AmaxGroup | None) -> None:
        """Makes updates of ``amax_group`` include this module from now on; None changes nothing."""
        if amax_group is not None:
            if amax_group is not self._sync.amax_group:
                registry.changed()
            self._sync.enter(amax_group)

    def adapt(
        self, key: str, recipe: Recipe, device: torch.device, records: bool = True
    ) -> QuantizerSets:
        """Returns quantizers for ``recipe``; only recording forwards refit an existing state.

        Args:
            key, recipe, device, records: as in ``quantizers``.
        """
        state = self.state
        exists = state.allocated and state.device.type != "meta"
        if exists and recipe.keeps_state and device.type != "meta" and state.device != device:
            self.move(device)  # loaded for a module without parameters, so on the CPU
        if recipe.keeps_state and (records or not exists):
            state.fit(cast(DelayedScaling, recipe), device)
        sets = self._sets.get(key)
        if sets is None:
            with torch.inference_mode(False):
                self.handle = torch.tensor([self.number], device="cpu")
            slots = state.slots(self.handle) if recipe.keeps_state else None
            sets = build_quantizers(recipe, slots, state.gemms, device)
            if self.observer is not None:
                sets = self.observer(sets)
            self._sets[key] = sets
            forward = [q for gemm in sets.recording for q in (gemm.input, gemm.weight)]
            tensors = [tensor for q in forward for tensor in q.state_tensors()]
            setattr(self._compiled, key, (sets, tensors))
        if records:
            self._active_key, self._active = key, sets
        return sets

    # Methods below serve code that torch.compile makes.

    def _prepare(self, key: str, device: str, index: int | None, records: bool) -> bool:
        """Adapts the state while torch.compile traces, which cannot trace the allocations.

        Its simple arguments make nothing of one module a guard of the compiled code, which layers
        share. Modules on the device that have not run yet are adapted, too, or each would cause a
        recompilation.
        """
        where = torch.device(device) if index is None else torch.device(device, index)
        recipe = recipe_named(key)
        counts = records and recipe.keeps_state
        amax_group = amax_groups.current if counts else None
        self._adapt_traced(key, recipe, where, records, amax_group)
        self.state.first_steps.set(self.state.first_steps.still_due())
        for other in registry.living():
            if not other._sets and other.owner_device() == where:
                other._adapt_traced(key, recipe, where, records, amax_group)
        return True

    # What torch.compiler.assume_constant_result does, without the second that importing it takes.
    _prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _adapt_traced(
        self,
        key: str,
        recipe: Recipe,
        device: torch.device,
        records: bool,
        amax_group: AmaxGroup | None,
    ) -> None:
        """Enters the amax group, adapts the state, and notes that compiled code uses the state."""
        self.enter(amax_group)
        self.adapt(key, recipe, device, records)
        self._is_traced = True

    def staging(self, key: str) -> list[torch.Tensor]:
        """Returns the input and weight state tensors that compiled code reads and writes."""
        return getattr(self._compiled, key)[1]

    def follow(self, key: str, recipe: DelayedScaling) -> None:
        """Adapts the FP8 state to a changed recipe if the module's forward is compiled for it."""
        state = self.state
        if self._is_traced and key in self._sets and state.recipe != recipe:
            state.fit(recipe, state.device)
            self._active = None

    def traced_weight(self, gemm: int, dtype: torch.dtype, *sizes: int) -> TracedWeight:
        """Returns the FP8 copies of a GEMM's weight that compiled code keeps between calls.

        Args:
            gemm: number of the GEMM in the module.
            dtype: FP8 dtype of the copies.
            sizes: rows and columns of the weight, and the number of parameters that it is made
                from.
        """
        name = f"weight_{gemm}"  # of one dtype, the same in all formats
        self._prepare_weight(name, dtype, *sizes)
        return getattr(self._compiled, name)

    def _prepare_weight(
        self, name: str, dtype: torch.dtype, rows: int, cols: int, sources: int
    ) -> bool:
        """Allocates the missing ``TracedWeight`` called ``name`` while torch.compile traces."""
        if not hasattr(self._compiled, name):
            weight = TracedWeight(rows, cols, dtype, sources, self.state.device)
            setattr(self._compiled, name, weight)
        return True

    _prepare_weight._dynamo_marked_constant = True  # type: ignore[attr-defined]


_lib = runtime.ops("cast_transpose")


class TracedWeight:
    """FP8 copies of a weight ``[rows, cols]``, with a stamp of the parameters it was made from.

    ``seen``, int64 ``[1 + 3 * parameters]`` on the CPU, begins with 1 once there are copies; the
    ``stamp`` of each parameter follows.
    """

    __slots__ = ("columnwise", "rowwise", "scale_inv", "seen")

    def __init__(
        self, rows: int, cols: int, dtype: torch.dtype, sources: int, device: torch.device
    ) -> None:
        with torch.inference_mode(False):
            self.rowwise = torch.zeros(rows, cols, dtype=dtype, device=device)
            self.columnwise = torch.zeros(cols, rows, dtype=dtype, device=device)
            self.scale_inv = torch.ones(1, dtype=torch.float32, device=device)
            self.seen = torch.zeros(1 + 3 * sources, dtype=torch.int64, device="cpu")

    def quantized(
        self,
        weight: torch.Tensor,
        sources: Sequence[torch.Tensor],
        scale: torch.Tensor,
        amax: torch.Tensor | None,
        fill: bool,
    ) -> QuantizedTensor:
        """Returns the copies, cast again if ``fill`` is True or a parameter has changed."""
        torch.ops.apex_te.keep_weight(
            weight, list(sources), scale, self.rowwise, self.columnwise, self.scale_inv, amax,
            self.seen, fill,
        )  # fmt: skip
        return QuantizedTensor(
            self.rowwise, self.scale_inv, self.columnwise, self.scale_inv, self.rowwise.dtype
        )


def _keep(
    weight: torch.Tensor,
    sources: Sequence[torch.Tensor],
    scale: torch.Tensor,
    rowwise: torch.Tensor,
    columnwise: torch.Tensor,
    scale_inv: torch.Tensor,
    amax: torch.Tensor | None,
    seen: torch.Tensor,
    fill: bool,
) -> None:
    """Casts ``weight`` into the kept copies if ``fill`` is True or ``seen`` is out of date."""
    now = [1]
    for source in sources:
        now += stamp(source)
    if fill or seen.tolist() != now:
        _lib.cast_transpose(weight, scale, rowwise, columnwise, amax, scale_inv, None, None, None)
        seen.copy_(torch.tensor(now))


register(
    "keep_weight(Tensor weight, Tensor[] sources, Tensor scale, Tensor(a!) rowwise, "
    "Tensor(b!) columnwise, Tensor(c!) scale_inv, Tensor(d!)? amax, Tensor(e!) seen, "
    "bool fill) -> ()",
    _keep,
)


@named_arguments()
def init_fp8_state(model: torch.nn.Module, recipe: Recipe | str | None = None) -> None:
    """Allocates the FP8 state of every module in ``model`` before its first forward.

    Call this before loading a distributed checkpoint, which loads only keys that the model already
    has. Existing state is kept.

    Args:
        model: a model or one module.
        recipe: a recipe or its name, default ``DelayedScaling()``. Its ``amax_history_len`` is the
            length of the histories. A recipe that keeps no state allocates nothing.

    Raises:
        ValueError: the name ``recipe`` is unknown.
        TypeError: ``model`` is not a module, or ``recipe`` is neither a recipe nor a name.
    """
    check_model("init_fp8_state", model)
    recipe = chosen_recipe("init_fp8_state", "recipe", recipe)
    inits = [getattr(module, "_init_fp8_state", None) for module in model.modules()]
    if not any(inits):
        warnings.warn(
            f"init_fp8_state: model must contain FP8 layers, got {type(model).__name__};"
            " convert it with apex_te.from_torch first",
            stacklevel=3,
        )
    for init in inits:
        if init is not None:
            init(recipe)
