"""Stamps of tensors, which tell whether a tensor still has the values that it had."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

_numbers: dict[int, tuple[StorageWeakRef, int]] = {}  # by the address of the storage object
_count = itertools.count(1)
_limit = 256  # entries above which those of freed storages are dropped


def stamp(x: torch.Tensor) -> tuple[int, int, int]:
    """Returns the version and address of ``x``, and its storage's number, new for reused memory.

    Equal stamps mean equal values, except after writes that a version does not count: through
    ``.data``, or to tensors of inference mode.
    """
    return (0 if x.is_inference() else x._version), x.data_ptr(), _number(x.untyped_storage())


def _number(storage: torch.UntypedStorage) -> int:
    """Returns a number that no other storage of the process gets."""
    global _limit
    # No other storage can be at this address: the entry's reference keeps the object, not its data.
    found = _numbers.get(storage._cdata)
    if found is not None:
        return found[1]
    if len(_numbers) >= _limit:
        for address in [a for a, (ref, _) in list(_numbers.items()) if ref.expired()]:
            _numbers.pop(address, None)
        _limit = max(256, 2 * len(_numbers))
    watch_fused_optimizers()
    number = next(_count)
    _numbers[storage._cdata] = StorageWeakRef(storage), number
    return number


@functools.cache
def watch_fused_optimizers() -> None:
    """Makes steps of torch's fused optimizers increment the version counters of what they write."""
    register_optimizer_step_post_hook(_raise_versions)


def _raise_versions(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raises the versions of parameters that a ``fused=True`` step wrote, which torch omits."""
    if torch.compiler.is_compiling():
        return
    for group in optimizer.param_groups:
        if group.get("fused"):
            updated = [p for p in group["params"] if p.grad is not None and not p.is_inference()]
            increment_version(updated)
