"""Quantizer of current scaling: casts with a scale from the tensor's own amax."""

from __future__ import annotations

from typing import Any

import jax

from ...recipe import CurrentScaling
from ..ops.current_scale import current_scale
from .base import Quantized, fp8_dtypes, one_scale
from .per_tensor import PerTensorProducts

__all__ = ["make"]


class _Current(PerTensorProducts):
    """Quantizer with one scale for each tensor, from the tensor itself."""

    def __init__(self, recipe: CurrentScaling) -> None:
        super().__init__(recipe)
        self._dtypes = fp8_dtypes(recipe)
        self._options: dict[str, Any] = {"eps": recipe.eps, "pow2": recipe.pow2}

    def _cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        return one_scale(current_scale(x, self._dtypes[role], **self._options, **wanted))


def make(recipe: CurrentScaling) -> _Current:
    """Returns the quantizer of a ``CurrentScaling`` recipe."""
    return _Current(recipe)
