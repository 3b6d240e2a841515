"""Entry and exit of ``fp8_autocast`` in compiled code, as ops in its graph that move the scales.

A graph may work on copies of the tensors it changes, which are written back when it ends. Therefore
the graph names the tensors of each FP8 state that it uses: after it has entered a region, an op
copies the state's new scales into them; when it leaves the region, an op copies the staged amax
values
back. Tensors for gradients need neither: backward reads and writes the state itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...ops.binding import register
from .ranks import amax_groups, recipe_named, registry
from .update import enter_region, update_if_due

if TYPE_CHECKING:
    from ..module_fp8 import ModuleFP8

# Written and read by the ops, which keeps them in order.
_token = torch.zeros(1, dtype=torch.int32, device="cpu")


def enter_traced_region(key: str, group: Any, may_update: bool) -> None:
    """Adds to the traced graph an op that runs ``enter_region`` each time the graph runs."""
    name = None if group is None else group.group_name
    _update_first(key, name, may_update)
    torch.ops.apex_te.enter_region(_token, key, name, may_update)


def follow_traced_region(
    used: list[tuple[ModuleFP8, str]] | None, module: ModuleFP8, key: str
) -> None:
    """Adds to the traced graph an op that copies a module's current scales to the graph's tensors.

    If the region was entered outside the graph (``used`` is None), the graph uses the FP8 state
    itself. With several amax groups, an op moves the module to the current one.
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
    """Adds ops to the traced graph that copy its amax values to the modules' FP8 states."""
    for module, key in used:
        torch.ops.apex_te.leave_region(_token, module.handle, module.staging(key), key)


def _update_first(key: str, group: str | None, may_update: bool) -> bool:
    """Runs a due update while torch.compile traces, before states get another recipe."""
    recipe: Any = recipe_named(key)
    if recipe.keeps_state:
        amax_group = amax_groups.enter(recipe, _group(group))
        if may_update and any(m.state.recipe not in (None, recipe) for m in registry.living()):
            update_if_due(recipe, amax_group)
    return True


# What torch.compiler.assume_constant_result does, without the second that importing it takes.
_update_first._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _group(name: Any) -> Any:
    """Returns the process group of this name; None for None."""
    if name is None:
        return None
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def _enter(token: torch.Tensor, key: str, group: str | None, may_update: bool) -> None:
    """Enters a region as the graph runs, except in a recompute; op ``enter_region``."""
    if torch._C._current_graph_task_id() == -1:  # else a recomputation
        enter_region(recipe_named(key), _group(group), may_update)


def _follow(
    token: torch.Tensor, handle: torch.Tensor, tensors: Sequence[torch.Tensor], key: str
) -> None:
    """Copies a module's scales to the tensors that compiled code reads; op ``follow_region``."""
    module = registry.member(int(handle))
    if module.state.sync.amax_group is not amax_groups.current:
        module.enter(amax_groups.current)
    _copy(tensors, module.staging(key))


def _note(token: torch.Tensor, handle: torch.Tensor, key: str) -> None:
    """Has module number ``handle`` enter the current amax group; op ``note_region``."""
    if recipe_named(key).keeps_state and torch._C._current_graph_task_id() == -1:
        registry.member(int(handle)).enter(amax_groups.current)


def _end_first_step(handle: torch.Tensor, slot: int) -> None:
    """Marks a slot's first scale of module number ``handle`` as set; op ``end_first_step``."""
    registry.member(int(handle)).state.first_steps.due[slot] = False


def _leave(
    token: torch.Tensor, handle: torch.Tensor, tensors: Sequence[torch.Tensor], key: str
) -> None:
    """Copies the graph's tensors back to a module's FP8 state; op ``leave_region``."""
    _copy(registry.member(int(handle)).staging(key), tensors)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to its target, unless they share memory."""
    for target, source in zip(targets, sources, strict=True):
        if target.data_ptr() != source.data_ptr():
            with torch.no_grad():
                target.copy_(source)


register("enter_region(Tensor(a!) token, str key, str? group, bool may_update) -> ()", _enter)
register("note_region(Tensor(a!) token, Tensor handle, str key) -> ()", _note)
# Unless it says that it writes a tensor, no graph keeps it.
register("end_first_step(Tensor(a!) handle, int slot) -> ()", _end_first_step)
register("follow_region(Tensor token, Tensor handle, Tensor(a!)[] tensors, str key) -> ()", _follow)
register("leave_region(Tensor(a!) token, Tensor handle, Tensor[] tensors, str key) -> ()", _leave)
