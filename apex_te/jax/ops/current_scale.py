"""Casts a matrix to FP8 with a scale computed from its amax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _checks
from ._checked import checked
from ._contract import local_call, run
from ._rows import rowwise as over_rows
from .fp8_output import sides, wanted

__all__ = ["CurrentScaleOutput", "current_scale", "local_amax", "scale_of", "tensor_amax"]


class CurrentScaleOutput(NamedTuple):
    """FP8 data of a matrix [rows, cols]; None for a copy that was not requested.

    Attributes:
        rowwise: FP8 [rows, cols].
        columnwise: FP8 [cols, rows], the transpose.
        scale: one float32 element, the scale that was used.
        scale_inv: one float32 element: 1 / scale, or infinity if the amax is infinite.
        amax: one float32 element, the amax from which the scale was computed.
    """

    rowwise: jax.Array | None
    columnwise: jax.Array | None
    scale: jax.Array
    scale_inv: jax.Array
    amax: jax.Array


@checked
def current_scale(
    x: jax.Array,
    fp8_dtype: Any,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    eps: float = 0.0,
    pow2: bool = False,
    amax: jax.Array | None = None,
    flatten_axis: int | None = None,
) -> CurrentScaleOutput:
    """Quantizes q = saturating_cast(float(x) * scale), scale = fp8_max / max |x|.

    An amax of 0, infinity or NaN gives scale 1.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        fp8_dtype: float8_e4m3fn or float8_e5m2; on a CPU also their fnuz forms.
        rowwise, columnwise: the copies to make: [rows, cols], and its transpose [cols, rows].
        eps: smallest amax, zero or more.
        pow2: round the scale down to a power of two.
        amax: one float32 element to use instead of max |x|; None computes max |x|.
        flatten_axis: index of the first dimension that counts as columns, for x with more than two
            dimensions; None needs a matrix. The copies keep all dimensions; in the columnwise copy
            those of the columns come first.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or no copy is requested.
        jax.errors.JaxRuntimeError: ``eps`` is negative; raised when the program runs.
    """
    dtype = _checks.fp8_dtype_of("current_scale", fp8_dtype, fnuz=True)
    x, ranks = sides("current_scale", x, flatten_axis)
    names = [*wanted("current_scale", rowwise, columnwise), "scale", "scale_inv"]
    dtypes = {"F": dtype}
    options: dict[str, Any] = {"eps": float(eps), "pow2": bool(pow2)}
    functions = "current_scale_fwd", "current_scale_cast"
    found = from_amax("current_scale", functions, x, amax, names, ranks, dtypes, **options)
    return CurrentScaleOutput(*map(found.get, CurrentScaleOutput._fields))


def from_amax(
    op: str,
    functions: tuple[str, str],
    x: jax.Array,
    amax: jax.Array | None,
    names: list[str],
    ranks: dict[str, int],
    dtypes: dict[str, str] | None = None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Casts an array with a scale from ``amax``, or from its own, which devices combine.

    Args:
        functions: names of the C functions that cast with the amax of x, and with a given one.
        names: the results that are wanted besides the amax.
    """
    if amax is not None:
        amax = _checks.is_scalar(functions[1], "amax", amax)
        given = {"x": x, "amax": amax}
        found = run(op, functions[1], given, names, dtypes=dtypes, ranks=ranks, **options)
        return {**found, "amax": amax}

    def whole(x: jax.Array) -> tuple[jax.Array, ...]:
        made = local_call(op, functions[0], {"x": x}, names, dtypes, **options)
        return tuple(made[name] for name in (*names, "amax"))

    def reduced(reduce: Callable[..., jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
        given = {"x": x, "amax": reduce("amax", local_amax(x)[0])}
        made = local_call(op, functions[1], given, names, dtypes, **options)
        return *(made[name] for name in names), given["amax"]

    dims = {"rowwise": "r c", "columnwise": "c r", "scale": "_", "scale_inv": "_", "amax": "^"}
    rule = f"x: r c -> {', '.join(f'{n}: {dims[n]}' for n in (*names, 'amax'))}"
    fused = over_rows(functions[0], rule, whole, split="r c", ranks=ranks, reduced=reduced)
    return dict(zip([*names, "amax"], fused(x), strict=True))


@checked
def scale_of(
    amax: jax.Array, fp8_dtype: Any, *, eps: float = 0.0, pow2: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Computes (scale, scale_inv) from an amax by the rules of ``current_scale``.

    Args:
        amax: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2; on a CPU also their fnuz forms.
        eps: smallest amax, zero or more.
        pow2: round the scale down to a power of two.

    Returns:
        (scale, scale_inv), one float32 element each.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: ``amax`` does not have one element.
        jax.errors.JaxRuntimeError: ``eps`` is negative; raised when the program runs.
    """
    dtype = _checks.fp8_dtype_of("current_scale", fp8_dtype, fnuz=True)
    amax = _checks.is_scalar("current_scale_cast", "amax", amax)

    def body(amax: jax.Array) -> tuple[jax.Array, ...]:
        # The cast of an empty matrix writes the scale alone.
        made = local_call(
            "current_scale", "current_scale_cast",
            {"x": jnp.zeros((0, 0), jnp.float32), "amax": amax}, ["rowwise"], {"F": dtype},
            eps=float(eps), pow2=bool(pow2),
        )  # fmt: skip
        return made["scale"], made["scale_inv"]

    rule = "amax: _ -> scale: _, scale_inv: _"
    return over_rows("current_scale_cast", rule, body)(amax)


@checked
def local_amax(x: jax.Array) -> tuple[jax.Array]:
    """Returns max |x| of one device's shard of a matrix, as a tuple of one float32 element."""
    return (local_call("current_scale", "current_scale_amax", {"x": x})["amax"],)


@checked
def tensor_amax(x: jax.Array) -> jax.Array:
    """Computes max |x| as one float32 element; NaN counts as largest, an empty x gives 0.

    x is [rows, cols] float32, float16 or bfloat16. Another dtype raises TypeError, another number
    of dimensions ValueError.
    """
    x = _checks.matrix("current_scale", "x", x)

    def reduced(reduce: Callable[..., jax.Array], x: jax.Array) -> tuple[jax.Array]:
        return (reduce("amax", local_amax(x)[0]),)

    rule = "x: r c -> amax: ^"
    run = over_rows("current_scale_amax", rule, local_amax, split="r c", reduced=reduced)
    return run(x)[0]
