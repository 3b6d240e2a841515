"""All FP8 modules of the process, in the order of construction, and the recipes' keys."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ...comm.groups import pipeline_stage

if TYPE_CHECKING:
    from ...recipe import Recipe

_interned: dict[Recipe, tuple[str, Recipe]] = {}
_by_key: dict[str, Recipe] = {}
# The recipe object last asked for with its name, because hashing a recipe takes a while.
_last: tuple[Recipe, tuple[str, Recipe]] | None = None


def intern(recipe: Recipe) -> tuple[str, Recipe]:
    """Returns a process-wide name shared by all equal recipes, and the first of these recipes."""
    global _last
    last = _last
    if last is not None and last[0] is recipe:
        return last[1]
    found = _interned.get(recipe)
    if found is None:
        key = f"recipe{len(_interned)}"
        found = _interned[recipe] = (key, recipe)
        _by_key[key] = recipe
    _last = (recipe, found)
    return found


def recipe_named(key: str) -> Recipe:
    """Returns the recipe to which ``intern`` gave the name ``key``."""
    return _by_key[key]


def traced_key(recipe: Recipe) -> str:
    """Returns the interned name of a recipe, by code that torch.compile can trace."""
    kind = type(recipe)
    # Numbers are variables to torch.compile(dynamic=True); their digits are a text that it guards.
    values, integers, floats = {}, "", ""
    for name in _field_names(kind).split():
        value = getattr(recipe, name)
        if isinstance(value, float):
            floats += f"{name}={value.hex()} "
        elif isinstance(value, int) and not isinstance(value, bool):
            integers += f"{name}={float(value).hex()} "
        else:
            values[name] = value
    return _key_of_values(kind, integers, floats, **values)


def _field_names(kind: type) -> str:
    """Returns the names of a recipe class's fields, a constant for torch.compile."""
    return " ".join(field.name for field in dataclasses.fields(kind))


def _key_of_values(kind: Any, integers: str, floats: str, /, **values: Any) -> str:
    """Returns the name of ``kind(**values)``, a constant to torch.compile, from numbers as text."""
    for numbers, type_of in ((integers, int), (floats, float)):
        for number in numbers.split():
            name, _, digits = number.partition("=")
            values[name] = type_of(float.fromhex(digits))
    return intern(kind(**values))[0]


# Run while torch.compile traces, as by torch.compiler.assume_constant_result, but without the
# second that importing it takes.
_field_names._dynamo_marked_constant = True  # type: ignore[attr-defined]
_key_of_values._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Registry:
    """All ``ModuleFP8`` objects of the process, held weakly and numbered.

    Entries of dead objects in ``sizes`` and ``labels`` stay, because other ranks may still have
    these objects. ``plans`` caches what updates prepare, until a member is added, removed or
    changed.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.labels: list[str] = []
        self.plans: dict[Any, Any] = {}
        self._members: dict[int, weakref.ref[Any]] = {}
        # Reentrant: the garbage collector may drop a member while the lock is held.
        self._lock = threading.RLock()

    def add(self, member: Any) -> None:
        """Gives a new ``ModuleFP8`` its number; it is removed when it is garbage-collected."""
        with self._lock:
            key = len(self.sizes)
            self.sizes.append(member.num_slots)
            self.labels.append(member.label)

            def dropped(_: Any) -> None:
                self._members.pop(key, None)
                self.changed()

            self._members[key] = weakref.ref(member, dropped)
            self.changed()
            member.number = key

    def relabel(self, member: Any, label: str) -> None:
        """Gives ``member`` another label."""
        member.label = self.labels[member.number] = label
        self.changed()

    def member(self, number: int) -> Any:
        """Returns the ``ModuleFP8`` with this number, which must still exist."""
        member = self._members[number]()
        assert member is not None
        return member

    def living(self) -> list[Any]:
        """Returns the ``ModuleFP8`` objects that still exist, in the order of construction."""
        return [m for m in (ref() for ref in list(self._members.values())) if m is not None]

    def forget_dead(self, first: int) -> None:
        """Frees the numbers from ``first`` on if no living object has one of them."""
        with self._lock:
            if all(number < first for number in self._members):
                del self.sizes[first:], self.labels[first:]
                self.changed()

    def changed(self) -> None:
        """Drops the plans; called after a change of a member."""
        self.plans.clear()


registry = Registry()


def label_of(owner: Any) -> str:
    """Returns the label of a new module, equal on all ranks: its class and its pipeline stage."""
    return "" if owner is None else _label(owner, "stage", pipeline_stage())


def number_layer(layer: torch.nn.Module, number: int | None, kind: str = "layer") -> None:
    """Labels the FP8 modules in ``layer`` with a number; None leaves the labels as they are."""
    if number is None:
        return
    for module in layer.modules():
        member = getattr(module, "_fp8", None)
        if member is not None:
            registry.relabel(member, _label(module, kind, number))


def _label(module: Any, kind: str, number: int | None) -> str:
    """Returns the module's class name, with ``of <kind> <number>`` if ``number`` is not None."""
    name = type(module).__name__
    return name if number is None else f"{name} of {kind} {number}"
