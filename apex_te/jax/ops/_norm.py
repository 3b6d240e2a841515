"""Calls of the C functions of ``layer_norm`` and ``rms_norm``, and their gradient rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime import scratch_sizes
from .._call import call
from .._partition import Kind
from . import _checks
from ._gradient import flag, gradient_of, is_wanted, materialised
from ._rows import rowwise
from .fp8_output import FP8Output, copies

_S = jax.ShapeDtypeStruct


class NormOutput(NamedTuple):
    """Results of a norm's forward over the rows of x [rows, cols].

    Attributes:
        y: [rows, cols] in x's dtype, the normalised rows.
        mean: [rows] float32; None for ``rms_norm``.
        rstd: [rows] float32, 1 / sqrt(variance + eps).
        residual_sum: [rows, cols], the sum x + residual that was normalised; None without a
            residual.
    """

    y: jax.Array
    mean: jax.Array | None
    rstd: jax.Array
    residual_sum: jax.Array | None


class NormFP8Output(NamedTuple):
    """Results of a norm's forward as in ``NormOutput``, with FP8 copies of the rows as ``y``."""

    y: FP8Output
    mean: jax.Array | None
    rstd: jax.Array
    residual_sum: jax.Array | None


class NormGradients(NamedTuple):
    """Gradients of x [rows, cols], and of weight and bias [cols] or None, each in its own dtype."""

    dx: jax.Array
    dweight: jax.Array | None
    dbias: jax.Array | None


def _parameters(function: str, x: jax.Array, **given: Any) -> dict[str, jax.Array]:
    """Returns the weight and bias that are given, after their checks."""
    found: dict[str, jax.Array] = {}
    for name, value in given.items():
        if value is None:
            continue
        allowed = list(dict.fromkeys([x.dtype.name, "float32"]))
        if found:
            allowed = [next(iter(found.values())).dtype.name]
        value = _checks.has_dtype(function, name, value, allowed)
        found[name] = _checks.has_shape(function, name, value, x.shape[-1:])
    return found


def _statistics(op: str, rows: int) -> dict[str, Any]:
    names = ("mean", "rstd") if op == "layer_norm" else ("rstd",)
    return {name: _S((rows,), jnp.float32) for name in names}


def _terms(names: Any, dims: dict[str, str]) -> str:
    return ", ".join(f"{name}: {dims[name]}" for name in names)


_DIMS = {
    "x": "r c", "dy": "r c", "residual": "r c", "d_residual": "r c", "y": "r c", "dx": "r c",
    "residual_sum": "r c", "rowwise": "r c", "columnwise": "c r", "mean": "r", "rstd": "r",
    "weight": "c", "bias": "c", "scale": "_", "amax": "_", "scale_inv": "_", "dweight": "+",
    "dbias": "+", "workspace": "+",
}  # fmt: skip


def norm_fwd(
    op: str, x: Any, weight: Any, bias: Any, eps: float, zero_centered_gamma: bool, residual: Any,
    fp8: tuple[Any, Any, bool, bool, Any] | None = None, any_rank: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Calls a norm's forward and returns its results by the C function's parameters."""
    function = f"{op}_fwd" if fp8 is None else f"{op}_fwd_fp8"
    x = _checks.as_rows(function, "x", x) if any_rank else _checks.matrix(function, "x", x)
    inputs = {"x": x, **_parameters(function, x, weight=weight, bias=bias)}
    if residual is not None:
        inputs["residual"] = _checks.same_shape(function, "residual", residual, x)
    names = [] if fp8 is not None else ["y"]
    if fp8 is not None:
        scale, dtype, rowwise_too, columnwise_too, amax = fp8
        name = _checks.fp8_dtype_of(op, dtype)
        inputs["scale"] = _checks.is_scalar(function, "scale", scale)
        made = copies(function, (1, 1), name, rowwise_too, columnwise_too, amax)
        names += [*made, *(() if amax is None else ("amax",)), "scale_inv"]
        if amax is not None:
            inputs["amax"] = _checks.is_scalar(function, "amax", amax)
    names += [*(["residual_sum"] if residual is not None else []), *_statistics(op, 0)]

    def body(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = dict(zip(inputs, arrays, strict=True))
        rows, cols = given["x"].shape
        results: dict[str, Any] = _statistics(op, rows)
        if fp8 is None:
            results["y"] = _S((rows, cols), x.dtype)
        else:
            results |= copies(function, (rows, cols), name, rowwise_too, columnwise_too, amax)
            results["scale_inv"] = _S(given["scale"].shape, jnp.float32)
        if residual is not None:
            results["residual_sum"] = _S((rows, cols), x.dtype)
        options = {"eps": float(eps), "zero_centered_gamma": bool(zero_centered_gamma)}
        made = call(op, function, results, **given, **options)
        return tuple(made[each] for each in names)

    rule = f"{_terms(inputs, _DIMS)} -> {_terms(names, {**_DIMS, 'amax': '^'})}"
    # An amax without a copy is for the scale of a cast, which one matrix has.
    is_measured = fp8 is not None and not (rowwise_too or columnwise_too)
    run = rowwise(function, rule, body, ranks={"r": x.ndim - 1}, one_matrix=is_measured)
    return dict(zip(names, run(*inputs.values()), strict=True))


def norm_bwd(
    op: str, dy: Any, x: Any, weight: Any, bias: Any, statistics: dict[str, Any],
    zero_centered_gamma: bool, d_residual: Any, with_dweight: bool, with_dbias: bool = False,
    any_rank: bool = False,
) -> NormGradients:  # fmt: skip
    """Calls a norm's backward."""
    function = f"{op}_bwd"
    dy = _checks.as_rows(function, "dy", dy) if any_rank else _checks.matrix(function, "dy", dy)
    x = _checks.same_shape(function, "x", x, dy)
    inputs = {"dy": dy, "x": x}
    inputs |= _parameters(function, x, weight=weight)
    for name, value in statistics.items():
        value = _checks.has_dtype(function, name, value, ["float32"])
        inputs[name] = _checks.has_shape(function, name, value, x.shape[:-1])
    if d_residual is not None:
        inputs["d_residual"] = _checks.same_shape(function, "d_residual", d_residual, x)
    dtype = next((p.dtype for p in (weight, bias) if p is not None), x.dtype)
    names = ["dx", *(["dweight"] if with_dweight else []), *(["dbias"] if with_dbias else [])]
    sums = 2 if op == "layer_norm" else 1

    def body(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = dict(zip(inputs, arrays, strict=True))
        rows, cols = given["x"].shape
        results: dict[str, Any] = {"dx": _S((rows, cols), x.dtype)}
        results |= {each: _S((cols,), dtype) for each in names[1:]}
        if names[1:]:
            shape = (scratch_sizes.norm_lines(rows, cols), sums * cols)
            results["workspace"] = _S(shape, jnp.float32)
        options = {"zero_centered_gamma": bool(zero_centered_gamma)}
        made = call(op, function, results, **given, **options)
        return tuple(made[each] for each in names)

    rule = f"{_terms(inputs, _DIMS)} -> {_terms(names, _DIMS)}"
    run = rowwise(function, rule, body, ranks={"r": x.ndim - 1})
    found = dict(zip(names, run(*inputs.values()), strict=True))
    return NormGradients(found["dx"], found.get("dweight"), found.get("dbias"))


@functools.lru_cache(maxsize=256)
def differentiable(
    op: str, eps: float, zero_centered_gamma: bool, has_residual: bool
) -> Callable[..., Any]:
    """Returns a differentiable function (x, weight, bias, residual) -> (y, residual sum or None).

    All arguments but x may be None. Gradients of weight and bias are computed only if wanted.
    """

    def forward(x: Any, weight: Any, bias: Any, residual: Any) -> dict[str, Any]:
        rows = _checks.as_rows(op, "x", x)
        if residual is not None:
            residual = _checks.same_shape(op, "residual", residual, jnp.asarray(x))
            residual = residual.reshape(rows.shape)
        made = norm_fwd(op, rows, weight, bias, eps, zero_centered_gamma, residual, any_rank=True)
        return {"rows": rows if residual is None else made["residual_sum"], **made}

    def outputs(made: dict[str, Any], shape: tuple[int, ...]) -> Any:
        total = made.get("residual_sum")
        return made["y"].reshape(shape), None if total is None else total.reshape(shape)

    @jax.custom_vjp
    def norm(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        return outputs(forward(x, weight, bias, residual), jnp.shape(x))

    def fwd(x: Any, weight: Any, bias: Any, residual: Any) -> tuple[Any, Any]:
        given = (x, weight, bias, residual)
        values: list[Any] = [None if p is None else p.value for p in given]
        made = forward(*values)
        statistics = {name: made[name] for name in ("mean", "rstd") if name in made}
        wanted = [flag(p) for p in (x, weight, bias, residual)]
        kinds = [None if v is None else Kind(jax.typeof(v)) for v in (values[0], values[3])]
        kept = (made["rows"], *values[1:3], statistics, wanted, kinds)
        return outputs(made, values[0].shape), kept

    def bwd(kept: Any, cotangents: Any) -> Any:
        rows, weight, bias, statistics, wanted, (x, residual) = kept
        dy, d_sum = (None if c is None else materialised(c) for c in cotangents)
        assert dy is not None
        made = norm_bwd(
            op, dy.reshape(rows.shape), rows, weight, bias, statistics, zero_centered_gamma,
            None if d_sum is None else d_sum.reshape(rows.shape),
            is_wanted(wanted[1]), is_wanted(wanted[2]), any_rank=True,
        )  # fmt: skip
        return (
            gradient_of(x, made.dx if is_wanted(wanted[0]) else None),
            gradient_of(weight, made.dweight),
            gradient_of(bias, made.dbias),
            gradient_of(residual, made.dx if has_residual and is_wanted(wanted[3]) else None),
        )

    norm.defvjp(fwd, bwd, symbolic_zeros=True)
    return norm
