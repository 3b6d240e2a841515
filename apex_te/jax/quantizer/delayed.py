"""Quantizer of delayed scaling: casts with the scale of the FP8 state and notes the amax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...recipe import DelayedScaling
from ..fused_casts import FusedCast
from ..ops.cast_transpose import cast_transpose
from .base import Quantized, fp8_dtypes, one_scale
from .per_tensor import PerTensorProducts


class _Delayed(PerTensorProducts):
    """Quantizer with one scale for each tensor, from earlier steps."""

    keeps_state = True
    fuses_activations = True
    fuses_norms = True

    def __init__(self, recipe: DelayedScaling) -> None:
        super().__init__(recipe)
        self._dtypes = fp8_dtypes(recipe)

    def cast(self, x: jax.Array, role: str, scale: Any, **wanted: Any) -> Quantized:
        """Casts an array as a matrix; see ``Quantizer.cast``."""
        amax = jnp.zeros(1, jnp.float32)
        # The op sums the columns, too.
        made = cast_transpose(x, scale, self._dtypes[role], amax=amax, **wanted)
        return one_scale(made, made.amax)._replace(dbias=made.dbias)

    def produce(self, source: FusedCast, role: str, scale: Any, **wanted: bool) -> Quantized:
        """Runs an op and casts its result; see ``Quantizer.produce``."""
        if not source.can_fuse:
            return super().produce(source, role, scale, **wanted)
        start, dtype = jnp.zeros(1, jnp.float32), self._dtypes[role]
        made, dbias = source.fp8(scale, dtype, **wanted, amax=start)
        return one_scale(made, made.amax)._replace(dbias=dbias)


def make(recipe: DelayedScaling) -> _Delayed:
    """Returns the quantizer of a ``DelayedScaling`` recipe."""
    return _Delayed(recipe)
