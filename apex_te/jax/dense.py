"""Dense layers as functions: x @ kernel + bias, in FP8 inside of a region."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..recipe import Recipe
from . import fp8_state
from ._partition import Kind, gradient_like, product_sharding
from .first_step import with_first_scale
from .grouped_dense import grouped_dense
from .ops._gradient import flag, is_wanted, materialised
from .ops._rows import rowwise
from .places import Axes, placed
from .quantize import QuantizerSet, entered, refuse
from .quantizer import Quantized, quantizer_of
from .region import active_recipe

__all__ = ["dense", "grouped_dense"]

# Slots of the FP8 state of a layer with one product.
_INPUT, _WEIGHT, _GRAD = 0, 1, 0


def dense(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (0,)),
    transpose_batch_sequence: bool = False, input_axes: Axes | None = None,
    kernel_axes: Axes | None = None, output_axes: Axes | None = None,
    collective_op_set: None = None, quantizer_set: QuantizerSet | None = None,
) -> jax.Array:  # fmt: skip
    """Computes x @ kernel + bias, differentiably.

    Any dimension may be sharded over a mesh: each device computes its shard, sums over a sharded
    dimension are completed across devices, and an amax is that of the whole array.

    Args:
        x: array of float32, float16 or bfloat16.
        kernel: array, cast to x's dtype.
        bias: the kernel's dimensions that are not contracted, in their order, or None.
        contracting_dims: dimensions of ``x``, and as many of the kernel, that are summed over.
        transpose_batch_sequence: no effect; the result is the same for both layouts.
        input_axes, kernel_axes, output_axes: logical axes to which ``x``, the kernel and the result
            are constrained under Flax's rules; None does not constrain them.
        collective_op_set: must be None.
        quantizer_set: recipe and FP8 state; ``noop_quantizer_set`` multiplies in x's dtype. None
            uses the region's recipe, which must keep no state.

    Returns:
        The dimensions of ``x``, then those of the kernel, that are not contracted, in x's dtype.

    Raises:
        TypeError: ``x`` has a dtype that is not listed, or ``quantizer_set`` another type.
        ValueError: a shape does not match, ``quantizer_set`` is None in a region with delayed
            scaling, or a device's shard ends within a block that shares a scale.
        NotImplementedError: ``collective_op_set`` is not None.
    """
    refuse("dense", collective_op_set=collective_op_set)
    left, right = (
        _dimensions(name, each, array)
        for name, each, array in zip(("x", "kernel"), contracting_dims, (x, kernel), strict=True)
    )
    if len(left) != len(right):
        raise ValueError(
            "dense: contracting_dims must be as many dimensions of x as of kernel, got"
            f" {contracting_dims}"
        )
    with entered("dense", quantizer_set) as state:
        x, kernel = placed(x, input_axes), placed(kernel, kernel_axes)
        kernel = kernel.astype(x.dtype)
        bias = None if bias is None else bias.astype(x.dtype)
        rest = [i for i in range(x.ndim) if i not in left]
        features = [i for i in range(kernel.ndim) if i not in right]
        x, kernel = x.transpose(*rest, *left), kernel.transpose(*right, *features)
        y = dense_with_state(x, kernel, bias, state, inner=len(left))
        return placed(y, output_axes)


def _dimensions(name: str, dims: Sequence[int], array: Any) -> list[int]:
    """Returns the contracted dimensions of an array, counted from 0."""
    found = [each + array.ndim if each < 0 else each for each in dims]
    if not found or len({*found}) < len(found) or not {*found} <= {*range(array.ndim)}:
        raise ValueError(
            f"dense: contracting_dims must be different dimensions of {name} {list(array.shape)},"
            f" got {tuple(dims)}"
        )
    return found


def dense_with_state(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    state: Mapping[str, jax.Array] | None = None,
    gemm: int = 0,
    inner: int = 1,
) -> jax.Array:
    """Computes x @ kernel + bias, with FP8 GEMMs inside of an enabled ``fp8_autocast`` region.

    Differentiable. The gradient with respect to ``state`` is the state after the step.

    Args:
        x: [..., in...] float32, float16 or bfloat16.
        kernel: [in..., out...] in x's dtype.
        bias: [out...] or None.
        state: FP8 state of the layer, as ``fp8_state.initial`` makes it; needed for delayed
            scaling, otherwise ignored.
        gemm: number of this GEMM among those of the state.
        inner: number of contracted dimensions, the last ones of x and the first ones of the kernel.
    """
    fits = 0 < inner <= min(x.ndim, kernel.ndim - 1)
    if not fits or x.shape[x.ndim - inner :] != kernel.shape[:inner]:
        raise ValueError(
            f"dense: x and kernel must be [..., in] and [in, out], got {list(x.shape)} and"
            f" {list(kernel.shape)}"
        )
    if x.dtype != kernel.dtype:
        raise TypeError(f"dense: kernel must have x's dtype {x.dtype}, got {kernel.dtype}")
    recipe = active_recipe()
    if recipe is None:
        y = jax.lax.dot_general(
            x, kernel, ((tuple(range(x.ndim - inner, x.ndim)), tuple(range(inner))), ((), ())),
            out_sharding=product_sharding(x, kernel, inner),
        )  # fmt: skip
        return y if bias is None else y + bias.astype(y.dtype)
    quantizer = quantizer_of(recipe)
    if not quantizer.keeps_state:
        state = None
    elif state is None:
        raise ValueError("dense: state must be given with DelayedScaling, got None")
    shape = (*x.shape[: x.ndim - inner], *kernel.shape[inner:])
    if x.ndim == inner:
        x = x[None]
    y = _fp8_dense(recipe, gemm, inner)(x, kernel, bias, None if state is None else dict(state))
    return y.reshape(shape)


def _copy(q: Quantized, columnwise: bool) -> tuple[jax.Array, jax.Array]:
    """Returns FP8 data and scales of one copy."""
    pair = (
        (q.columnwise, q.columnwise_scale_inv) if columnwise else (q.rowwise, q.rowwise_scale_inv)
    )
    assert pair[0] is not None
    assert pair[1] is not None
    return pair[0], pair[1]


@functools.lru_cache(maxsize=64)
def _fp8_dense(recipe: Recipe, gemm: int, inner: int) -> Callable[..., jax.Array]:
    """Returns the differentiable layer of a recipe with one part of the state."""
    quantizer = quantizer_of(recipe)
    high_precision_wgrad = recipe.override_linear_precision[2]  # type: ignore[attr-defined]

    def scale_of(state: Any, way: str, slot: int) -> Any:
        return None if state is None else state[f"scale_{way}"][slot : slot + 1]

    def cast(x: Any, role: str, columns: int, scale: Any, **wanted: bool) -> Quantized:
        """Casts an array whose last ``columns`` dimensions are columns."""
        made = quantizer.cast(x, role, scale, flatten_axis=-columns, **wanted)
        return made if role == "grad" else made.named()

    def multiply(product: str, a: Any, b: Any, depth: int, dtype: Any, bias: Any = None) -> Any:
        """Multiplies two copies, whose last ``depth`` dimensions are contracted."""
        return quantizer.multiply(product, a, b, out_dtype=dtype, bias=bias, inner=depth)

    def enter(state: Any) -> Any:
        if state is None:
            return None
        part = fp8_state.of_gemm(fp8_state.as_floats(state), gemm)
        return fp8_state.entered(part, recipe)  # type: ignore[arg-type]

    def forward(x: Any, kernel: Any, bias: Any, state: Any, keep: tuple[bool, bool]) -> Any:
        """Returns y and the casts of x and kernel, with the copies that backward needs."""
        x_columnwise, kernel_rowwise = keep
        qx = cast(
            x, "input", inner, scale_of(state, "fwd", _INPUT), rowwise=True, columnwise=x_columnwise
        )
        qk = cast(
            kernel, "weight", kernel.ndim - inner, scale_of(state, "fwd", _WEIGHT),
            rowwise=kernel_rowwise, columnwise=True,
        )  # fmt: skip
        y = multiply("fprop", _copy(qx, False), _copy(qk, True), inner, x.dtype, bias)
        return y, qx, qk

    @jax.custom_vjp
    def layer(x: Any, kernel: Any, bias: Any, state: Any) -> Any:
        return forward(x, kernel, bias, enter(state), (False, False))[0]

    def fwd(x: Any, kernel: Any, bias: Any, state: Any) -> Any:
        wanted = flag(x), flag(kernel), flag(bias)
        x_value, kernel_value = x.value, kernel.value
        bias_value = None if bias is None else bias.value
        moved = before = None
        if state is not None:
            before = fp8_state.differentiated(state, (kernel, bias))
            moved = enter(before)
            for slot, each in ((_INPUT, x_value), (_WEIGHT, kernel_value)):
                moved = with_first_scale(moved, "fwd", slot, each, recipe)
        keep = is_wanted(wanted[1]) and not high_precision_wgrad, is_wanted(wanted[0])
        y, qx, qk = forward(x_value, kernel_value, bias_value, moved, keep)
        if moved is not None:
            history = fp8_state.with_staged(moved["amax_history_fwd"], qx.amax, qk.amax)
            moved = {**moved, "amax_history_fwd": history}
        kept_x = _copy(qx, True) if keep[0] else x_value if is_wanted(wanted[1]) else None
        kept_kernel = _copy(qk, False) if keep[1] else None
        primals = (x_value, kernel_value, bias_value)
        kinds = [None if v is None else Kind(jax.typeof(v)) for v in primals]
        return y, (wanted, kinds, kept_x, kept_kernel, moved, before)

    def bwd(kept: Any, dy: Any) -> Any:
        wanted, (x, kernel, bias), kept_x, kept_kernel, state, before = kept
        dy = materialised(dy)
        with_dx, with_dkernel, with_dbias = map(is_wanted, wanted)
        columnwise = with_dkernel and not high_precision_wgrad
        dx = dkernel = None
        state = with_first_scale(state, "bwd", _GRAD, dy, recipe)
        columns = len(kernel.aval.shape) - inner
        qdy = cast(
            dy, "grad", columns, scale_of(state, "bwd", _GRAD),
            rowwise=with_dx or not columnwise, columnwise=columnwise, with_dbias=with_dbias,
        )  # fmt: skip
        if with_dx:
            dx = multiply("dgrad", _copy(qdy, False), kept_kernel, columns, x.aval.dtype)
        if columnwise:
            rows = dy.ndim - columns
            dkernel = multiply("wgrad", kept_x, _copy(qdy, True), rows, kernel.aval.dtype)
        elif with_dkernel:
            dkernel = _precise_wgrad(kept_x, dy, inner, columns)
        dbias = None if qdy.dbias is None else qdy.dbias.astype(bias.aval.dtype)
        if state is not None:
            assert qdy.amax is not None
            history = fp8_state.with_staged(state["amax_history_bwd"], qdy.amax)
            state = fp8_state.cotangent({**state, "amax_history_bwd": history}, gemm, before)
        return (
            gradient_like(x, dx),
            gradient_like(kernel, dkernel),
            gradient_like(bias, dbias),
            state,
        )

    layer.defvjp(fwd, bwd, symbolic_zeros=True)
    return layer


def _precise_wgrad(x: jax.Array, dy: jax.Array, inner: int, columns: int) -> jax.Array:
    """Computes x.T @ dy of x [..., in...] and dy [..., out...] in float32, in dy's dtype."""

    def body(x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
        exact = jax.lax.Precision.HIGHEST
        return (jnp.matmul(x.T, dy, precision=exact, preferred_element_type=jnp.float32),)

    rule, ranks = "x: r k, dy: r n -> dkernel: + k n", {"r": dy.ndim - columns, "k": inner}
    run = rowwise("wgrad", rule, body, split="r k n", ranks={**ranks, "n": columns})
    return run(x, dy)[0].astype(dy.dtype)
