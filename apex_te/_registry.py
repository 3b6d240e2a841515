"""All FP8 states of the process: the order in which their scales move, and interned recipes."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .recipe import Recipe
    from .scale_update import UpdatePlan
    from .state import FP8State

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
        self.pending = 0
        self._recipe: Recipe | None = None  # of the last region
        self.group: Any = None  # that the last region named; None is the whole world
        self._states: dict[int, weakref.ref[FP8State]] = {}
        self._next = 0
        self._sizes: list[int] = []  # slots of every state there ever was
        self._labels: list[str] = []  # and whose it was
        self._plan: UpdatePlan | None = None
        # Reentrant: the garbage collector may drop a state while the lock is held.
        self._lock = threading.RLock()

    def add(self, state: FP8State) -> None:
        """Register ``state``, which gets its number; it leaves by itself when it dies."""
        with self._lock:
            key = self._next
            self._next += 1
            self._sizes.append(state.slots)
            self._labels.append(state.label)

            def dropped(_: Any, key: int = key) -> None:
                self._states.pop(key, None)
                self._plan = None

            self._states[key] = weakref.ref(state, dropped)
            self._plan = None
            state.number = key

    def relabel(self, state: FP8State) -> None:
        """The label of ``state`` is another one."""
        self._labels[state.number] = state.label
        self._plan = None

    def state(self, number: int) -> FP8State:
        """The living state with this number."""
        state = self._states[number]()
        assert state is not None
        return state

    def living(self) -> list[FP8State]:
        """The states that still exist, in the order of their construction."""
        return [s for s in (ref() for ref in list(self._states.values())) if s is not None]

    def changed(self) -> None:
        """A state was allocated, moved or given another recipe."""
        self._plan = None

    def enter_region(self, recipe: Any, group: Any, may_update: bool) -> None:
        """Count a recorded region; before that, update once ``recipe.interval`` have passed."""
        if not recipe.keeps_state:
            return
        with self._lock:
            self.group = group
            if may_update:
                self.catch_up(recipe, group)
            self.pending += 1
            if recipe.first_step == "current" or recipe is not self._recipe:
                self._recipe = recipe
                key = intern(recipe)[0]
                for state in self.living():
                    state.follow(key, recipe)

    def catch_up(self, recipe: Any, group: Any) -> None:
        """Update as entering a region of ``recipe`` would."""
        with self._lock:
            if recipe.keeps_state and self.pending >= recipe.interval:
                self._update(recipe, group)

    def flush(self, group: Any) -> None:
        """Apply the pending update, if any."""
        with self._lock:
            if self.pending:
                self._update(None, group)

    def _update(self, recipe: Any, group: Any) -> None:
        plan = self._plan
        if plan is None:
            from .scale_update import UpdatePlan

            states = [s for s in self.living() if s.allocated]
            for state in states:
                if state.recipe is None:  # loaded, with functions that no file can hold
                    state.recipe = recipe
            plan = self._plan = UpdatePlan(states, self._sizes, self._labels)
        last = self._recipe if recipe is None else recipe
        plan.run(group, getattr(last, "reduce_amax", True))
        self.pending = 0


registry = Registry()
