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
    """FP8 data as in ``apex_te.ops.current_scale.CurrentScaleOutput``, None if not asked for.

    The columnwise copy is [cols, rows], the transpose.
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

    ``flatten_axis`` is as in ``cast_transpose``.
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
    """Computes the scale that ``current_scale`` computes from ``amax``, and scale_inv."""
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
    """Computes max |x| of a matrix as one float32 element; NaN counts as largest, an empty x
    gives 0.
    """
    x = _checks.matrix("current_scale", "x", x)

    def reduced(reduce: Callable[..., jax.Array], x: jax.Array) -> tuple[jax.Array]:
        return (reduce("amax", local_amax(x)[0]),)

    rule = "x: r c -> amax: ^"
    run = over_rows("current_scale_amax", rule, local_amax, split="r c", reduced=reduced)
    return run(x)[0]
