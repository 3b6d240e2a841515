"""Entry and exit of ``fp8_autocast`` in compiled code, as ops of its graph that move the scales.

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
from .amax_group import amax_groups
from .registry import recipe_named, registry
from .update import enter_region, update_if_due

if TYPE_CHECKING:
    from ..module_fp8 import ModuleFP8

__all__ = ["enter_traced_region", "follow_traced_region", "leave_traced_region"]

# Written and read by the ops, which keeps them in order.
_token = torch.zeros(1, dtype=torch.int32, device="cpu")


def enter_traced_region(key: str, group: Any, may_update: bool) -> None:
    """Has ``enter_region`` run each time that the code being traced runs."""
    name = None if group is None else group.group_name
    _update_first(key, name, may_update)
    torch.ops.apex_te.enter_region(_token, key, name, may_update)


def follow_traced_region(
    used: list[tuple[ModuleFP8, str]] | None, module: ModuleFP8, key: str
) -> None:
    """Gives the tensors of ``module`` that the graph uses their values in the region, once.

    Args:
        used: the modules, with recipes, that the region's graph has used so far, to which this one
            is added. None: the region was entered before the graph, which uses the state as it is;
            layers that share its code may run in regions of different groups.
        module: the one that the graph uses now.
        key: the name of the region's recipe.
    """
    if used is None:
        if amax_groups.several:
            torch.ops.apex_te.note_region(_token, module.handle, key)
        return
    if not module.staging(key) or any(m is module and k == key for m, k in used):
        return
    used.append((module, key))
    torch.ops.apex_te.follow_region(_token, module.handle, module.staging(key), key)


def leave_traced_region(used: list[tuple[ModuleFP8, str]]) -> None:
    """Gives the modules that the graph has used the amaxes that it staged."""
    for module, key in used:
        torch.ops.apex_te.leave_region(_token, module.handle, module.staging(key), key)


def _update_first(key: str, group: str | None, may_update: bool) -> bool:
    """Updates before the modules that are traced adapt their scales to another recipe."""
    recipe: Any = recipe_named(key)
    if recipe.keeps_state:
        amax_group = amax_groups.enter(recipe, _group(group))
        if may_update and any(m.state.recipe not in (None, recipe) for m in registry.living()):
            update_if_due(recipe, amax_group)
    return True


# What torch.compiler.assume_constant_result does, without the second that importing it takes.
_update_first._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _group(name: Any) -> Any:
    if name is None:
        return None
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def _enter(token: torch.Tensor, key: str, group: str | None, may_update: bool) -> None:
    if torch._C._current_graph_task_id() == -1:  # else a recomputation
        enter_region(recipe_named(key), _group(group), may_update)


def _follow(
    token: torch.Tensor, handle: torch.Tensor, tensors: Sequence[torch.Tensor], key: str
) -> None:
    module = registry.member(int(handle))
    if module.state.sync.amax_group is not amax_groups.current:
        module.enter(amax_groups.current)
    _copy(tensors, module.staging(key))


def _note(token: torch.Tensor, handle: torch.Tensor, key: str) -> None:
    if recipe_named(key).keeps_state and torch._C._current_graph_task_id() == -1:
        registry.member(int(handle)).enter(amax_groups.current)


def _leave(
    token: torch.Tensor, handle: torch.Tensor, tensors: Sequence[torch.Tensor], key: str
) -> None:
    _copy(registry.member(int(handle)).staging(key), tensors)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target.data_ptr() != source.data_ptr():
            with torch.no_grad():
                target.copy_(source)


register("enter_region(Tensor(a!) token, str key, str? group, bool may_update) -> ()", _enter)
register("note_region(Tensor(a!) token, Tensor handle, str key) -> ()", _note)
register("follow_region(Tensor token, Tensor handle, Tensor(a!)[] tensors, str key) -> ()", _follow)
register("leave_region(Tensor(a!) token, Tensor handle, Tensor[] tensors, str key) -> ()", _leave)
