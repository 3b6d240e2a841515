"""Checked arrays of gate and up, and calls of the C functions that read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime.op_options import GATE, ClampedSwiglu, gate_arguments
from . import _checks
from ._contract import local_call
from ._rows import rowwise_by_name


class GatedArrays(NamedTuple):
    """Checked arrays of a C function by parameter, and their dimensions in a rule.

    These are "r" rows, "f" F, "c" 2F and "g f" [2, F]. ``gate`` are options of the C function,
    ``options`` those of the rule, ``shape`` is the output's, and ``bias_dims`` those of a bias for
    gate and up, which the caller gives as [2F] if ``is_flat``, else as [2, F].
    """

    function: str
    gate: dict[str, Any]
    arrays: dict[str, jax.Array]
    dims: dict[str, str]
    options: dict[str, Any]
    shape: tuple[int, ...]
    dtype: Any
    bias_dims: str
    is_flat: bool

    def bias_gradient(self, dbias: jax.Array | None) -> jax.Array | None:
        """Returns the gradient of the biases in the caller's shape; None gives None."""
        return dbias if dbias is None or not self.is_flat else dbias.reshape(-1)


def gated_arrays(
    function: str,
    activation: str | ClampedSwiglu,
    axis: int,
    input: Any,
    up: Any,
    bias: Any,
    up_bias: Any,
    grad_output: Any = None,
    to_fp8: bool = False,
) -> GatedArrays:
    """Checks the arrays of a gated activation and returns them as its C function reads them."""
    gate: dict[str, Any] = dict(zip(GATE, gate_arguments(function, activation), strict=True))
    rows, shape = _gate_and_up(function, input, up, axis, to_fp8)
    dims = {"grad_output": "r f", "input": "r g f" if axis == -2 else "r c", "up": "r f"}
    if up is not None:
        dims["input"] = "r f"
    lead = rows.shape[:-2] if axis == -2 else rows.shape[:-1]
    arrays = {}
    if grad_output is not None:
        dy = _checks.array(function, "grad_output", grad_output)
        dy = _checks.has_shape(function, "grad_output", dy, shape)
        dy = _checks.has_dtype(function, "grad_output", dy, [rows.dtype.name])
        arrays["grad_output"] = dy.reshape(*lead, shape[-1])
    arrays["input"] = rows
    if up is not None:
        up = _checks.has_dtype(function, "up", up, [rows.dtype.name])
        arrays["up"] = up.reshape(rows.shape)
    dims["bias"] = "c" if dims["input"] == "r c" else "g f"
    bias_dims = dims["bias"]
    if up_bias is not None:
        dims |= {"bias": "f", "up_bias": "f"}
    arrays |= _biases(function, bias, up_bias, rows.dtype, shape[-1], axis, bias_dims)
    # FP8 gradients of gate and up in two arrays lie side by side: devices share the rows alone.
    only_rows = axis == -1 and (up is None or (to_fp8 and grad_output is not None))
    options = {"split": "r" if only_rows else "r f", "ranks": {"r": len(lead)}}
    dims = {name: dims[name] for name in arrays}
    return GatedArrays(
        function, gate, arrays, dims, options, shape, rows.dtype, bias_dims, axis == -1
    )  # fmt: skip


def _gate_and_up(
    function: str, input: Any, up: Any, axis: int, to_fp8: bool
) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns the input with a dimension of rows at least, and the output's shape."""
    x = _checks.array(function, "input", input)
    shape = x.shape
    if axis == -2:
        if len(shape) < 2 or shape[-2] != 2:
            raise ValueError(f"{function}: input must have shape [..., 2, F], got {list(shape)}")
        if up is not None:
            raise ValueError(f"{function}: up must be None with axis -2, got an array")
        x = _checks.has_dtype(function, "input", x, _checks.FLOATS)
        return x if x.ndim > 2 else x[None], (*shape[:-2], shape[-1])
    if axis != -1:
        raise ValueError(f"{function}: axis must be -1 or -2, got {axis}")
    if up is not None and jnp.shape(up) != shape:
        raise ValueError(
            f"{function}: up must have the shape of input, {list(shape)}, got {list(jnp.shape(up))}"
        )
    rows = (_checks.as_matrix if to_fp8 else _checks.as_rows)(function, "input", x)
    if up is not None:
        return rows, shape
    if shape[-1] % 2:
        raise ValueError(
            f"{function}: input must have an even number of columns without up, got"
            f" {[math.prod(shape[:-1]), shape[-1]]}"
        )
    return rows, (*shape[:-1], shape[-1] // 2)


def _biases(
    function: str, bias: Any, up_bias: Any, dtype: Any, cols: int, axis: int, dims: str
) -> dict[str, jax.Array]:
    """Returns the biases that are given, by parameter."""
    found = {}
    if up_bias is not None:
        if bias is None:
            raise ValueError(f"{function}: bias must be given with up_bias, got None")
        if axis == -2:
            raise ValueError(f"{function}: up_bias must be None with axis -2, got an array")
        found["up_bias"] = _checks.has_dtype(function, "up_bias", up_bias, [dtype.name], (cols,))
    if bias is not None:
        both = (2, cols) if axis == -2 else (2 * cols,)
        shape = both if up_bias is None else (cols,)
        bias = _checks.has_dtype(function, "bias", bias, [dtype.name], shape)
        is_pair = up_bias is None and dims == "g f"
        found["bias"] = bias.reshape(2, cols) if is_pair else bias
    return found


def call_gated(
    given: GatedArrays,
    results: Mapping[str, str],
    extra: Mapping[str, jax.Array] | None = None,
    fp8_dtype: str | None = None,
    op: str = "swiglu",
    **options: Any,
) -> dict[str, jax.Array]:
    """Calls a C function of gated activations; ``results`` have dimensions in a rule."""
    halves = 1 if "up" in given.arrays else 2
    dtypes = {"F": fp8_dtype} if fp8_dtype else {}

    def body(tensors: dict[str, jax.Array]) -> dict[str, jax.Array]:
        rows, width = tensors["input"].shape[0], math.prod(tensors["input"].shape[1:])
        tensors["input"] = tensors["input"].reshape(rows, width)
        if "bias" in tensors:
            tensors["bias"] = tensors["bias"].reshape(-1)
        cols = width // halves
        extents = {"r": rows, "f": cols, "c": 2 * cols, "g": 2}

        def shaped(x: jax.Array, dims: str) -> jax.Array:
            if dims in ("_", "^"):
                return x
            words = (each.partition("/") for each in dims.removeprefix("+").split())
            return x.reshape([-(-extents[name] // int(block or 1)) for name, _, block in words])

        made = local_call(op, given.function, tensors, results, dtypes, **given.gate, **options)
        return {name: shaped(made[name], dims) for name, dims in results.items()}

    inputs = {**given.arrays, **(extra or {})}
    return rowwise_by_name(given.function, inputs, given.dims, results, body, **given.options)
