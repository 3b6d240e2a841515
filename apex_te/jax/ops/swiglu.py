"""Gated activations act(gate) * up: SwiGLU, GeGLU, ReGLU and GLU, also with a fused cast to FP8."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...runtime import scratch_sizes
from ...runtime.op_options import ACTIVATIONS, gated_activation_number
from .._call import call
from . import _checks
from ._gradient import flag, gradient_of, is_wanted, materialised
from ._rows import rowwise as over_rows
from .fp8_output import FP8Output

__all__ = [
    "ACTIVATIONS",
    "SwigluFP8Grads",
    "SwigluGrads",
    "swiglu",
    "swiglu_bwd",
    "swiglu_bwd_fp8",
    "swiglu_fwd",
    "swiglu_fwd_fp8",
]

_S = jax.ShapeDtypeStruct


class SwigluGrads(NamedTuple):
    """Gradients of ``swiglu``.

    Attributes:
        input: gradient of ``input``, of its shape and dtype.
        up: gradient of ``up``; None if ``up`` was not given.
        dbias: [2F] in the input's dtype, the gradients of the gate's and up's biases side by side,
            or [2, F] with axis -2; None if not asked for.
    """

    input: jax.Array
    up: jax.Array | None
    dbias: jax.Array | None


class SwigluFP8Grads(NamedTuple):
    """Gradients of ``swiglu``, of which the inputs' are in FP8.

    Attributes:
        output: FP8 data of the gradients of gate and up side by side, a matrix [M, 2F]; with axis
            -2 copies [..., 2, F] and [2, F, ...].
        dbias: as in ``SwigluGrads``, not in FP8.
    """

    output: FP8Output
    dbias: jax.Array | None


def swiglu(
    input: jax.Array,
    up: jax.Array | None = None,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    *,
    activation: str = "silu",
    axis: int = -1,
) -> jax.Array:
    """Computes the gated activation act(gate) * up in float32, differentiably.

    Args:
        input: gate and up, gate first. float32, float16 or bfloat16. [..., 2F] side by side, or
            [..., 2, F], of which devices can share F. With ``up`` the gate alone, [..., F].
        up: [..., F], of the gate's shape and dtype.
        bias: in the input's dtype, added before: [F] for the gate if ``up_bias`` is given, else
            [2F] for gate and up, [2, F] with axis -2.
        up_bias: [F] for up, in the input's dtype.
        activation: "silu" (SwiGLU), "gelu" (GeGLU, tanh form), "gelu_erf", "relu" (ReGLU) or
            "sigmoid" (GLU).
        axis: -1 for [..., 2F], -2 for [..., 2, F], which goes without ``up`` and ``up_bias``.

    Returns:
        [..., F] in the input's dtype.

    Raises:
        TypeError: a dtype that is not listed or differs.
        ValueError: a shape, activation or axis that does not match.
    """
    gated_activation_number("swiglu_fwd", activation)
    return _differentiable(activation, axis)(input, up, bias, up_bias)


@functools.cache
def _differentiable(activation: str, axis: int) -> Callable[..., Any]:
    options: dict[str, Any] = {"activation": activation, "axis": axis}

    @jax.custom_vjp
    def gated(input: Any, up: Any, bias: Any, up_bias: Any) -> Any:
        return swiglu_fwd(input, up, bias, up_bias, **options)

    def fwd(*primals: Any) -> tuple[Any, Any]:
        values = tuple(None if p is None else p.value for p in primals)
        return swiglu_fwd(*values, **options), (values, [flag(p) for p in primals[2:]])

    def bwd(kept: Any, dy: Any) -> Any:
        values, flags = kept
        with_dbias = any(map(is_wanted, flags))
        x, up, bias, up_bias = values
        given = _checked("swiglu_bwd", activation, axis, x, up, bias, up_bias, materialised(dy))
        made = _gradients(given, with_dbias)
        dbias, dup_bias = made.dbias, None
        if dbias is not None and up_bias is not None:
            dbias, dup_bias = jnp.split(dbias, 2)
        return (
            gradient_of(x, made.input),
            gradient_of(up, made.up),
            gradient_of(bias, dbias),
            gradient_of(up_bias, dup_bias),
        )

    gated.defvjp(fwd, bwd, symbolic_zeros=True)
    return gated


def swiglu_fwd(
    input: jax.Array,
    up: jax.Array | None = None,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    *,
    activation: str = "silu",
    axis: int = -1,
) -> jax.Array:
    """Computes ``swiglu``, whose arguments it takes, without a gradient."""
    given = _checked("swiglu_fwd", activation, axis, input, up, bias, up_bias)
    return _run(given, {"out": "r f"})["out"].reshape(given.shape)


def swiglu_fwd_fp8(
    input: jax.Array,
    up: jax.Array | None,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: str = "silu",
    axis: int = -1,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
) -> FP8Output:
    """Quantizes the float32 result y of ``swiglu``: q = saturating_cast(y * scale).

    Args:
        input, up, bias, up_bias, activation, axis: as in ``swiglu``. M is the product of the sizes
            of y but the last.
        scale: one float32 element.
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        rowwise: make [M, F]; with axis -2 [..., F].
        columnwise: make [F, M]; with axis -2 [F, ...].
        amax: one float32 element, of which and of max |y| the result's ``amax`` is the larger; NaN
            counts as largest. With it ``rowwise`` and ``columnwise`` may both be False.

    Raises:
        TypeError: the cases of ``swiglu``.
        ValueError: the cases of ``swiglu``.
    """
    given = _checked("swiglu_fwd_fp8", activation, axis, input, up, bias, up_bias, to_fp8=True)
    sides = {"rowwise": "r f" if rowwise else None, "columnwise": "f r" if columnwise else None}
    return _run_to_fp8(given, sides, scale, fp8_dtype, amax, False)[0]


def swiglu_bwd(
    grad_output: jax.Array,
    input: jax.Array,
    up: jax.Array | None = None,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    *,
    activation: str = "silu",
    axis: int = -1,
    with_dbias: bool = False,
) -> jax.Array | SwigluGrads:
    """Computes the gradients of ``swiglu`` with respect to gate, up and biases.

    Args:
        grad_output: [..., F], gradient of the output.
        input, up, bias, up_bias, activation, axis: as in ``swiglu``.
        with_dbias: also return the gradients of the biases, even if none are given: the column
            sums of the gradients of gate and up, added in float32 in a fixed order.

    Returns:
        The gradients, where ``up`` is given or ``with_dbias`` set; else the input's alone.
    """
    given = _checked("swiglu_bwd", activation, axis, input, up, bias, up_bias, grad_output)
    made = _gradients(given, with_dbias)
    return made.input if up is None and not with_dbias else made


def swiglu_bwd_fp8(
    grad_output: jax.Array,
    input: jax.Array,
    up: jax.Array | None,
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: str = "silu",
    axis: int = -1,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: jax.Array | None = None,
    with_dbias: bool = False,
) -> SwigluFP8Grads:
    """Quantizes the float32 gradients of gate and up, side by side in a matrix [M, 2F].

    The matrix has this form if gate and up are given as two arrays, too.

    Args:
        grad_output, with_dbias: as in ``swiglu_bwd``.
        input, up, bias, up_bias, activation, axis, scale, fp8_dtype: as in ``swiglu_fwd_fp8``.
        rowwise: make [M, 2F]; with axis -2 [..., 2, F].
        columnwise: make [2F, M]; with axis -2 [2, F, ...].
        amax: one float32 element, of which and of the gradients' magnitudes the result's ``amax``
            is the largest.
    """
    given = _checked(
        "swiglu_bwd_fp8", activation, axis, input, up, bias, up_bias, grad_output, to_fp8=True
    )
    row, column = ("r g f", "g f r") if axis == -2 else ("r c", "c r")
    sides = {"rowwise": row if rowwise else None, "columnwise": column if columnwise else None}
    output, dbias = _run_to_fp8(given, sides, scale, fp8_dtype, amax, with_dbias)
    return SwigluFP8Grads(output, given.bias_gradient(dbias))


class _Given(NamedTuple):
    """Checked tensors that a function of the op reads, with their dimensions in a rule.

    Attributes:
        function: name of the C function.
        code: number of the activation.
        arrays: its tensors by parameter.
        dims: their dimensions in a rule: "r" rows, "f" F, "c" 2F, "g f" [2, F].
        options: "split" and "ranks" of the rule.
        shape: shape of the output.
        dtype: dtype of the tensors.
        bias_dims: dimensions of a bias, or its gradient, for gate and up.
        is_flat: True if the caller's such bias is [2F] and not [2, F].
    """

    function: str
    code: int
    arrays: dict[str, jax.Array]
    dims: dict[str, str]
    options: dict[str, Any]
    shape: tuple[int, ...]
    dtype: Any
    bias_dims: str
    is_flat: bool

    def bias_gradient(self, dbias: jax.Array | None) -> jax.Array | None:
        """Returns the gradient of the biases of gate and up in the caller's shape."""
        return dbias if dbias is None or not self.is_flat else dbias.reshape(-1)


def _checked(
    function: str,
    activation: str,
    axis: int,
    input: Any,
    up: Any,
    bias: Any,
    up_bias: Any,
    grad_output: Any = None,
    to_fp8: bool = False,
) -> _Given:
    """Returns what a function reads after its checks.

    Args:
        function: name of the C function.
        activation, axis, input, up, bias, up_bias: as in ``swiglu``.
        grad_output: gradient of the output, or None.
        to_fp8: an input with axis -1 is taken as a matrix.

    Raises:
        TypeError: a dtype that is not listed or differs.
        ValueError: a shape, activation or axis that does not match.
    """
    code = gated_activation_number(function, activation)
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
    return _Given(
        function, code, arrays, dims, options, shape, rows.dtype, bias_dims, axis == -1
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
    """Returns the biases that are given, by parameter.

    Args:
        function: name of the C function.
        bias, up_bias, axis: as in ``swiglu``.
        dtype: dtype of the input.
        cols: F.
        dims: dimensions of a bias for gate and up in the rule.
    """
    found = {}
    if up_bias is not None:
        if bias is None:
            raise ValueError(f"{function}: bias must be given with up_bias, got None")
        if axis == -2:
            raise ValueError(f"{function}: up_bias must be None with axis -2, got an array")
        up_bias = _checks.has_dtype(function, "up_bias", up_bias, [dtype.name])
        found["up_bias"] = _checks.has_shape(function, "up_bias", up_bias, (cols,))
    if bias is not None:
        both = (2, cols) if axis == -2 else (2 * cols,)
        bias = _checks.has_dtype(function, "bias", bias, [dtype.name])
        bias = _checks.has_shape(function, "bias", bias, both if up_bias is None else (cols,))
        is_pair = up_bias is None and dims == "g f"
        found["bias"] = bias.reshape(2, cols) if is_pair else bias
    return found


def _run(
    given: _Given,
    results: Mapping[str, str],
    extra: Mapping[str, jax.Array] | None = None,
    fp8_dtype: Any = None,
) -> dict[str, jax.Array]:
    """Calls the C function and returns its results.

    Args:
        given: what it reads.
        results: dimensions of the results in the rule, by parameter.
        extra: further tensors that it reads, of one element.
        fp8_dtype: FP8 dtype of the copies.
    """
    extra = extra or {}
    inputs = {**given.arrays, **extra}
    halves = 1 if "up" in given.arrays else 2
    dtypes = dict.fromkeys(("rowwise", "columnwise"), fp8_dtype)

    def body(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        tensors = dict(zip(inputs, arrays, strict=True))
        rows, width = arrays[0].shape[0], math.prod(tensors["input"].shape[1:])
        tensors["input"] = tensors["input"].reshape(rows, width)
        if "bias" in tensors:
            tensors["bias"] = tensors["bias"].reshape(-1)
        cols = width // halves
        extents = {"r": rows, "f": cols, "c": 2 * cols, "g": 2}

        def shape(dims: str) -> tuple[int, ...]:
            return tuple(extents[each] for each in dims.replace("+", "").split())

        # The function knows of no [2, F].
        asked = {
            name: _S(shape(dims.replace("g f", "c")), dtypes.get(name, given.dtype))
            for name, dims in results.items()
            if dims not in ("_", "^")
        }
        if "scale_inv" in results:
            asked["scale_inv"] = _S(tensors["scale"].shape, jnp.float32)
        if "dbias" in results:
            lines = scratch_sizes.lines(rows, scratch_sizes.ACTIVATION_ROWS)
            asked["workspace"] = _S((lines, 2 * cols), jnp.float32)
        made = call("swiglu", given.function, asked, **tensors, activation=given.code)
        return tuple(
            made[name] if dims in ("_", "^") else made[name].reshape(shape(dims))
            for name, dims in results.items()
        )

    read = [f"{name}: {dims}" for name, dims in given.dims.items()] + [f"{n}: _" for n in extra]
    rule = f"{', '.join(read)} -> {', '.join(f'{n}: {dims}' for n, dims in results.items())}"
    # An amax without a copy is for the scale of a cast, which one matrix has.
    is_measured = "amax" in results and not {"rowwise", "columnwise"} & {*results}
    run = over_rows(given.function, rule, body, one_matrix=is_measured, **given.options)
    return dict(zip(results, run(*inputs.values()), strict=True))


def _gradients(given: _Given, with_dbias: bool) -> SwigluGrads:
    """Computes the gradients of the inputs, and those of the biases if they are wanted."""
    results = {"grad_input": given.dims["input"]}
    results |= {"grad_up": "r f"} if "up" in given.arrays else {}
    results |= {"dbias": f"+ {given.bias_dims}"} if with_dbias else {}
    made = _run(given, results)
    lead, last = given.shape[:-1], given.shape[-1]
    whole = (*lead, last) if "up" in given.arrays else (*lead, 2 * last)
    whole = whole if given.is_flat else (*lead, 2, last)
    up = made["grad_up"].reshape(whole) if "grad_up" in made else None
    return SwigluGrads(
        made["grad_input"].reshape(whole), up, given.bias_gradient(made.get("dbias"))
    )


def _run_to_fp8(
    given: _Given,
    sides: Mapping[str, str | None],
    scale: Any,
    fp8_dtype: Any,
    amax: Any,
    with_dbias: bool,
) -> tuple[FP8Output, jax.Array | None]:
    """Calls a function with FP8 output and returns the FP8 data and the bias gradient or None.

    Args:
        given: what the function reads.
        sides: dimensions of both copies, None for one that is not wanted.
        scale, fp8_dtype, amax, with_dbias: as in ``swiglu_bwd_fp8``.
    """
    name = given.function
    dtype = _checks.fp8_dtype_of(name, fp8_dtype)
    if amax is None and not any(sides.values()):
        raise ValueError(f"{name}: rowwise or columnwise must be True, got False for both")
    extra = {"scale": _checks.is_scalar(name, "scale", scale)}
    results = {side: dims for side, dims in sides.items() if dims} | {"scale_inv": "_"}
    if amax is not None:
        extra["amax"] = _checks.is_scalar(name, "amax", amax)
        results["amax"] = "^"
    if with_dbias:
        results["dbias"] = f"+ {given.bias_dims}"
    out = _run(given, results, extra, jnp.dtype(dtype))
    return FP8Output(*(out.get(each) for each in FP8Output._fields)), out.get("dbias")
