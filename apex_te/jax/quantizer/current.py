"""Quantizer of current scaling: casts with a scale from the tensor's own amax."""

from __future__ import annotations

from typing import Any

import jax

from ...recipe import CurrentScaling
from ..ops.current_scale import current_scale
from .base import Quantized, column_sums, fp8_dtypes
from .per_tensor import PerTensorProducts

__all__ = ["make"]


class _Current(PerTensorProducts):
    """Quantizer with one scale for each tensor, from the tensor itself."""

    keeps_state = False
    any_rank = True

    def __init__(self, recipe: CurrentScaling) -> None:
        super().__init__(recipe)
        self._dtypes = fp8_dtypes(recipe)
        self._options: dict[str, Any] = {"eps": recipe.eps, "pow2": recipe.pow2}

    def cast(
        self,
        x: jax.Array,
        role: str,
        scale: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        with_dbias: bool = False,
        flatten_axis: int = -1,
    ) -> Quantized:
        """Casts an array as a matrix; see ``Quantizer.cast``."""
        made = current_scale(
            x, self._dtypes[role], rowwise=rowwise, columnwise=columnwise,
            flatten_axis=flatten_axis, **self._options,
        )  # fmt: skip
        inverse = made.scale_inv
        dbias = column_sums(x, flatten_axis) if with_dbias else None
        return Quantized(made.rowwise, inverse, made.columnwise, inverse, None, dbias)


def make(recipe: CurrentScaling) -> _Current:
    """Returns the quantizer of a ``CurrentScaling`` recipe."""
    return _Current(recipe)
