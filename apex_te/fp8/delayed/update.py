"""The scale update of delayed scaling: reduce the staged amaxes over ranks, then new scales."""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ... import runtime
from ...comm.collectives import world_size
from ...ops.amax_scale_update import amax_scale_update
from ...recipe import DelayedScaling
from ..formats import formats_of
from .amax_allreduce import RankReduction, Slots

if TYPE_CHECKING:
    from ...recipe import Recipe
    from .reduce_group import AmaxGroup, ScaleSync
    from .state import FP8State

__all__ = ["PendingScales", "UpdateFailure", "UpdatePlan", "nonfinite_count", "update_scales"]

Tensors = Sequence[torch.Tensor]

_FLT_MAX = torch.finfo(torch.float32).max
_nonfinite: dict[torch.device, torch.Tensor] = {}


def nonfinite_count(device: torch.device | str = "cpu") -> torch.Tensor:
    """Number of amaxes that were Inf or NaN at an update: int32 ``[1]``, living on ``device``."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    count = _nonfinite.get(device)
    if count is None:
        with torch.inference_mode(False):
            count = _nonfinite[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return count


def update_scales(
    histories: Tensors,
    scales: Tensors,
    scale_invs: Tensors,
    fp8_max: list[float],
    recipe: DelayedScaling,
    nonfinite: torch.Tensor | None,
) -> None:
    """Roll the histories ``[length, slots]`` and set ``scales`` and ``scale_invs`` ``[slots]``."""
    algo = recipe.amax_compute_algo
    if isinstance(algo, str) and not recipe.uses_callables:
        amax_scale_update(
            histories,
            scales,
            scale_invs,
            fp8_max,
            margin=recipe.margin,
            algo=algo,
            pow2=recipe.scaling_factor_compute_algo == "pow2",
            nonfinite_count=nonfinite,
        )
        return
    with torch.no_grad():
        for slots in zip(histories, scales, scale_invs, fp8_max, strict=True):
            _commit(_computed(*slots, recipe), nonfinite)


class _Computed(NamedTuple):
    """An update of one history by a user's functions that is not written yet."""

    history: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor
    last: torch.Tensor
    new: torch.Tensor
    keep: torch.Tensor


def _computed(
    history: torch.Tensor,
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    fp8_max: float,
    recipe: DelayedScaling,
) -> _Computed:
    """One history's new scales, with the user's functions and the guards of the kernel."""
    last = history[0].clone()
    algo = recipe.amax_compute_algo
    if callable(algo):
        amax = _result("amax_compute_algo", algo(history.clone()), last)
    else:
        amax = last if algo == "most_recent" else history.amax(0)
    new = _new_scale(amax, scale, fp8_max, recipe)
    new = torch.where(torch.isinf(new), torch.full_like(new, _FLT_MAX), new)
    valid = torch.isfinite(last) & (last != 0)
    keep = ~valid | ~torch.isfinite(amax) | (amax <= 0) | ~(new > 0)
    keep |= ~torch.isfinite(torch.reciprocal(new))
    return _Computed(history, scale, scale_inv, last, new, keep)


def _commit(update: _Computed, nonfinite: torch.Tensor | None) -> None:
    """Write what ``_computed`` found."""
    history, scale, scale_inv, last, new, keep = update
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
    algo = recipe.scaling_factor_compute_algo
    if callable(algo):
        new = algo(amax.clone(), scale.clone(), fp8_max, recipe)
        return _result("scaling_factor_compute_algo", new, amax)
    # Not number / tensor, which torch computes as a reciprocal and a product, rounding twice.
    if algo == "pow2":
        ratio = (torch.full_like(amax, fp8_max) / amax).clamp(max=_FLT_MAX)
        power = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)
        return (power * 2.0**-recipe.margin).clamp(max=2.0**127)
    return torch.full_like(amax, fp8_max * 2.0**-recipe.margin) / amax


def _result(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    """Check what a user's function returned."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"DelayedScaling: {name} must return a tensor, got {type(value).__name__}")
    if value.shape != like.shape:
        raise ValueError(
            f"DelayedScaling: {name} must return shape {list(like.shape)}, got {list(value.shape)}"
        )
    return value.to(like)


class UpdateFailure(NamedTuple):
    """States whose update failed: their scales stayed, what they had staged was dropped."""

    recipe: DelayedScaling
    modules: list[str]
    sharings: list[ScaleSync]
    cause: Exception  # without traceback, which would keep the callers' models alive
    where: str

    def error(self) -> Exception:
        """The exception to raise, of the cause's type if that is one of Python's plain ones."""
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


class ScaleGroup:
    """Slots on one device that one call updates, of states with equal recipes."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self.recipe = recipe
        self.histories: list[torch.Tensor] = []
        self.scales: list[torch.Tensor] = []
        self.scale_invs: list[torch.Tensor] = []
        self.fp8_max: list[float] = []
        self._owners: list[tuple[weakref.ref[FP8State], int]] = []  # a state, where it ends
        # Those whose last update failed, which would fail again with nothing staged.
        self._suspects: set[int] = set()
        self._prepared: tuple[Tensors, Tensors, Tensors] | None = None

    def add(
        self, state: FP8State, *slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]
    ) -> None:
        """Take in slots of ``state``: histories, scales, their inverses and largest codes."""
        for history, scale, scale_inv, fp8_max in slots:
            self.histories.append(history)
            self.scales.append(scale)
            self.scale_invs.append(scale_inv)
            self.fp8_max.append(fp8_max)
        if state.update_failed:
            self._suspects.add(len(self._owners))
        self._owners.append((weakref.ref(state), len(self.histories)))

    def run(self, nonfinite: torch.Tensor | None) -> UpdateFailure | None:
        """Update every slot; a state for which that raises keeps its scales, none stops another."""
        everyone = range(len(self._owners))
        if not self.recipe.uses_callables:
            if self._suspects and not any(map(self._has_staged, everyone)):
                return None
            try:
                update_scales(*self._lists(), self.fp8_max, self.recipe, nonfinite)
            except Exception as error:
                return self._failure(everyone, error)
            self._succeeded(everyone)
            return None
        failed: list[int] = []
        cause: Exception | None = None
        with torch.no_grad():
            for index in everyone:
                if index in self._suspects and not self._has_staged(index):
                    continue
                try:  # all of a state first, so that it moves as a whole
                    updates = [
                        _computed(
                            self.histories[i], self.scales[i], self.scale_invs[i], self.fp8_max[i],
                            self.recipe,
                        )
                        for i in self._slots(index)
                    ]  # fmt: skip
                except Exception as error:
                    failed.append(index)
                    cause = cause or error
                else:
                    for update in updates:
                        _commit(update, nonfinite)
                    self._succeeded((index,))
        return None if cause is None else self._failure(failed, cause)

    def _slots(self, index: int) -> range:
        """Returns the range of the entries that belong to a state."""
        return range(self._owners[index - 1][1] if index else 0, self._owners[index][1])

    def _has_staged(self, index: int) -> bool:
        """Returns True if a state staged an amax since its update failed; waits for the device."""
        histories = [self.histories[i] for i in self._slots(index)]
        if histories[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        return any(bool(history[0].any()) for history in histories)

    def _succeeded(self, indices: Sequence[int]) -> None:
        for index in self._suspects.intersection(indices):
            state = self._owners[index][0]()
            if state is not None:
                state.update_failed = False
            self._suspects.discard(index)

    def _failure(self, failed: Sequence[int], cause: Exception) -> UpdateFailure:
        """Drop what the states of ``failed`` have staged, and say which they are."""
        modules, sharings = [], []
        for index in failed:
            with torch.no_grad():
                for i in self._slots(index):
                    self.histories[i][0].zero_()
            state = self._owners[index][0]()
            if state is not None:
                state.update_failed = True
                modules.append(state.described())
                sharings.append(state.sharing)
        where = traceback.extract_tb(cause.__traceback__)[-1]
        cause = cause.with_traceback(None)
        at = f"{where.filename}:{where.lineno}"
        return UpdateFailure(self.recipe, modules, sharings, cause, at)

    def _lists(self) -> tuple[Tensors, Tensors, Tensors]:
        """Histories, scales and their inverses, prepared once for the kernel's later calls."""
        if torch.compiler.is_compiling():
            return self.histories, self.scales, self.scale_invs
        if self._prepared is None:
            prepare = runtime.tensor_list
            self._prepared = (
                prepare(self.histories), prepare(self.scales), prepare(self.scale_invs)
            )  # fmt: skip
        return self._prepared


class ScaleGroups(dict[tuple, ScaleGroup]):
    """Groups by device and by what of a recipe an update depends on."""

    def of(self, device: torch.device, recipe: DelayedScaling) -> ScaleGroup:
        """The group of a state on ``device`` whose amaxes were staged under ``recipe``."""
        key: tuple = (device, recipe.margin, recipe.amax_compute_algo)
        key += (recipe.scaling_factor_compute_algo,)
        if recipe.uses_callables:
            key += (recipe,)
        group = self.get(key)
        if group is None:
            group = self[key] = ScaleGroup(recipe)
        return group

    def run(self, nonfinite: bool) -> list[UpdateFailure]:
        """Update all groups, counting amaxes that are ``nonfinite`` or not; returns what failed."""
        found = [
            group.run(nonfinite_count(device) if nonfinite else None)
            for (device, *_), group in self.items()
        ]
        return [failure for failure in found if failure is not None]


class UpdatePlan:
    """The tensors of a scope's states, grouped once and reused until a state changes."""

    def __init__(
        self,
        scope: AmaxGroup,
        states: Sequence[FP8State],
        sizes: Sequence[int],
        labels: Sequence[str],
    ) -> None:
        """``sizes``, ``labels``: slots and owner of every state of the process by its number."""
        self.scope = scope
        self.groups = ScaleGroups()
        self.sizes = tuple(sizes)
        self.labels = tuple(labels)
        self.reduced: list[Slots] = []
        self.reduction: RankReduction | None = None
        self.finished: list[list[bool]] = []
        self._sharing: list[tuple[ScaleSync, bool]] = []
        self._noted = False  # what the update means for them
        starts = [0, *itertools.accumulate(sizes)]
        for state in states:
            recipe = state.recipe
            if recipe is None or state.device.type == "meta":
                continue
            self._sharing.append((state.sharing, scope.reduces and recipe.reduce_amax))
            if recipe.reduce_amax:
                at, forward = starts[state.number], state.amax_history_fwd
                self.reduced.append(Slots(at, forward, state.scale_fwd, state.scale_inv_fwd))
                at += forward.shape[1]
                self.reduced.append(
                    Slots(at, state.amax_history_bwd, state.scale_bwd, state.scale_inv_bwd)
                )
            if recipe.first_step == "scale_one":
                self.finished.append(state.first_due)
            self._add(state, recipe)

    def _add(self, state: FP8State, recipe: DelayedScaling) -> None:
        limits = formats_of(recipe.fp8_format, state.device)
        self.groups.of(state.device, recipe).add(
            state,
            (state.amax_history_fwd, state.scale_fwd, state.scale_inv_fwd, limits.max_fwd),
            (state.amax_history_bwd, state.scale_bwd, state.scale_inv_bwd, limits.max_bwd),
        )

    def run(self) -> list[UpdateFailure]:
        """Reduce over the scope's ranks, if it does that, then update every slot.

        Returns:
            What could not be updated.
        """
        scope, equalised = self.scope, False
        if scope.reduces and world_size(scope.group) > 1:
            if self.reduction is None:
                unsure = any(reduced and not s.sure_in(scope) for s, reduced in self._sharing)
                device = _device_of(scope.group)
                self.reduction = RankReduction(
                    self.sizes, self.labels, self.reduced, device, unsure
                )
            equalised = self.reduction.run(scope.group)
        failures = self.groups.run(nonfinite=True)
        for due in self.finished:
            due[:] = [False] * len(due)
        if equalised or not self._noted:
            for sharing, reduced in self._sharing:
                sharing.updated(scope, reduced, equalised)
            self._noted = True
        for sharing in (sharing for failure in failures for sharing in failure.sharings):
            sharing.loaded(None)  # other ranks may have moved theirs
        return failures


class PendingScales:
    """Forward scales as the next update will make them, in tensors that only evaluation reads.

    So an evaluation between two steps, or between a forward and its backward, reads scales of the
    last amaxes and changes nothing. A state whose update takes a collective keeps its scales there.
    """

    def __init__(self, states: Sequence[FP8State], recipe: Recipe) -> None:
        """``recipe`` stands for the one of states that were loaded without theirs."""
        self.groups = ScaleGroups()
        # Copies to work on, and what is made of them, by device: targets and sources.
        self._copied: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._results: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._scopes: list[AmaxGroup | None] = []  # of the states that can be updated here
        for state in states:
            if state.device.type == "meta":
                continue
            chosen = recipe if state.recipe is None else state.recipe
            scale = torch.empty_like(state.scale_fwd)
            self._results.setdefault(state.device, ([], []))[0].append(state.pending_scale_fwd)
            self._results[state.device][1].append(scale)
            targets, sources = self._copied.setdefault(state.device, ([], []))
            targets.append(scale)
            sources.append(state.scale_fwd)
            scope = state.sharing.scope
            if not isinstance(chosen, DelayedScaling) or not _is_local(scope, chosen):
                continue
            history = torch.empty_like(state.amax_history_fwd)
            inverse = torch.empty_like(state.scale_inv_fwd)
            targets += [history, inverse]
            sources += [state.amax_history_fwd, state.scale_inv_fwd]
            limits = formats_of(chosen.fp8_format, state.device)
            self.groups.of(state.device, chosen).add(
                state, (history, scale, inverse, limits.max_fwd)
            )
            self._scopes.append(scope)

    def run(self) -> bool:
        """Compute the scales; False, and nothing is done, where none is pending that could be."""
        if not any(scope is None or scope.pending for scope in self._scopes):
            return False
        for targets, sources in self._copied.values():
            torch._foreach_copy_(targets, sources)
        self.groups.run(nonfinite=False)  # what fails here keeps its scale, and fails again
        # Written once, with the same bits where nothing was staged since: another thread may be
        # evaluating.
        for targets, sources in self._results.values():
            torch._foreach_copy_(targets, sources)
        return True


def _is_local(scope: AmaxGroup | None, recipe: DelayedScaling) -> bool:
    """Returns True if an update of ``scope`` needs no other rank."""
    if scope is None:
        return not recipe.reduce_amax or world_size(None) == 1
    return not scope.reduces or world_size(scope.group) == 1


def _device_of(group: Any) -> torch.device:
    """Where a rank without FP8 modules takes part in the collectives of ``group``."""
    if torch.distributed.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
