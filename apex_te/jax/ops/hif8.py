"""HiF8 (HiFloat8): encodes, decodes, and quantizes a matrix with one scale; data is uint8."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _checks
from ._checked import checked
from ._contract import local_call, run
from .current_scale import from_amax
from .fp8_output import sides, wanted

__all__ = ["HIF8_15", "HIF8_224", "HiF8Output", "decode", "encode", "quantize", "quantize_current"]

# Values that MindSpeed scales an amax to, in the range of 3-bit mantissas and of 2-bit ones.
HIF8_15 = 15.0
HIF8_224 = 224.0

_LARGEST = 32768.0
_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)


class HiF8Output(NamedTuple):
    """HiF8 data as in ``apex_te.ops.hif8.HiF8Output``; a copy that was not asked for is None.

    The columnwise copy is [cols, rows], the transpose. ``amax`` of ``quantize`` is the maximum of
    the given amax and max |x|, None unless given; that of ``quantize_current`` gave the scale.
    """

    rowwise: jax.Array | None
    columnwise: jax.Array | None
    scale: jax.Array
    scale_inv: jax.Array
    amax: jax.Array | None


@checked
def encode(x: jax.Array, *, saturate: bool = True) -> jax.Array:
    """Returns the HiF8 data of x without a scale, rounded half away from zero."""
    x = _checks.has_dtype("hif8_quantize", "x", x, _checks.FLOATS)
    given = {"x": x.reshape(1, x.size)}
    made = local_call("hif8", "hif8_quantize", given, ["rowwise"], saturate=bool(saturate))
    return made["rowwise"].reshape(x.shape)


@checked
def decode(
    fp8_data: jax.Array, dtype: Any = jnp.bfloat16, *, scale_inv: jax.Array | None = None
) -> jax.Array:
    """Returns the values of HiF8 data times scale_inv, rounded once; exact without scale_inv."""
    name = "hif8_decode"
    fp8_data = _checks.has_dtype(name, "fp8_data", fp8_data, ["uint8"])
    given = {"fp8_data": fp8_data.reshape(-1)}
    if scale_inv is not None:
        given["scale_inv"] = _checks.is_scalar(name, "scale_inv", scale_inv)
    dtypes = {"T": _checks.float_dtype_of(name, "out", dtype).name}
    return local_call("hif8", name, given, (), dtypes)["out"].reshape(fp8_data.shape)


@checked
def quantize(
    x: jax.Array,
    scale: jax.Array,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
    saturate: bool = True,
    flatten_axis: int | None = None,
) -> HiF8Output:
    """Quantizes q = encode(float(x) * scale) with a given scale, in one pass.

    The result's ``amax`` is the maximum of the given one and max |x|, NaN counting as largest.
    ``flatten_axis`` is as in ``cast_transpose``.
    """
    name = "hif8_quantize"
    x, ranks = sides(name, x, flatten_axis)
    scale = _checks.is_scalar(name, "scale", scale)
    given = {"x": x, "scale": scale, "amax": amax}
    outputs = [*wanted(name, rowwise, columnwise), "scale_inv"]
    made = run("hif8", name, given, outputs, ranks=ranks, saturate=bool(saturate))
    return HiF8Output(*map({**made, "scale": scale}.get, HiF8Output._fields))


@checked
def quantize_current(
    x: jax.Array,
    target: float = HIF8_15,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    eps: float = 0.0,
    pow2: bool = False,
    amax: jax.Array | None = None,
    saturate: bool = True,
    flatten_axis: int | None = None,
) -> HiF8Output:
    """Quantizes q = encode(float(x) * scale), scale = target / max |x|, as ``current_scale``.

    ``flatten_axis`` is as in ``cast_transpose``.
    """
    name = "hif8_current" if amax is None else "hif8_cast"
    x, ranks = sides("hif8_current", x, flatten_axis)
    if not 0.0 < target <= _LARGEST:
        raise ValueError(f"{name}: target must be above 0 and at most 32768, got {target:g}")
    if not 0.0 <= eps <= _FLOAT32_MAX:
        raise ValueError(f"{name}: eps must be zero or more and finite, got {eps:g}")
    names = [*wanted(name, rowwise, columnwise), "scale", "scale_inv"]
    options: dict[str, Any] = {"target": float(target), "eps": float(eps), "pow2": bool(pow2)}
    options["saturate"] = bool(saturate)
    functions = "hif8_current", "hif8_cast"
    found = from_amax("hif8", functions, x, amax, names, ranks, **options)
    return HiF8Output(*map(found.get, HiF8Output._fields))
