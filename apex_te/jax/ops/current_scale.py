"""Casts a matrix to FP8 with a scale computed from its amax."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime import scratch_sizes
from .._call import call
from . import _checks
from .fp8_output import copies

__all__ = ["CurrentScaleOutput", "current_scale", "tensor_amax"]

_S = jax.ShapeDtypeStruct
_ONE = _S((1,), jnp.float32)


class CurrentScaleOutput(NamedTuple):
    """FP8 data of a matrix [rows, cols]; None for a copy that was not asked for.

    Attributes:
        rowwise: FP8 [rows, cols].
        columnwise: FP8 [cols, rows].
        scale: one float32 element, the scale that was used.
        scale_inv: one float32 element, 1 / scale, but infinite if the amax is.
        amax: one float32 element, the amax that gave the scale.
    """

    rowwise: jax.Array | None
    columnwise: jax.Array | None
    scale: jax.Array
    scale_inv: jax.Array
    amax: jax.Array


def current_scale(
    x: jax.Array,
    fp8_dtype: Any,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    eps: float = 0.0,
    pow2: bool = False,
    amax: jax.Array | None = None,
) -> CurrentScaleOutput:
    """Quantizes q = saturating_cast(float(x) * scale), scale = fp8_max / max |x|.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        fp8_dtype: float8_e4m3fn or float8_e5m2; on a CPU also their fnuz forms.
        rowwise: make [rows, cols].
        columnwise: make [cols, rows].
        eps: smallest amax, zero or more.
        pow2: round the scale down to a power of two.
        amax: one float32 element to use instead of max |x|.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a shape that does not match, or neither copy asked for.
    """
    dtype = _checks.fp8_dtype_of("current_scale", fp8_dtype, fnuz=True)
    x = _checks.matrix("current_scale", "x", x)
    results = copies("current_scale", x.shape, dtype, rowwise, columnwise)
    results |= {"scale": _ONE, "scale_inv": _ONE}
    options = {"eps": float(eps), "pow2": bool(pow2)}
    if amax is None:
        results |= {"amax": _ONE, "workspace": _S((scratch_sizes.MAX_AMAXES,), jnp.float32)}
        made = call("current_scale", "current_scale_fwd", results, x=x, **options)
    else:
        amax = _checks.is_scalar("current_scale_cast", "amax", amax)
        given = {"x": x, "amax": amax}
        made = call("current_scale", "current_scale_cast", results, **given, **options)
        made["amax"] = amax
    return CurrentScaleOutput(*(made.get(name) for name in CurrentScaleOutput._fields))


def tensor_amax(x: jax.Array) -> jax.Array:
    """Computes max |x| as one float32 element; NaN counts above infinity, an empty x gives 0.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
    """
    x = _checks.matrix("current_scale", "x", x)
    results = {"amax": _ONE, "workspace": _S((scratch_sizes.MAX_AMAXES,), jnp.float32)}
    return call("current_scale", "current_scale_amax", results, x=x)["amax"]
