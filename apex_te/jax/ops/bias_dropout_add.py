"""Bias, dropout and residual addition in one pass, with the mask that PyTorch's side makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import _checks
from ._checked import checked
from ._contract import run
from ._gradient import flag, gradient_of, is_wanted, kinds_of, materialised, values_of

__all__ = ["bias_dropout_add", "bias_dropout_add_bwd"]


@checked
def bias_dropout_add(
    x: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array,
    p: float,
    training: bool = True,
    *,
    seed: jax.Array | None = None,
) -> jax.Array:
    """Computes residual + dropout(x + bias, p) in float32, rounded once, differentiably.

    The mask, which is that of ``apex_te.ops.bias_dropout_add``, depends on the seed and the index
    of an element; under ``jax.vmap`` each element of the batch has the mask that it would have
    alone.

    Args:
        x: [..., cols] float32, float16 or bfloat16.
        bias: [cols] in x's dtype or float32, or None.
        residual: x's shape, in x's dtype or float32.
        p: dropout probability, from 0 to 1.
        training: False means p = 0.
        seed: a key such as ``jax.random.key(0)``, its data (uint32 [2]), or one int64 element.
            Required if 0 < p < 1, otherwise not read.

    Returns:
        An array of x's shape and residual's dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, ``p`` is out of range, or ``seed`` is missing.
    """
    name = "bias_dropout_add"
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name}: p must be from 0 to 1, got {p}")
    x = _checks.array(name, "x", x)
    residual = _checks.array(name, "residual", residual)
    if x.ndim == 0:
        raise ValueError(f"{name}: x must have at least 1 dimension, got shape []")
    _checks.has_shape(name, "residual", residual, x.shape)
    p = float(p) if training else 0.0
    halves = None
    if 0.0 < p < 1.0:
        if seed is None:
            raise ValueError(f"{name}: seed must be given for p = {p:g}, got None")
        halves = _halves(f"{name}_fwd", seed)
    return _differentiable(p)(x, bias, residual, halves)


def _halves(function: str, seed: Any) -> jax.Array:
    """Returns a seed as int32 [2]: of an int64 the low half first, of a key its two words."""
    if hasattr(seed, "dtype") and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    seed = _checks.has_dtype(function, "seed", seed, ["int64", "int32", "uint32"])
    if seed.dtype == jnp.int64:
        seed = _checks.is_scalar(function, "seed", seed, "int64")
    else:
        _checks.has_shape(function, "seed", seed, (2,))
    return jax.lax.bitcast_convert_type(seed, jnp.int32).reshape(2)


def _fwd(p: float, x: Any, bias: Any, residual: Any, seed: Any) -> jax.Array:
    """Calls the C function of the forward on arrays of any number of dimensions."""
    name = "bias_dropout_add_fwd"
    x = _checks.has_columns(name, "x", x)
    out = run(
        "bias_dropout_add", name, {"x": x, "bias": bias, "residual": residual, "seed": seed},
        ranks={"r": x.ndim - 1}, as_matrices=True, one_by_one=0.0 < p < 1.0, p=p,
    )["out"]  # fmt: skip
    return out.reshape(x.shape)


@checked
def bias_dropout_add_bwd(
    dout: jax.Array, seed: jax.Array | None, p: float, *, x_dtype: Any, bias_dtype: Any = None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Computes the gradients of ``bias_dropout_add`` with respect to x and bias.

    Args:
        dout: [..., cols], gradient of the output, in the output's dtype.
        seed: the forward's seed; None if p is 0 or 1.
        p: the forward's p.
        x_dtype: dtype of dx; None skips dx.
        bias_dtype: dtype of dbias; None skips dbias.

    Returns:
        (dx in dout's shape, dbias [cols] summed in a fixed order), each None if skipped.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape does not match, or ``seed`` is missing.
        jax.errors.JaxRuntimeError: ``p`` is out of range; raised when the program runs.
    """
    name = "bias_dropout_add_bwd"
    rows = _checks.as_matrix(name, "dout", dout)
    inputs = {"dout": rows}
    if seed is not None:
        inputs["seed"] = _halves(name, seed)
    elif 0.0 < p < 1.0:
        raise ValueError(f"{name}: seed must be given for p = {p:g}, got None")
    wanted = {"dx": ("X", x_dtype), "dbias": ("B", bias_dtype)}
    names = [each for each, (_, dtype) in wanted.items() if dtype is not None]
    if not names:
        return None, None
    found = run(
        "bias_dropout_add", name, inputs, names,
        dtypes={v: jnp.dtype(dtype).name for v, dtype in wanted.values() if dtype is not None},
        # The mask numbers the rows, of each element of a batch anew.
        one_by_one=0.0 < p < 1.0, p=float(p),
    )  # fmt: skip
    dx = found.get("dx")
    return None if dx is None else dx.reshape(jnp.shape(dout)), found.get("dbias")


@functools.lru_cache(maxsize=256)
def _differentiable(p: float) -> Callable[..., Any]:
    """Returns a differentiable function of (x, bias or None, residual, seed or None)."""

    @jax.custom_vjp
    def added(x: Any, bias: Any, residual: Any, seed: Any) -> Any:
        return _fwd(p, x, bias, residual, seed)

    def fwd(x: Any, bias: Any, residual: Any, seed: Any) -> tuple[Any, Any]:
        given = (x, bias, residual, seed)
        values = values_of(given)
        wanted = flag(x), flag(bias), flag(residual)
        return _fwd(p, *values), (kinds_of(values[:3]), values[3], wanted)

    def bwd(kept: Any, dout: Any) -> Any:
        (x, bias, residual), seed, wanted = kept
        with_dx, with_dbias, with_dresidual = map(is_wanted, wanted)
        dout = materialised(dout)
        passes_dout = p == 0.0 and dout.dtype == x.aval.dtype
        dx, dbias = bias_dropout_add_bwd(
            dout, seed, p,
            x_dtype=x.aval.dtype if with_dx and not passes_dout else None,
            bias_dtype=bias.aval.dtype if with_dbias else None,
        )  # fmt: skip
        if with_dx and passes_dout:
            dx = dout
        dresidual = dout if with_dresidual else None
        return gradient_of(x, dx), gradient_of(bias, dbias), gradient_of(residual, dresidual), None

    added.defvjp(fwd, bwd, symbolic_zeros=True)
    return added
