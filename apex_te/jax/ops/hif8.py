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
    """HiF8 data of a matrix [rows, cols]; None for a copy that was not requested.

    Attributes:
        rowwise: uint8 [rows, cols].
        columnwise: uint8 [cols, rows], the transpose.
        scale: one float32 element, the scale that was used.
        scale_inv: one float32 element: 1 / scale, or infinity if ``quantize_current`` used an
            infinite amax.
        amax: one float32 element: from ``quantize`` the maximum of the given amax and max |x|, or
            None; from ``quantize_current`` the amax that was used.
    """

    rowwise: jax.Array | None
    columnwise: jax.Array | None
    scale: jax.Array
    scale_inv: jax.Array
    amax: jax.Array | None


@checked
def encode(x: jax.Array, *, saturate: bool = True) -> jax.Array:
    """Converts x to HiF8 without a scale, rounding halves away from zero.

    Args:
        x: any shape, float32, float16 or bfloat16.
        saturate: convert magnitudes of 40960 and above, including infinity, to 32768. If False,
            they become infinity.

    Returns:
        uint8 in x's shape.

    Raises:
        TypeError: x has a dtype that is not listed.
    """
    x = _checks.has_dtype("hif8_quantize", "x", x, _checks.FLOATS)
    given = {"x": x.reshape(1, x.size)}
    made = local_call("hif8", "hif8_quantize", given, ["rowwise"], saturate=bool(saturate))
    return made["rowwise"].reshape(x.shape)


@checked
def decode(
    fp8_data: jax.Array, dtype: Any = jnp.bfloat16, *, scale_inv: jax.Array | None = None
) -> jax.Array:
    """Converts HiF8 data to ``dtype``, times ``scale_inv`` if given, rounding once.

    Args:
        fp8_data: uint8 of any shape.
        dtype: float32, float16 or bfloat16.
        scale_inv: one float32 element; None stands for 1.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: ``scale_inv`` does not have one element.
    """
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

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        scale: one float32 element.
        rowwise, columnwise: the copies to make: [rows, cols], and its transpose [cols, rows].
        amax: one float32 element; the result's ``amax`` is then max(amax, max |x|), before scaling,
            where NaN counts as largest. None computes no amax.
        saturate: as in ``encode``.
        flatten_axis: index of the first dimension that counts as columns, for x with more than two
            dimensions; None needs a matrix. The copies keep all dimensions; in the columnwise copy
            those of the columns come first.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or no copy is requested.
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
    """Quantizes q = encode(float(x) * scale), scale = target / max |x|.

    An amax of 0, infinity or NaN gives scale 1.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        target: value to which the amax is scaled, at most 32768: HIF8_15 for inputs and weights,
            HIF8_224 for gradients.
        rowwise, columnwise: the copies to make: [rows, cols], and its transpose [cols, rows].
        eps: lower bound of the amax, zero or more.
        pow2: round the scale down to a power of two.
        amax: one float32 element to use instead of max |x|; None computes max |x|.
        saturate: as in ``encode``.
        flatten_axis: index of the first dimension that counts as columns, for x with more than two
            dimensions; None needs a matrix. The copies keep all dimensions; in the columnwise copy
            those of the columns come first.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, ``target`` or ``eps`` is out of range, or no copy is
            asked for.
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
