"""All FP8 modules of the process in the order of their construction, and interned recipes."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ...comm.groups import pipeline_stage

if TYPE_CHECKING:
    from ...recipe import Recipe

__all__ = ["Registry", "intern", "label_of", "number_layer", "recipe_named", "registry",
           "traced_key"]  # fmt: skip

_interned: dict[Recipe, tuple[str, Recipe]] = {}
_by_key: dict[str, Recipe] = {}


def intern(recipe: Recipe) -> tuple[str, Recipe]:
    """Gives equal recipes one name.

    Returns:
        The name, and the first of the equal recipes.
    """
    found = _interned.get(recipe)
    if found is None:
        key = f"recipe{len(_interned)}"
        found = _interned[recipe] = (key, recipe)
        _by_key[key] = recipe
    return found


def recipe_named(key: str) -> Recipe:
    """Returns the recipe that ``intern`` gave the name ``key``."""
    return _by_key[key]


def traced_key(recipe: Recipe) -> str:
    """Returns the interned name of a recipe whose values become part of code being traced."""
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


class Registry:
    """The ``ModuleFP8`` objects of the process, held weakly and numbered.

    Attributes:
        sizes, labels: slots and label of every member there ever was, by its number. Those of dead
            ones stay, because they may still live on another rank.
        plans: what updates have made of the members, to be used again; dropped when a member
            comes, goes, or gets other tensors, another recipe or another amax group.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.labels: list[str] = []
        self.plans: dict[Any, Any] = {}
        self._members: dict[int, weakref.ref[Any]] = {}
        # Reentrant: the garbage collector may drop a member while the lock is held.
        self._lock = threading.RLock()

    def add(self, member: Any) -> None:
        """Numbers a new ``ModuleFP8``, which leaves by itself when it dies."""
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
        """Returns the living ``ModuleFP8`` with this number."""
        member = self._members[number]()
        assert member is not None
        return member

    def living(self) -> list[Any]:
        """Returns each ``ModuleFP8`` that still exists, in the order of construction."""
        return [m for m in (ref() for ref in list(self._members.values())) if m is not None]

    def changed(self) -> None:
        """Drops the plans, which a change of a member has made out of date."""
        self.plans.clear()


registry = Registry()


def label_of(owner: Any) -> str:
    """Returns a module's first label, equal on all ranks: its class and its pipeline stage."""
    return "" if owner is None else _label(owner, "stage", pipeline_stage())


def number_layer(layer: torch.nn.Module, number: int | None, kind: str = "layer") -> None:
    """Labels the FP8 modules in ``layer`` with its number, or its stage's; None leaves them."""
    if number is None:
        return
    for module in layer.modules():
        member = getattr(module, "_fp8", None)
        if member is not None:
            registry.relabel(member, _label(module, kind, number))


def _label(module: Any, kind: str, number: int | None) -> str:
    name = type(module).__name__
    return name if number is None else f"{name} of {kind} {number}"
