"""fp8_autocast inside of compiled code: ops of the graph move the scales when that code runs.

What a graph does to its tensors may be done to copies, which are written back in the end. So the
graph says which tensors of a state it uses: they take over what entering the region made of the
state, and hand over what was staged before the next region is entered. Gradients need neither: a
backward reads and stages what there is when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...ops.registration import register
from .registry import recipe_named, registry

if TYPE_CHECKING:
    from .state import FP8State

__all__ = ["enter_traced_region", "follow_traced_region", "leave_traced_region"]

# Written and read by the ops, which keeps them in order.
_token = torch.zeros(1, dtype=torch.int32, device="cpu")


def enter_traced_region(key: str, group: Any, may_update: bool) -> None:
    """What ``registry.enter_region`` does, each time that the code being traced runs."""
    name = None if group is None else group.group_name
    _catch_up(key, name, may_update)
    torch.ops.apex_te.enter_region(_token, key, name, may_update)


def follow_traced_region(
    used: list[tuple[FP8State, str]] | None, state: FP8State, key: str
) -> None:
    """Give what the graph uses of ``state`` the values that it has in the region, once.

    ``used`` None: the region was entered before the graph, which uses the state as it is; layers
    that share its code may run in regions of different groups.
    """
    if used is None:
        if registry.several:
            torch.ops.apex_te.note_region(_token, state.handle, key)
        return
    if not state.staging(key) or any(s is state and k == key for s, k in used):
        return
    used.append((state, key))
    torch.ops.apex_te.follow_region(_token, state.handle, state.staging(key), key)


def leave_traced_region(used: list[tuple[FP8State, str]]) -> None:
    """Give the states that the graph has used what it staged."""
    for state, key in used:
        torch.ops.apex_te.leave_region(_token, state.handle, state.staging(key), key)


def _catch_up(key: str, group: str | None, may_update: bool) -> bool:
    """Update before the modules that are traced adapt their scales to another recipe."""
    recipe: Any = recipe_named(key)
    if recipe.keeps_state:
        scope = registry.scope = registry.scope_of(recipe, _group(group))
        if may_update and any(s.recipe not in (None, recipe) for s in registry.living()):
            registry.update_if_due(recipe, scope)
    return True


# What torch.compiler.assume_constant_result does, without the second that importing it takes.
_catch_up._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _group(name: Any) -> Any:
    if name is None:
        return None
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def _enter(token: torch.Tensor, key: str, group: str | None, may_update: bool) -> None:
    if torch._C._current_graph_task_id() == -1:  # else a recomputation
        registry.enter_region(recipe_named(key), _group(group), may_update)


def _follow(
    token: torch.Tensor, handle: torch.Tensor, tensors: Sequence[torch.Tensor], key: str
) -> None:
    state = registry.state(int(handle))
    if state.sharing.scope is not registry.scope:
        state.enter(registry.scope)
    _copy(tensors, state.staging(key))


def _note(token: torch.Tensor, handle: torch.Tensor, key: str) -> None:
    if recipe_named(key).keeps_state and torch._C._current_graph_task_id() == -1:
        registry.state(int(handle)).enter(registry.scope)


def _leave(
    token: torch.Tensor, handle: torch.Tensor, tensors: Sequence[torch.Tensor], key: str
) -> None:
    _copy(registry.state(int(handle)).staging(key), tensors)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target.data_ptr() != source.data_ptr():
            with torch.no_grad():
                target.copy_(source)


register(
    "enter_region(Tensor(a!) token, str key, str? group, bool may_update) -> ()",
    _enter,
)
register(
    "note_region(Tensor(a!) token, Tensor handle, str key) -> ()",
    _note,
)
register(
    "follow_region(Tensor token, Tensor handle, Tensor(a!)[] tensors, str key) -> ()",
    _follow,
)
register(
    "leave_region(Tensor(a!) token, Tensor handle, Tensor[] tensors, str key) -> ()",
    _leave,
)
