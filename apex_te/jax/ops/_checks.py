"""Checks of shapes and dtypes while a program is traced, in the words of the C functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
_FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")


def array(function: str, name: str, value: Any) -> jax.Array:
    """Returns ``value``, which must be an array."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        kind = type(value).__name__
        raise TypeError(f"{function}: {name} must be a jax.Array, got {kind}")
    return jnp.asarray(value)


def has_dtype(
    function: str, name: str, value: Any, allowed: Sequence[str], shape: Sequence[int] | None = None
) -> jax.Array:
    """Returns ``value`` as an array of one of the dtypes, and of a shape if one is given."""
    found = array(function, name, value)
    if found.dtype.name not in allowed:
        wanted = " or ".join([", ".join(allowed[:-1]), allowed[-1]] if allowed[1:] else allowed)
        raise TypeError(f"{function}: {name} must have dtype {wanted}, got {found.dtype.name}")
    return found if shape is None else has_shape(function, name, found, shape)


def has_shape(function: str, name: str, value: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns ``value``, an array of the given shape."""
    if value.shape != tuple(shape):
        raise ValueError(
            f"{function}: {name} must have shape {list(shape)}, got {list(value.shape)}"
        )
    return value


def has_ndim(
    function: str, name: str, value: Any, ndim: int, dtypes: Sequence[str] = FLOATS
) -> jax.Array:
    """Returns ``value``, an array of one of the dtypes with ``ndim`` dimensions."""
    found = has_dtype(function, name, value, dtypes)
    if found.ndim != ndim:
        raise ValueError(f"{function}: {name} must have {ndim} dimensions, got {list(found.shape)}")
    return found


def matrix(function: str, name: str, value: Any, dtypes: Sequence[str] = FLOATS) -> jax.Array:
    """Returns ``value``, an array of one of the dtypes with two dimensions."""
    return has_ndim(function, name, value, 2, dtypes)


def two_dimensional(function: str, name: str, value: Any) -> jax.Array:
    """Returns ``value``, an array with two dimensions; the errors are those of PyTorch's casts."""
    found = array(function, name, value)
    if found.ndim != 2:
        raise ValueError(
            f"{function}: {name} must have 2 dimensions, got shape {list(found.shape)}"
        )
    return found


def matrix_to_cast(function: str, value: Any, name: str = "x") -> jax.Array:
    """Returns the argument ``name`` of a cast, a matrix of floats."""
    return has_dtype(function, name, two_dimensional(function, name, value), FLOATS)


def has_columns(function: str, name: str, value: Any) -> jax.Array:
    """Returns ``value``, an array of floats with at least one dimension."""
    found = has_dtype(function, name, value, FLOATS)
    if found.ndim == 0:
        raise ValueError(f"{function}: {name} must have at least 1 dimension, got shape []")
    return found


def as_matrix(function: str, name: str, value: Any) -> jax.Array:
    """Returns an array with at least one dimension as [rows, cols]; cols is its last dimension."""
    found = has_columns(function, name, value)
    return found.reshape(math.prod(found.shape[:-1]), found.shape[-1])


def as_rows(function: str, name: str, value: Any) -> jax.Array:
    """Returns an array with at least one dimension; one of [cols] becomes [1, cols]."""
    found = has_columns(function, name, value)
    return found if found.ndim > 1 else found[None]


def is_like(
    function: str, name: str, value: jax.Array, other: str, shape: tuple[int, ...]
) -> jax.Array:
    """Returns ``value``, an array of the shape of another argument."""
    if value.shape != shape:
        raise ValueError(
            f"{function}: {name} must have {other}'s shape {list(shape)}, got {list(value.shape)}"
        )
    return value


def same_shape(function: str, name: str, value: Any, like: jax.Array) -> jax.Array:
    """Returns ``value``, an array of another one's shape and dtype."""
    return has_dtype(function, name, value, [like.dtype.name], like.shape)


def is_scalar(function: str, name: str, value: Any, dtype: str = "float32") -> jax.Array:
    """Returns ``value``, an array of one element."""
    found = has_dtype(function, name, value, [dtype])
    if found.size != 1:
        raise ValueError(f"{function}: {name} must have one element, got {list(found.shape)}")
    return found


def fp8_dtype_of(function: str, dtype: Any, fnuz: bool = False) -> str:
    """Returns the name of an FP8 dtype; ``fnuz`` allows the fnuz forms, too."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in FP8 and not (fnuz and name in _FNUZ):
        forms = " or their fnuz forms" if fnuz else ""
        raise TypeError(
            f"{function}: fp8_dtype must be float8_e4m3fn or float8_e5m2{forms}, got {name}"
        )
    return name


def float_dtype_of(function: str, name: str, dtype: Any) -> np.dtype[Any]:
    """Returns a dtype of a result, which must be float32, float16 or bfloat16."""
    found = jnp.dtype(dtype)
    if found.name not in FLOATS:
        raise TypeError(
            f"{function}: {name} must have dtype float32, float16 or bfloat16, got {found.name}"
        )
    return found
