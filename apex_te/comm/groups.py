"""Facts about process groups: their ranks, and whether one contains another."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import distributed

_Covered = weakref.WeakKeyDictionary[Any, bool]
_covered: weakref.WeakKeyDictionary[Any, _Covered] = weakref.WeakKeyDictionary()


def is_process_group(value: object) -> bool:
    """Returns True if ``value`` is a ``torch.distributed`` process group."""
    return distributed.is_available() and isinstance(value, distributed.ProcessGroup)


def check_process_group(owner: str, name: str, value: object) -> None:
    """Raises TypeError unless ``value`` is a process group or None."""
    if value is not None and not is_process_group(value):
        raise TypeError(
            f"{owner}: {name} must be a torch.distributed.ProcessGroup, got {type(value).__name__}"
        )


def ranks_of(group: Any) -> tuple[int, ...]:
    """Returns the global ranks of ``group`` in ascending order; None is the whole world."""
    return tuple(sorted(distributed.get_process_group_ranks(group)))


def pipeline_stage() -> int | None:
    """Returns this rank's pipeline stage, from 0; None if Megatron does not report it."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    rank = getattr(state, "get_pipeline_model_parallel_rank", None)
    return None if rank is None else rank()


def covers(outer: Any, inner: Any) -> bool:
    """Returns True if every rank of ``inner`` is also in ``outer``; None is the whole world."""
    if outer is None or outer is inner:
        return True
    if torch.compiler.is_compiling():
        return _covers(outer, inner)
    # By the objects, while they live: another group may get the name or the address of one.
    known = _covered.get(outer)
    if known is None:
        known = _covered[outer] = weakref.WeakKeyDictionary()
    inner = distributed.group.WORLD if inner is None else inner
    found = known.get(inner)
    if found is None:
        found = known[inner] = _covers(outer, inner)
    return found


def _covers(outer: Any, inner: Any) -> bool:
    """Returns True if every rank of ``inner`` is one of ``outer``, without the cache."""
    ranks = distributed.get_process_group_ranks
    return set(ranks(inner)) <= set(ranks(outer))
