"""``preserved_fp8_state``, inside which FP8 regions leave no trace in the process's FP8 state."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from .amax_group import amax_groups
from .registry import registry
from .scale_formula import nonfinite_counts
from .state import TENSORS
from .update import update_lock


@contextlib.contextmanager
def preserved_fp8_state() -> Iterator[None]:
    """Context manager that restores the FP8 state of all modules, and its clocks, at its end.

    FP8 modules constructed inside must be deleted before the end. Their places in the collective of
    updates are given up, so that this rank agrees with ranks that did not enter such a block.
    """
    with update_lock:
        kept = [tensor for member in registry.living() for tensor in _tensors(member.state)]
        kept += nonfinite_counts()
        values = [tensor.clone() for tensor in kept]
        due = [(member.state, member.state.first_steps.still_due()) for member in registry.living()]
        clocks, training = amax_groups.clocks, amax_groups.training
        current, recipe = amax_groups.current, amax_groups.recipe
        numbers = len(registry.sizes)
    try:
        yield  # without the lock, which a backward may want in another thread
    finally:
        with update_lock:
            with torch.inference_mode(False), torch.no_grad():
                for tensor, value in zip(kept, values, strict=True):
                    tensor.copy_(value)
            for state, flags in due:
                state.first_steps.set(flags)
            amax_groups.clocks, amax_groups.training = clocks, training
            amax_groups.current, amax_groups.recipe = current, recipe
            gc.collect()  # modules are parts of cycles
            registry.forget_dead(numbers)


def _tensors(state: object) -> list[torch.Tensor]:
    """Returns the tensors of a module's FP8 state, none if they do not exist."""
    if not state.allocated or state.device.type == "meta":  # type: ignore[attr-defined]
        return []
    return [getattr(state, name) for name in TENSORS]
