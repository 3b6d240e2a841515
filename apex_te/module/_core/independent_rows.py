"""Modules under ``batch_invariant``: whether a call runs in the mode, and quantizers for it."""

from __future__ import annotations

from typing import Any

import torch

from ...fp8.scheme import GemmQuantizers
from ...runtime import invariance


def separates_rows(module: Any) -> bool:
    """Returns True if a module's call runs under ``batch_invariant``; checks that it can."""
    modes = module._modes
    found = invariance.current(modes.independent_rows)
    if not torch.compiler.is_compiling():
        modes.independent_rows = found
    if not found:
        return False
    name = type(module).__name__
    if not module.can_separate_rows:
        raise NotImplementedError(f"{name}: batch_invariant must be off for this module, got on")
    if module.tp_size > 1:
        raise NotImplementedError(
            f"{name}: tp_size must be 1 under batch_invariant, because the order in which ranks "
            f"are summed may depend on the number of rows, got {module.tp_size}"
        )
    return True


def with_independent_rows(owner: str, recipe: Any, quantizers: GemmQuantizers) -> GemmQuantizers:
    """Returns quantizers whose fprop gives a row equal bits whatever the other rows are."""
    backend = quantizers.backend.with_independent_rows()
    if backend is None:
        raise NotImplementedError(
            f"{owner}: fp8_recipe must be BlockScaling or RowwiseScaling under batch_invariant, "
            "because other scales depend on other rows or on earlier batches, "
            f"got {type(recipe).__name__}"
        )
    return quantizers._replace(backend=backend)
