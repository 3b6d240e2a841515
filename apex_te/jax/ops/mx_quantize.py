"""MXFP8 data of a matrix: FP8 with one power-of-two scale for every 32 elements."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _checks
from ._checked import checked
from ._contract import local_call, run
from .fp8_output import sides, wanted

__all__ = ["MXQuantized", "mx_dequantize", "mx_quantize"]


class MXQuantized(NamedTuple):
    """MXFP8 data and scales as in ``apex_te.ops.mx_quantize.MXQuantized``, None if not asked for.

    The columnwise copy is [cols, rows], the transpose.
    """

    rowwise: jax.Array | None
    rowwise_scale: jax.Array | None
    columnwise: jax.Array | None
    columnwise_scale: jax.Array | None


@checked
def mx_quantize(
    x: jax.Array,
    fp8_dtype: Any = jnp.float8_e4m3fn,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    rounding: str = "up",
    flatten_axis: int | None = None,
) -> MXQuantized:
    """Quantizes q = saturating_cast(float(x) / 2^e), with one e for each block of 32 elements.

    ``flatten_axis`` is as in ``cast_transpose``.
    """
    name = "mx_quantize"
    dtype = _checks.fp8_dtype_of(name, fp8_dtype)
    if rounding not in ("up", "floor"):
        raise ValueError(f"{name}: rounding must be 'up' or 'floor', got {rounding!r}")
    x, ranks = sides(name, x, flatten_axis)
    if not (rowwise or columnwise):
        raise ValueError(f"{name}: rowwise or columnwise must be asked for")
    made = run(
        name, name, {"x": x}, wanted(name, rowwise, columnwise), dtypes={"F": dtype}, ranks=ranks,
        use_floor=rounding == "floor",
    )  # fmt: skip
    return MXQuantized(*map(made.get, MXQuantized._fields))


@checked
def mx_dequantize(fp8_data: jax.Array, scale: jax.Array, *, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Computes the values of MXFP8 data, rounded to nearest even; exact within dtype's range."""
    name = "mx_dequantize"
    given = {"fp8_data": fp8_data, "scale": scale}
    dtypes = {"T": _checks.float_dtype_of(name, "out", dtype).name}
    return run("mx_quantize", name, given, dtypes=dtypes)["out"]


def decoded(fp8_data: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns the values of one device's shard of MXFP8 data [rows, cols] in ``dtype``."""
    given, dtypes = {"fp8_data": fp8_data, "scale": scale}, {"T": jnp.dtype(dtype).name}
    return local_call("mx_quantize", "mx_dequantize", given, (), dtypes)["out"]
