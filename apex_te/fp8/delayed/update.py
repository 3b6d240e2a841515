"""Clock and update of delayed scaling, by amax group, and blocks without lasting updates.

An update all-reduces the recorded amax values over the amax group's ranks, and computes the new
scales of all states by one call for each device and kind of recipe.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...comm.collectives import world_size
from ...comm.groups import is_process_group
from ...recipe import DelayedScaling
from ..tensor import formats_of
from .ranks import AmaxGroup, RankReduction, ScaleSync, SlotRange, amax_groups, intern, registry
from .state import (
    TENSORS,
    UserUpdate,
    nonfinite_count,
    nonfinite_counts,
    prepared_update,
    update_scales,
)

if TYPE_CHECKING:
    from ...ops.amax_scale_update import PreparedUpdate
    from ...recipe import Recipe
    from ..module_fp8 import ModuleFP8
    from .ranks import AmaxGroup
    from .state import FirstSteps

# Reentrant, as a recipe's function may enter a region.
update_lock = threading.RLock()
_failures: dict[Recipe, UpdateFailure] = {}  # that no region has raised yet


def enter_region(
    recipe: Any, group: Any, may_update: bool, thread: int | None = None
) -> AmaxGroup | None:
    """Counts a region that records amax values, after an update if one is due.

    Only a region entered with grad enabled (``may_update``) runs the update. Returns the amax
    group, or None for a recipe without state, whose regions are not counted. ``thread`` is in
    ``AmaxGroup.inside`` until the region is left.

    Raises:
        Exception: an update of states with this recipe failed, here or earlier. It is raised once,
            and the region is not counted.
    """
    if not recipe.keeps_state:
        return None
    with update_lock:
        amax_group = amax_groups.enter(recipe, group)
        if may_update and amax_group.pending >= recipe.interval:
            if amax_group.inside - {thread}:
                _warn_of_threads()
            _update(recipe, amax_group)
        _raise_failure(recipe)
        if thread is not None:
            amax_group.inside.add(thread)
        # Where none is pending, what was trained before is done.
        amax_group.training = may_update or (amax_group.training and amax_group.pending > 0)
        amax_group.pending += 1
        if recipe.first_step == "current" or recipe is not amax_groups.recipe:
            amax_groups.recipe = recipe
            key = intern(recipe)[0]
            for module in registry.living():
                module.follow(key, recipe)
    return amax_group


@functools.cache
def _warn_of_threads() -> None:
    """Warns once that a thread updates the scales of a region that another thread is in."""
    warnings.warn(
        "fp8_autocast: two threads train with delayed scaling at once, which updates the scales of "
        "all models of the process: each disturbs the other's steps. Train them in separate "
        "processes, or with a recipe without state, such as CurrentScaling",
        stacklevel=4,
    )


def leave_calibration(recipe: Any, amax_group: AmaxGroup) -> None:
    """Updates scales on leaving a calibrating region without grad.

    It does nothing if a pending region was entered with grad enabled: the backward may still come,
    and must find the scales of its forward.
    """
    with update_lock:
        if amax_group.pending and not amax_group.training:
            _update(recipe, amax_group)
            _raise_failure(recipe)


def update_if_due(recipe: Any, amax_group: AmaxGroup) -> None:
    """Updates the scales of ``amax_group`` if ``recipe.interval`` regions have passed."""
    with update_lock:
        if recipe.keeps_state and amax_group.pending >= recipe.interval:
            _update(recipe, amax_group)


def flush_fp8_state(group: Any = None) -> None:
    """Applies pending scale updates now; collective over the ``fp8_group`` of the regions.

    Without this call, the next ``fp8_autocast`` updates scales on entry. Call it before saving if
    all ranks must save equal scales. It does nothing if no region has run since the last update.

    Args:
        group: update only modules that last ran in regions with this ``fp8_group``; None updates
            all modules, each over the group of its regions.

    Raises:
        TypeError: ``group`` is not a process group.
        ValueError: no region had this ``group``, but regions that reduce amax values over other
            groups are pending.
        Exception: a callable of a recipe raised it; all other modules were updated first.
    """
    if group is not None and not is_process_group(group):
        raise TypeError(
            "flush_fp8_state: group must be a torch.distributed.ProcessGroup, "
            f"got {type(group).__name__}"
        )
    with update_lock:
        chosen = amax_groups.waiting() if group is None else amax_groups.reduced_over(group)
        for amax_group in chosen:
            if amax_group.key is None:
                amax_group.group = group
            _update(None, amax_group)
        for recipe in list(_failures):
            _raise_failure(recipe)


def _update(recipe: Any, amax_group: AmaxGroup) -> None:
    """Updates the states of ``amax_group``, and keeps failures until a region or flush raises them.

    The next region with a failure's recipe raises it. ``recipe`` is the current region's, None in a
    flush; states loaded without one get it, and a failure with any other also causes a warning now.
    """
    plan = registry.plans.get(amax_group)
    if plan is None:
        plan = registry.plans[amax_group] = UpdatePlan(amax_group, recipe)
    failures = plan.run()
    amax_group.pending = 0
    if not failures:
        return
    for failure in failures:
        _failures[failure.recipe] = failure
        if recipe is not None and failure.recipe != recipe:
            # The region that is entered here may be another model's.
            warnings.warn(
                f"{failure.error()}; the next region with that recipe raises this",
                RuntimeWarning,
                stacklevel=4,
            )
    registry.changed()


def _raise_failure(recipe: Recipe) -> None:
    """Raises the failure that was kept for states with this recipe, if any, and forgets it."""
    failure = _failures.pop(recipe, None) if _failures else None
    if failure is not None:
        raise failure.error()


class UpdateFailure(NamedTuple):
    """Named tuple that describes the failed update of the states with one recipe."""

    recipe: DelayedScaling
    modules: list[str]
    syncs: list[ScaleSync]
    cause: Exception
    where: str

    def error(self) -> Exception:
        """Returns the exception to raise; a RuntimeError for most types of ``cause``."""
        names = ", ".join(self.modules[:3])
        if len(self.modules) > 3:
            names += f" and {len(self.modules) - 3} more"
        text = (
            f"fp8_autocast: the scale update of {names} failed with {self.recipe!r}, which left "
            f"scales as they were and dropped the amaxes staged: {self.cause} ({self.where})"
        )
        plain = type(self.cause) in (TypeError, ValueError, NotImplementedError)
        error = (type(self.cause) if plain else RuntimeError)(text)
        error.__cause__ = self.cause
        return error


class UpdatePlan:
    """Tensors of an amax group's states, grouped for updates; valid until a module changes."""

    def __init__(self, amax_group: AmaxGroup, recipe: Recipe | None) -> None:
        """Groups the tensors of all states that are updated with ``amax_group``."""
        self.amax_group = amax_group
        self.groups: dict[tuple, ScaleGroup] = {}
        self._staged: list[SlotRange] = []  # slots whose amaxes are reduced
        self._reduction: RankReduction | None = None
        self._first_steps: list[FirstSteps] = []  # whose first scales an update sets
        self._syncs: list[tuple[ScaleSync, bool]] = []  # True: the state's amaxes are reduced
        self._noted = False  # True once the syncs know of an update
        starts = [0, *itertools.accumulate(registry.sizes)]
        for module in registry.living():
            state = module.state
            if not state.allocated or state.sync.amax_group not in (None, amax_group):
                continue
            if state.recipe is None:  # loaded, with functions that no file can hold
                state.recipe = recipe
            if state.recipe is not None and state.device.type != "meta":
                self._add(module, state.recipe, starts[module.number])

    def _add(self, module: ModuleFP8, recipe: DelayedScaling, start: int) -> None:
        """Adds the state of a module to the plan."""
        state = module.state
        histories = state.amax_history_fwd, state.amax_history_bwd
        scales = state.scale_fwd, state.scale_bwd
        inverses = state.scale_inv_fwd, state.scale_inv_bwd
        self._syncs.append((state.sync, self.amax_group.reduces and recipe.reduce_amax))
        if recipe.reduce_amax:
            starts = start, start + histories[0].shape[1]
            self._staged += map(SlotRange, starts, histories, scales, inverses)
        if recipe.first_step == "scale_one":
            self._first_steps.append(state.first_steps)
        limits = formats_of(recipe.fp8_format, state.device)
        slots = zip(histories, scales, inverses, (limits.max_fwd, limits.max_bwd), strict=True)
        _group_of(self.groups, state.device, recipe, True).add(module, *slots)

    def run(self) -> list[UpdateFailure]:
        """Reduces amax values over the ranks, then updates every slot; returns the failures."""
        amax_group, equalised = self.amax_group, False
        if amax_group.reduces and world_size(amax_group.group) > 1:
            equalised = self._reduce()
        failures = []
        for scale_group in self.groups.values():
            failure = scale_group.run()
            if failure is not None:
                failures.append(failure)
        for first_steps in self._first_steps:
            if True in first_steps.due:
                first_steps.end()
        if equalised or not self._noted:
            for sync, reduced in self._syncs:
                sync.updated(amax_group, reduced, equalised)
            self._noted = True
        for failure in failures:
            for sync in failure.syncs:
                sync.loaded(None)  # other ranks may have moved theirs
        return failures

    def _reduce(self) -> bool:
        """All-reduces staged amax values; returns True if this made all ranks' scales equal."""
        group = self.amax_group.group
        if self._reduction is None:
            unsure = any(reduced and not s.sure_in(self.amax_group) for s, reduced in self._syncs)
            self._reduction = RankReduction(
                tuple(registry.sizes), tuple(registry.labels), self._staged, _device_of(group),
                unsure,
            )  # fmt: skip
        return self._reduction.run(group)


def _device_of(group: Any) -> torch.device:
    """Returns the device that a rank without FP8 modules uses in collectives over ``group``."""
    if torch.distributed.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _group_of(
    groups: dict[tuple, ScaleGroup], device: torch.device, recipe: DelayedScaling, counts: bool
) -> ScaleGroup:
    """Returns the entry of ``groups`` for states on ``device`` with ``recipe``, made if missing."""
    key: tuple = (device, recipe.margin, recipe.amax_compute_algo)
    key += (recipe.scaling_factor_compute_algo,)
    if recipe.uses_callables:
        key += (recipe,)
    if key not in groups:
        groups[key] = ScaleGroup(recipe, nonfinite_count(device) if counts else None)
    return groups[key]


class ScaleGroup:
    """Slots of states on one device that one call updates, because their recipes act equally."""

    def __init__(self, recipe: DelayedScaling, nonfinite: torch.Tensor | None) -> None:
        self.recipe = recipe
        self.nonfinite = nonfinite
        self._uses_callables = recipe.uses_callables
        self.histories: list[torch.Tensor] = []
        self.scales: list[torch.Tensor] = []
        self.scale_invs: list[torch.Tensor] = []
        self.fp8_max: list[float] = []
        # Modules, each with the end of its entries in the lists above.
        self._owners: list[tuple[weakref.ref[ModuleFP8], int]] = []
        # Indices of owners whose last update failed, which would fail again with nothing staged.
        self._suspects: set[int] = set()
        self._prepared: PreparedUpdate | None = None

    def add(
        self, module: ModuleFP8, *slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]
    ) -> None:
        """Adds slots, as ``(history, scale, scale_inv, fp8_max)``, of ``module``, held weakly."""
        for history, scale, scale_inv, fp8_max in slots:
            self.histories.append(history)
            self.scales.append(scale)
            self.scale_invs.append(scale_inv)
            self.fp8_max.append(fp8_max)
        if module.update_failed:
            self._suspects.add(len(self._owners))
        self._owners.append((weakref.ref(module), len(self.histories)))

    def run(self) -> UpdateFailure | None:
        """Updates every slot; returns the failure, if any; failed states keep their scales."""
        if self._uses_callables:
            return self._run_each()
        everyone = range(len(self._owners))
        if self._suspects and not any(map(self._has_staged, everyone)):
            return None
        slots = self.histories, self.scales, self.scale_invs, self.fp8_max
        try:
            if torch.compiler.is_compiling():
                update_scales(*slots, self.recipe, self.nonfinite)
            else:
                if self._prepared is None:
                    self._prepared = prepared_update(*slots, self.recipe, self.nonfinite)
                self._prepared.run()
        except Exception as error:
            return self._failure(everyone, error)
        if self._suspects:
            self._succeeded(everyone)
        return None

    def _run_each(self) -> UpdateFailure | None:
        """Updates state by state with a user's functions, each state as a whole or not at all."""
        failed: list[int] = []
        cause: Exception | None = None
        with torch.no_grad():
            for index in range(len(self._owners)):
                if index in self._suspects and not self._has_staged(index):
                    continue
                try:
                    updates = [
                        UserUpdate.computed(
                            self.histories[i], self.scales[i], self.scale_invs[i], self.fp8_max[i],
                            self.recipe,
                        )
                        for i in self._entries(index)
                    ]  # fmt: skip
                except Exception as error:
                    failed.append(index)
                    cause = cause or error
                else:
                    for update in updates:
                        update.commit(self.nonfinite)
                    self._succeeded((index,))
        return None if cause is None else self._failure(failed, cause)

    def _entries(self, index: int) -> range:
        """Returns the range of ``histories`` and ``scales`` for module ``index`` of ``_owners``."""
        return range(self._owners[index - 1][1] if index else 0, self._owners[index][1])

    def _has_staged(self, index: int) -> bool:
        """Returns True if a module has a staged amax, or in a capture; waits for the device."""
        histories = [self.histories[i] for i in self._entries(index)]
        if histories[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        return any(bool(history[0].any()) for history in histories)

    def _succeeded(self, indices: Sequence[int]) -> None:
        """Clears ``update_failed`` of the modules that have ``indices`` in ``_owners``."""
        for index in self._suspects.intersection(indices):
            module = self._owners[index][0]()
            if module is not None:
                module.update_failed = False
            self._suspects.discard(index)

    def _failure(self, failed: Sequence[int], cause: Exception) -> UpdateFailure:
        """Drops staged amax values of modules, marks these as failed, and returns the failure."""
        modules, syncs = [], []
        for index in failed:
            with torch.no_grad():
                for i in self._entries(index):
                    self.histories[i][0].zero_()
            module = self._owners[index][0]()
            if module is not None:
                module.update_failed = True
                modules.append(module.described())
                syncs.append(module.state.sync)
        where = traceback.extract_tb(cause.__traceback__)[-1]
        cause = cause.with_traceback(None)
        at = f"{where.filename}:{where.lineno}"
        return UpdateFailure(self.recipe, modules, syncs, cause, at)


def preview_scales(recipe: Recipe) -> bool:
    """Computes the scales that pending updates will give into each ``pending_scale_fwd``.

    Returns False if the evaluation is to read the present scales: no update is pending, or it would
    be a collective in which other ranks may not take part.
    """
    if not amax_groups.any_pending():
        return False
    # Inference tensors could not be written by a later evaluation outside of inference mode.
    with update_lock, torch.inference_mode(False), torch.no_grad():
        plan = registry.plans.get(PendingScales)
        if plan is None:
            allocated = [m for m in registry.living() if m.state.allocated]
            plan = registry.plans[PendingScales] = PendingScales(allocated, recipe)
        return plan.run()


class PendingScales:
    """Computes forward scales as the next update will, into tensors that only evaluations read.

    So an evaluation changes nothing, even between a forward and its backward. For a state whose
    update takes a collective, it reads the present scales.
    """

    def __init__(self, modules: Sequence[ModuleFP8], recipe: Recipe) -> None:
        """Groups the tensors of ``modules``."""
        self.groups: dict[tuple, ScaleGroup] = {}
        # Copies to work on, and what is made of them, by device: targets and sources.
        self._copied: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._results: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._local: list[AmaxGroup | None] = []  # of states that need no other rank
        for module in modules:
            if module.state.device.type != "meta":
                self._add(module, recipe)

    def _add(self, module: ModuleFP8, recipe: Recipe) -> None:
        """Adds a module's state; its scales are only copied if an update takes a collective."""
        state = module.state
        chosen = recipe if state.recipe is None else state.recipe
        scale = torch.empty_like(state.scale_fwd)
        results = self._results.setdefault(state.device, ([], []))
        results[0].append(state.pending_scale_fwd)
        results[1].append(scale)
        targets, sources = self._copied.setdefault(state.device, ([], []))
        targets.append(scale)
        sources.append(state.scale_fwd)
        amax_group = state.sync.amax_group
        if not isinstance(chosen, DelayedScaling) or not _is_local(amax_group, chosen):
            return
        history = torch.empty_like(state.amax_history_fwd)
        inverse = torch.empty_like(state.scale_inv_fwd)
        targets += [history, inverse]
        sources += [state.amax_history_fwd, state.scale_inv_fwd]
        limits = formats_of(chosen.fp8_format, state.device)
        group = _group_of(self.groups, state.device, chosen, False)
        group.add(module, (history, scale, inverse, limits.max_fwd))
        self._local.append(amax_group)

    def run(self) -> bool:
        """Computes the scales; returns False and does nothing if no such update is pending."""
        if not any(group is None or group.pending for group in self._local):
            return False
        for targets, sources in self._copied.values():
            torch._foreach_copy_(targets, sources)
        for scale_group in self.groups.values():
            scale_group.run()  # what fails here keeps its scale, and fails again
        # Written once, with the same bits where nothing was staged since: another thread may be
        # evaluating.
        for targets, sources in self._results.values():
            torch._foreach_copy_(targets, sources)
        return True


class NextScales:
    """Forward scales that the next forward will cast with, as far as this rank can know.

    An update that takes a collective may give others, as may a forward that records before it.
    """

    def __init__(self, modules: Sequence[ModuleFP8]) -> None:
        """Groups the tensors of the modules whose scales can be computed in advance."""
        self._groups: dict[tuple, ScaleGroup] = {}
        self._scales: dict[int, tuple[torch.Tensor, int]] = {}  # with the recipe's interval
        self._copied: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for module in modules:
            state, recipe = module.state, module.state.recipe
            if recipe is None or recipe.uses_callables or state.device.type == "meta":
                continue
            sources = [state.scale_fwd, state.amax_history_fwd, state.scale_inv_fwd]
            made = [torch.empty_like(source) for source in sources]
            copied = self._copied.setdefault(state.device, ([], []))
            copied[0].extend(made)
            copied[1].extend(sources)
            limits = formats_of(recipe.fp8_format, state.device)
            group = _group_of(self._groups, state.device, recipe, False)
            group.add(module, (made[1], made[0], made[2], limits.max_fwd))
            self._scales[module.number] = made[0], recipe.interval

    def run(self) -> None:
        """Computes the scales anew."""
        for targets, sources in self._copied.values():
            torch._foreach_copy_(targets, sources)
        for scale_group in self._groups.values():
            scale_group.run()  # what fails here keeps its scale

    def of(self, module: ModuleFP8, slot: int) -> torch.Tensor:
        """Returns the scale of a forward slot, fp32 ``[1]``."""
        state = module.state
        group, known = state.sync.amax_group, self._scales.get(module.number)
        scales = state.scale_fwd
        if known is not None and group is not None and group.pending >= known[1]:
            scales = known[0]
        return scales[slot : slot + 1]


def next_scales(renew: bool) -> NextScales:
    """Returns the process's ``NextScales``, computed anew if ``renew``, or if a module changed."""
    with update_lock, torch.inference_mode(False), torch.no_grad():
        plan = registry.plans.get(NextScales)
        if plan is None:
            allocated = [m for m in registry.living() if m.state.allocated]
            plan = registry.plans[NextScales] = NextScales(allocated)
            renew = True
        if renew:
            plan.run()
        return plan


def _is_local(amax_group: AmaxGroup | None, recipe: DelayedScaling) -> bool:
    """Returns True if an update of ``amax_group``, None before any forward, needs no other rank."""
    if amax_group is None:
        return not recipe.reduce_amax or world_size(None) == 1
    return not amax_group.reduces or world_size(amax_group.group) == 1


@contextlib.contextmanager
def preserved_fp8_state() -> Iterator[None]:
    """Context manager that restores the FP8 state of all modules, and its clocks, at its end.

    FP8 modules constructed inside must be deleted before the end. Their places in the collective of
    updates are given up, so that this rank agrees with ranks that did not enter such a block.
    """
    with update_lock:
        kept = [tensor for member in registry.living() for tensor in _tensors(member.state)]
        kept += nonfinite_counts()
        values = [tensor.clone() for tensor in kept]
        due = [(member.state, member.state.first_steps.still_due()) for member in registry.living()]
        clocks, training = amax_groups.clocks, amax_groups.training
        current, recipe = amax_groups.current, amax_groups.recipe
        numbers = len(registry.sizes)
    try:
        yield  # without the lock, which a backward may want in another thread
    finally:
        with update_lock:
            with torch.inference_mode(False), torch.no_grad():
                for tensor, value in zip(kept, values, strict=True):
                    tensor.copy_(value)
            for state, flags in due:
                state.first_steps.set(flags)
            amax_groups.clocks, amax_groups.training = clocks, training
            amax_groups.current, amax_groups.recipe = current, recipe
            gc.collect()  # modules are parts of cycles
            registry.forget_dead(numbers)


def _tensors(state: object) -> list[torch.Tensor]:
    """Returns the tensors of a module's FP8 state, none if they do not exist."""
    if not state.allocated or state.device.type == "meta":  # type: ignore[attr-defined]
        return []
    return [getattr(state, name) for name in TENSORS]
