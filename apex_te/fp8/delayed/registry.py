"""All FP8 states of the process: the order in which their scales move, and interned recipes."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ...comm.groups import ranks_of
from .reduce_group import AmaxGroup, scope_key

if TYPE_CHECKING:
    from ...recipe import Recipe
    from .state import FP8State
    from .update import PendingScales, UpdateFailure

__all__ = ["Registry", "intern", "recipe_named", "registry", "traced_key"]

_interned: dict[Recipe, tuple[str, Recipe]] = {}
_by_key: dict[str, Recipe] = {}


def intern(recipe: Recipe) -> tuple[str, Recipe]:
    """A name for ``recipe``, the same for equal ones, and the first of them."""
    found = _interned.get(recipe)
    if found is None:
        key = f"recipe{len(_interned)}"
        found = _interned[recipe] = (key, recipe)
        _by_key[key] = recipe
    return found


def traced_key(recipe: Recipe) -> str:
    """The name of ``recipe`` in code that torch.compile traces, which its values become part of."""
    kind = type(recipe)
    values = {name: getattr(recipe, name) for name in _field_names(kind).split()}
    return _key_of_values(kind, **values)


def _field_names(kind: type) -> str:
    return " ".join(field.name for field in dataclasses.fields(kind))


def _key_of_values(kind: Any, /, **values: Any) -> str:
    return intern(kind(**values))[0]


# Run while torch.compile traces, as by torch.compiler.assume_constant_result, but without the
# second that importing it takes.
_field_names._dynamo_marked_constant = True  # type: ignore[attr-defined]
_key_of_values._dynamo_marked_constant = True  # type: ignore[attr-defined]


def recipe_named(key: str) -> Recipe:
    """The recipe that ``intern`` gave the name ``key``."""
    return _by_key[key]


class Registry:
    """All states of the process, in the order of their construction, and the regions pending."""

    def __init__(self) -> None:
        self.scope: AmaxGroup | None = None  # of the last region
        self._recipe: Recipe | None = None  # and its recipe
        self._scopes: list[AmaxGroup] = []
        self.several = False  # scopes
        self._pending = 0  # where scopes to come begin
        self._states: dict[int, weakref.ref[FP8State]] = {}
        self._preview: PendingScales | None = None
        self._failures: dict[Recipe, UpdateFailure] = {}  # that nobody was told of
        self._next = 0
        self._sizes: list[int] = []  # slots of every state there ever was
        self._labels: list[str] = []  # and whose it was
        # Reentrant: the garbage collector may drop a state while the lock is held.
        self._lock = threading.RLock()

    @property
    def pending(self) -> int:
        """Regions since the last update, of the scope that has most; set it of all."""
        return max((scope.pending for scope in self._scopes), default=self._pending)

    @pending.setter
    def pending(self, count: int) -> None:
        self.clocks = (count, [count] * len(self._scopes))

    @property
    def clocks(self) -> tuple[int, list[int]]:
        """The regions pending of scopes to come and of each one, to be put back."""
        return self._pending, [scope.pending for scope in self._scopes]

    @clocks.setter
    def clocks(self, counts: tuple[int, list[int]]) -> None:
        self._pending, known = counts
        for scope, count in itertools.zip_longest(self._scopes, known, fillvalue=self._pending):
            scope.pending = count  # type: ignore[union-attr]

    def add(self, state: FP8State) -> None:
        """Register ``state``, which gets its number; it leaves by itself when it dies.

        Its slots stay: on another rank it may still live.
        """
        with self._lock:
            key = self._next
            self._next += 1
            self._sizes.append(state.slots)
            self._labels.append(state.label)

            def dropped(_: Any, key: int = key) -> None:
                self._states.pop(key, None)
                self.changed()

            self._states[key] = weakref.ref(state, dropped)
            self.changed()
            state.number = key

    def relabel(self, state: FP8State) -> None:
        """The label of ``state`` is another one."""
        self._labels[state.number] = state.label
        self.changed()

    def state(self, number: int) -> FP8State:
        """The living state with this number."""
        state = self._states[number]()
        assert state is not None
        return state

    def living(self) -> list[FP8State]:
        """The states that still exist, in the order of their construction."""
        return [s for s in (ref() for ref in list(self._states.values())) if s is not None]

    def changed(self) -> None:
        """A state was allocated, moved or given another recipe or scope."""
        for scope in self._scopes:
            scope.plan = None
        self._preview = None

    def scope_of(self, recipe: Any, group: Any) -> AmaxGroup:
        """The scope of a region, which from now on is reduced over ``group``."""
        last = self.scope
        if last is not None and last.group is group and last.reduces == recipe.reduce_amax:
            return last
        key = scope_key(recipe, group)
        scope = next((s for s in self._scopes if s.key == key), None)
        if scope is None:
            scope = next((s for s in self._scopes if s.key is None), None) or self._add_scope()
            scope.key = key
        scope.group = group if scope.reduces else None
        return scope

    def _add_scope(self) -> AmaxGroup:
        scope = AmaxGroup(len(self._scopes), self._pending)
        self._scopes.append(scope)
        self.several = len(self._scopes) > 1
        return scope

    def enter_region(self, recipe: Any, group: Any, may_update: bool) -> AmaxGroup | None:
        """Count a recorded region; before that, update once ``recipe.interval`` have passed.

        Raises:
            The error of an update of states with this recipe, once; the region is not counted.
        """
        if not recipe.keeps_state:
            return None
        with self._lock:
            scope = self.scope = self.scope_of(recipe, group)
            if may_update:
                self.update_if_due(recipe, scope)
            self._raise_failure(recipe)
            # Where none is pending, what was trained before is done.
            scope.training = may_update or (scope.training and scope.pending > 0)
            scope.pending += 1
            if recipe.first_step == "current" or recipe is not self._recipe:
                self._recipe = recipe
                key = intern(recipe)[0]
                for state in self.living():
                    state.follow(key, recipe)
        return scope

    def leave_calibration(self, recipe: Any, scope: AmaxGroup) -> None:
        """Update on leaving a calibrating region without gradients.

        Not where regions with gradients are pending: their backward may be to come, and would find
        other scales than its forward had.
        """
        with self._lock:
            if scope.pending and not scope.training:
                self._update(recipe, scope)
                self._raise_failure(recipe)

    def preview(self, recipe: Any) -> bool:
        """Compute the scales that pending updates will give, for an evaluation to read.

        The states stay as they are. Returns False where no update is pending that this process
        could make alone: one over several ranks would be a collective that the others may not be
        in.
        """
        if not self._pending and not any(scope.pending for scope in self._scopes):
            return False
        # Inference tensors could not be written by a later evaluation outside of inference mode.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._preview is None:
                from .update import PendingScales

                allocated = [s for s in self.living() if s.allocated]
                self._preview = PendingScales(allocated, recipe)
            return self._preview.run()

    def update_if_due(self, recipe: Any, scope: AmaxGroup) -> None:
        """Update as entering a region of ``recipe`` in ``scope`` would."""
        with self._lock:
            if recipe.keeps_state and scope.pending >= recipe.interval:
                self._update(recipe, scope)

    def flush(self, group: Any) -> None:
        """Apply pending updates: of ``group``, or each scope's.

        Errors: ValueError for a group of no region while others are pending; the error of a state
        that could not be updated, after all others.
        """
        with self._lock:
            waiting = [scope for scope in self._scopes if scope.pending]
            if group is not None and waiting:
                ranks = ranks_of(group)
                wanted = ("world" if ranks == ranks_of(None) else ranks, "own", None)
                known = any(scope.key in (wanted[0], None) for scope in self._scopes)
                if not known and any(scope.reduces for scope in waiting):
                    raise ValueError(
                        "flush_fp8_state: group must be the fp8_group of regions that have run "
                        f"(None: each one's own), got ranks {list(ranks)}"
                    )
                waiting = [scope for scope in waiting if scope.key in wanted]
            for scope in waiting:
                if scope.key is None:
                    scope.group = group
                self._update(None, scope)
            for recipe in list(self._failures):
                self._raise_failure(recipe)

    def loaded(self, state: FP8State, number: int | None, pending: int) -> None:
        """``state`` was saved when it was in scope ``number``, with ``pending`` regions there."""
        if number is None:
            self.pending = pending
        else:
            while number >= len(self._scopes):
                self._add_scope()
            if state.sharing.scope is None:
                state.sharing.scope = self._scopes[number]
            state.sharing.scope.pending = pending
        self._recipe = None  # so that states of compiled code follow the next region's
        self.changed()

    def unpickled(self, state: FP8State, number: int | None, pending: int) -> None:
        """``state`` is a copy of one in scope ``number``, with ``pending`` regions there.

        In a process that has trained itself, the regions pending there count as well.
        """
        if number is not None and number < len(self._scopes):
            pending = max(pending, self._scopes[number].pending)
        elif number is None:
            pending = max(pending, self.pending)
        self.loaded(state, number, pending)

    def _update(self, recipe: Any, scope: AmaxGroup) -> None:
        plan = scope.plan
        if plan is None:
            from .update import UpdatePlan

            living = [s for s in self.living() if s.allocated]
            states = [s for s in living if s.sharing.scope in (None, scope)]
            for state in states:
                if state.recipe is None:  # loaded, with functions that no file can hold
                    state.recipe = recipe
            plan = scope.plan = UpdatePlan(scope, states, self._sizes, self._labels)
        failures = plan.run()
        scope.pending = 0
        for failure in failures:
            self._failures[failure.recipe] = failure
            if recipe is not None and failure.recipe != recipe:
                # The region that is entered here may be another model's.
                warnings.warn(
                    f"{failure.error()}; the next region with that recipe raises this",
                    RuntimeWarning,
                    stacklevel=5,
                )
        if failures:
            self.changed()

    def _raise_failure(self, recipe: Recipe) -> None:
        failure = self._failures.pop(recipe, None) if self._failures else None
        if failure is not None:
            raise failure.error()


registry = Registry()
