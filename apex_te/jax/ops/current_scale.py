"""Casts a matrix to FP8 with a scale computed from its amax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime import scratch_sizes
from .._call import call
from . import _checks
from ._checked import checked
from ._rows import rowwise as over_rows
from .fp8_output import copies, sides

__all__ = [
    "CurrentScaleOutput",
    "amax_results",
    "current_scale",
    "local_amax",
    "scale_of",
    "tensor_amax",
]

_S = jax.ShapeDtypeStruct
_ONE = _S((1,), jnp.float32)


class CurrentScaleOutput(NamedTuple):
    """FP8 data of a matrix [rows, cols]; a copy that was not asked for is None.

    Other fields are as in ``apex_te.ops.current_scale.CurrentScaleOutput``.

    Attributes:
        columnwise: the transpose, FP8 [cols, rows].
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

    Other arguments and errors are as in ``apex_te.ops.current_scale.current_scale``.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
        amax: one float32 element to use instead of max |x|.
        flatten_axis: as in ``cast_transpose``.
    """
    dtype = _checks.fp8_dtype_of("current_scale", fp8_dtype, fnuz=True)
    x, ranks = sides("current_scale", x, flatten_axis)
    names = [*copies("current_scale", (1, 1), dtype, rowwise, columnwise), "scale", "scale_inv"]
    options = {"eps": float(eps), "pow2": bool(pow2)}

    def cast(x: jax.Array, amax: jax.Array) -> tuple[jax.Array, ...]:
        results = copies("current_scale", x.shape, dtype, rowwise, columnwise)
        results |= {"scale": _ONE, "scale_inv": _ONE}
        given = {"x": x, "amax": amax.reshape(1), **options}
        made = call("current_scale", "current_scale_cast", results, **given)
        return tuple(made[name] for name in names)

    def whole(x: jax.Array) -> tuple[jax.Array, ...]:
        results = copies("current_scale", x.shape, dtype, rowwise, columnwise)
        results |= {"scale": _ONE, "scale_inv": _ONE, **amax_results()}
        made = call("current_scale", "current_scale_fwd", results, x=x, **options)
        return tuple(made[name] for name in (*names, "amax"))

    def reduced(reduce: Callable[..., jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
        amax = reduce("amax", local_amax(x)[0])
        return *cast(x, amax), amax

    dims = {"rowwise": "r c", "columnwise": "c r", "scale": "_", "scale_inv": "_"}
    made = ", ".join(f"{n}: {dims[n]}" for n in names)
    shared: dict[str, Any] = {"split": "r c", "ranks": ranks}
    if amax is None:
        rule = f"x: r c -> {made}, amax: ^"
        found = over_rows("current_scale_fwd", rule, whole, reduced=reduced, **shared)(x)
        return _output(dict(zip([*names, "amax"], found, strict=True)))
    amax = _checks.is_scalar("current_scale_cast", "amax", amax)
    found = over_rows("current_scale_cast", f"x: r c, amax: _ -> {made}", cast, **shared)(x, amax)
    return _output({**dict(zip(names, found, strict=True)), "amax": amax})


@checked
def scale_of(
    amax: jax.Array, fp8_dtype: Any, *, eps: float = 0.0, pow2: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Computes the scale that ``current_scale`` computes from ``amax``, and scale_inv.

    Arguments, results and errors are those of ``apex_te.ops.current_scale.scale_of``.
    """
    dtype = _checks.fp8_dtype_of("current_scale", fp8_dtype, fnuz=True)
    amax = _checks.is_scalar("current_scale_cast", "amax", amax)

    def body(amax: jax.Array) -> tuple[jax.Array, ...]:
        # The cast of an empty matrix writes the scale alone.
        results = {"rowwise": _S((0, 0), jnp.dtype(dtype)), "scale": _ONE, "scale_inv": _ONE}
        given = {"x": jnp.zeros((0, 0), jnp.float32), "amax": amax.reshape(1)}
        options = {"eps": float(eps), "pow2": bool(pow2)}
        made = call("current_scale", "current_scale_cast", results, **given, **options)
        return made["scale"], made["scale_inv"]

    rule = "amax: _ -> scale: _, scale_inv: _"
    return over_rows("current_scale_cast", rule, body)(amax)


def _output(made: dict[str, jax.Array]) -> CurrentScaleOutput:
    return CurrentScaleOutput(*(made.get(name) for name in CurrentScaleOutput._fields))


@checked
def amax_results() -> dict[str, Any]:
    """Returns shapes and dtypes of the results of a call that computes an amax, by name."""
    return {"amax": _ONE, "workspace": _S((scratch_sizes.MAX_AMAXES,), jnp.float32)}


@checked
def local_amax(x: jax.Array) -> tuple[jax.Array]:
    """Returns max |x| of one device's shard of a matrix, as a tuple of one float32 element."""
    return (call("current_scale", "current_scale_amax", amax_results(), x=x)["amax"],)


@checked
def tensor_amax(x: jax.Array) -> jax.Array:
    """Computes max |x| as one float32 element; NaN counts as largest, and an empty x gives 0.

    Args:
        x: [rows, cols] float32, float16 or bfloat16.
    """
    x = _checks.matrix("current_scale", "x", x)

    def reduced(reduce: Callable[..., jax.Array], x: jax.Array) -> tuple[jax.Array]:
        return (reduce("amax", local_amax(x)[0]),)

    rule = "x: r c -> amax: ^"
    run = over_rows("current_scale_amax", rule, local_amax, split="r c", reduced=reduced)
    return run(x)[0]
