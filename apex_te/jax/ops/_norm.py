"""Calls of the C functions of ``layer_norm`` and ``rms_norm``, and their gradient rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _checks
from ._contract import run
from ._gradient import flag, gradient_of, is_wanted, kinds_of, materialised, values_of
from .fp8_output import FP8Output, wanted


class NormOutput(NamedTuple):
    """Results of a norm's forward over the rows of x [rows, cols].

    Float32 ``mean`` [rows] is None for ``rms_norm``; ``rstd`` [rows] is 1 / sqrt(variance + eps).
    ``residual_sum``, the sum that was normalised, is None without a residual.
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


def norm_fwd(
    op: str, x: Any, weight: Any, bias: Any, eps: float, zero_centered_gamma: bool, residual: Any,
    fp8: tuple[Any, Any, bool, bool, Any] | None = None, any_rank: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Calls a norm's forward and returns its results by the C function's parameters."""
    function = f"{op}_fwd" if fp8 is None else f"{op}_fwd_fp8"
    x = _checks.as_rows(function, "x", x) if any_rank else _checks.matrix(function, "x", x)
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    outputs, dtypes = [], {}
    if fp8 is not None:
        given["scale"], dtype, rowwise, columnwise, given["amax"] = fp8
        dtypes = {"F": _checks.fp8_dtype_of(op, dtype)}
        outputs = [*wanted(function, rowwise, columnwise, given["amax"]), "scale_inv"]
    return run(
        op, function, given, outputs, dtypes=dtypes, ranks={"r": x.ndim - 1},
        eps=float(eps), zero_centered_gamma=bool(zero_centered_gamma),
    )  # fmt: skip


def norm_bwd(
    op: str, dy: Any, x: Any, weight: Any, bias: Any, statistics: dict[str, Any],
    zero_centered_gamma: bool, d_residual: Any, with_dweight: bool, with_dbias: bool = False,
    any_rank: bool = False,
) -> NormGradients:  # fmt: skip
    """Calls a norm's backward."""
    function = f"{op}_bwd"
    dy = _checks.as_rows(function, "dy", dy) if any_rank else _checks.matrix(function, "dy", dy)
    made = run(
        op, function, {"dy": dy, "x": x, "weight": weight, "d_residual": d_residual, **statistics},
        ["dweight"] * bool(with_dweight) + ["dbias"] * bool(with_dbias),
        dtypes={} if weight is not None or bias is None else {"W": bias.dtype.name},
        ranks={"r": dy.ndim - 1}, zero_centered_gamma=bool(zero_centered_gamma),
    )  # fmt: skip
    return NormGradients(made["dx"], made.get("dweight"), made.get("dbias"))


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
        values = values_of((x, weight, bias, residual))
        made = forward(*values)
        statistics = {name: made[name] for name in ("mean", "rstd") if name in made}
        wanted = [flag(p) for p in (x, weight, bias, residual)]
        kinds = kinds_of((values[0], values[3]))
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
