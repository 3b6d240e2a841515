"""Help for reverse-mode rules of ``jax.custom_vjp`` with symbolic zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._partition import Kind, gradient_like


def flag(primal: Any) -> tuple[()] | None:
    """Returns () if the gradient of a primal is wanted, else None; a residual without memory."""
    return () if primal is not None and primal.perturbed else None


def is_wanted(flag: tuple[()] | None) -> bool:
    """Returns True if a residual of ``flag`` says that the gradient is wanted."""
    return flag is not None


def values_of(primals: Iterable[Any]) -> list[Any]:
    """Returns the arrays of primals, None for None."""
    return [None if p is None else p.value for p in primals]


def kinds_of(arrays: Iterable[Any]) -> list[Kind | None]:
    """Returns the types of arrays as residuals, None for None."""
    return [None if x is None else Kind(jax.typeof(x)) for x in arrays]


def gradients_like(kinds: Iterable[Any], gradients: Iterable[Any]) -> list[Any]:
    """Returns gradients in the dtypes and shardings of their primals, None for None."""
    return [
        gradient_like(kind, None if each is None else each.astype(kind.aval.dtype))
        for kind, each in zip(kinds, gradients, strict=True)
    ]


def keeping_inputs(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a differentiable function that keeps its arguments, arrays or None.

    ``backward`` is a function of the cotangent, of these arguments, and of bools that say which
    gradients are wanted; it returns a gradient for each, or None.
    """
    run = jax.custom_vjp(forward)

    def fwd(*primals: Any) -> tuple[Any, Any]:
        values = values_of(primals)
        return forward(*values), (values, [flag(p) for p in primals])

    def bwd(kept: Any, cotangent: Any) -> tuple[Any, ...]:
        values, wanted = kept
        made = backward(materialised(cotangent), values, [*map(is_wanted, wanted)])
        return tuple(map(gradient_of, values, made))

    run.defvjp(fwd, bwd, symbolic_zeros=True)
    return run


def materialised(cotangent: Any) -> jax.Array:
    """Returns a cotangent as an array; a symbolic zero becomes an array of zeros."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def gradient_of(primal: Any, gradient: Any) -> Any:
    """Returns a gradient with the shape and sharding of its primal, an array or ``Kind``."""
    if gradient is None:
        return None
    shape = primal.aval.shape if isinstance(primal, Kind) else primal.shape
    return gradient_like(primal, gradient.reshape(shape))
