"""Gated activations and their gradients, cast to FP8 with one scale for each block of 1x128."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from . import _checks
from ._checked import checked
from ._contract import local_call
from ._gated_arrays import GatedArrays, call_swiglu, gated_arrays
from ._rows import rowwise as over_rows
from .block_quantize import BlockQuantized, block_quantize, scales_of_matrix
from .fp8_output import wanted

__all__ = ["swiglu_bwd_block", "swiglu_fwd_block"]

_BLOCK = 128


@checked
def swiglu_fwd_block(
    input: jax.Array,
    up: jax.Array | None,
    fp8_dtype: Any,
    *,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: str = "silu",
    axis: int = -1,
    rowwise: bool = True,
    columnwise: bool = True,
    pow2: bool = True,
    eps: float = 0.0,
    padded: bool = True,
) -> BlockQuantized:
    """Computes ``swiglu`` and casts its result [M, F] with ``block_quantize`` in one kernel.

    The result is bitwise that of the two ops, which round the intermediate result to the input's
    dtype. For float32 input the two ops run. Rows may be sharded over devices, and F, too, unless
    gate and up are concatenated to [..., 2F].

    Arguments, results and errors are as in ``apex_te.ops.swiglu_block.swiglu_fwd_block``; ``axis``
    is as in ``swiglu``: with -2 the copies are [..., F] and [F, ...]. ``padded`` is as in
    ``block_quantize``.
    """
    name = "swiglu_fwd_block"
    given = gated_arrays(name, activation, axis, input, up, bias, up_bias, to_fp8=True)
    options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "pow2": pow2,
                               "eps": eps, "padded": padded}  # fmt: skip
    if given.dtype == jnp.float32:
        _checks.fp8_dtype_of(name, fp8_dtype)
        wanted(name, rowwise, columnwise)
        values = call_swiglu(given._replace(function="swiglu_fwd"), {"out": "r f"})["out"]
        return block_quantize(values, fp8_dtype, flatten_axis=-1, **options)
    return _run(given, "r f", fp8_dtype, **options)


@checked
def swiglu_bwd_block(
    grad_output: jax.Array,
    input: jax.Array,
    up: jax.Array | None,
    fp8_dtype: Any,
    *,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: str = "silu",
    axis: int = -1,
    rowwise: bool = True,
    columnwise: bool = True,
    pow2: bool = True,
    eps: float = 0.0,
    padded: bool = True,
) -> BlockQuantized:
    """Computes the gradients of gate and up as one matrix and casts it with ``block_quantize``.

    One kernel does both, bitwise equal to ``swiglu_bwd`` and ``block_quantize``; these two run for
    float32 input and if F is not a multiple of 128. The matrix is [M, 2F], even if gate and up are
    given as two arrays; with axis -2 the copies are [..., 2, F] and [2, F, ...].

    Arguments, results and errors are as in ``apex_te.ops.swiglu_block.swiglu_bwd_block``; ``axis``
    and ``padded`` are as in ``swiglu_fwd_block``.
    """
    name = "swiglu_bwd_block"
    given = gated_arrays(name, activation, axis, input, up, bias, up_bias, grad_output, to_fp8=True)
    options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "pow2": pow2,
                               "eps": eps, "padded": padded}  # fmt: skip
    if given.dtype == jnp.float32 or given.shape[-1] % _BLOCK:
        _checks.fp8_dtype_of(name, fp8_dtype)
        wanted(name, rowwise, columnwise)
        results = {"grad_input": given.dims["input"]}
        results |= {"grad_up": "r f"} if up is not None else {}
        made = call_swiglu(given._replace(function="swiglu_bwd"), results)
        values = jnp.concatenate(list(made.values()), -1) if up is not None else made["grad_input"]
        return block_quantize(values, fp8_dtype, flatten_axis=axis, **options)
    return _run(given, "r g f" if axis == -2 else "r c", fp8_dtype, **options)


def _run(
    given: GatedArrays, dims: str, fp8_dtype: Any, *, rowwise: bool, columnwise: bool, padded: bool,
    **options: Any,
) -> BlockQuantized:  # fmt: skip
    """Calls the C function."""
    function = given.function
    dtype = _checks.fp8_dtype_of(function, fp8_dtype)
    lines, *columns = dims.split()
    names = [
        full
        for side in wanted(function, rowwise, columnwise)
        for full in (side, f"{side}_scale_inv")
    ]
    results = {
        "rowwise": dims,
        "rowwise_scale_inv": " ".join([*columns[:-1], f"{columns[-1]}/{_BLOCK}", lines]),
        "columnwise": " ".join([*columns, lines]),
        "columnwise_scale_inv": " ".join([f"{lines}/{_BLOCK}", *columns]),
    }
    scalars = {
        "activation": given.code,
        "pow2": bool(options["pow2"]),
        "eps": float(options["eps"]),
    }

    def body(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        tensors = dict(zip(given.arrays, arrays, strict=True))
        rows, width = arrays[0].shape[0], math.prod(tensors["input"].shape[1:])
        tensors["input"] = tensors["input"].reshape(rows, width)
        if "bias" in tensors:
            tensors["bias"] = tensors["bias"].reshape(-1)
        half = width if "up" in tensors else width // 2
        extents = {"r": rows, "f": half, "c": 2 * half, "g": 2}
        made = local_call("swiglu_block", function, tensors, names[::2], {"F": dtype}, **scalars)
        return tuple(made[each].reshape(_shape(results[each], extents)) for each in names)

    read = ", ".join(f"{name}: {each}" for name, each in given.dims.items())
    rule = f"{read} -> {', '.join(f'{name}: {results[name]}' for name in names)}"
    found = over_rows(function, rule, body, **given.options)(*given.arrays.values())
    made = dict(zip(names, found, strict=True))
    if padded:
        rows = math.prod(given.arrays["input"].shape[: given.options["ranks"]["r"]])
        cols = given.shape[-1] if columns == ["f"] else 2 * given.shape[-1]
        made = scales_of_matrix(made, rows, cols, 1)
    return BlockQuantized(*(made.get(each) for each in BlockQuantized._fields))


def _shape(dims: str, extents: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of an array with the given dimensions in a rule."""
    found = []
    for each in dims.split():
        name, _, block = each.partition("/")
        found.append(-(-extents[name] // int(block or 1)))
    return tuple(found)
