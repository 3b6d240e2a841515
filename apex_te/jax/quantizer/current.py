"""Quantizer of current scaling: casts with a scale from the tensor's own amax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...recipe import CurrentScaling
from ..fused_casts import FusedCast
from ..ops.current_scale import current_scale, scale_of
from .base import Quantized, fp8_dtypes, one_scale
from .per_tensor import PerTensorProducts


class _Current(PerTensorProducts):
    """Quantizer with one scale for each tensor, from the tensor itself."""

    fuses_activations = True
    fuses_norms = True

    def __init__(self, recipe: CurrentScaling) -> None:
        super().__init__(recipe)
        self._dtypes = fp8_dtypes(recipe)
        self._options: dict[str, Any] = {"eps": recipe.eps, "pow2": recipe.pow2}

    def _cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        return one_scale(current_scale(x, self._dtypes[role], **self._options, **wanted))

    def produce(self, source: FusedCast, role: str, scale: Any, **wanted: bool) -> Quantized:
        """Runs an op twice, the first time only for its result's amax; see ``Quantizer.produce``.

        This is cheaper than storing the result in bf16 or fp32.
        """
        # As on PyTorch's side the columns of what is only copied are added in high precision.
        if not source.can_fuse or (source.copies and source.with_dbias):
            return super().produce(source, role, scale, **wanted)
        dtype, nothing = self._dtypes[role], {"rowwise": False, "columnwise": False}
        start, unused = jnp.zeros(1, jnp.float32), jnp.ones(1, jnp.float32)
        measured, _ = source.fp8(unused, dtype, **nothing, amax=start)
        scale, scale_inv = scale_of(measured.amax, dtype, **self._options)
        made, dbias = source.fp8(scale, dtype, **wanted, amax=None)
        # The op's own inverse of the scale does not show an infinite amax.
        return one_scale(made._replace(scale_inv=scale_inv))._replace(dbias=dbias)


def make(recipe: CurrentScaling) -> _Current:
    """Returns the quantizer of a ``CurrentScaling`` recipe."""
    return _Current(recipe)
