"""Dense layer as a function: x @ kernel + bias, in FP8 inside of a region."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..recipe import Recipe
from . import state as fp8_state
from .first_step import with_first_scale
from .ops._gradient import flag, gradient_of, is_wanted, materialised
from .quantizer import Quantized, quantizer_of
from .region import active_recipe

__all__ = ["dense"]

# Slots of the FP8 state of a layer with one product.
_INPUT, _WEIGHT, _GRAD = 0, 1, 0


def dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    state: Mapping[str, jax.Array] | None = None,
    gemm: int = 0,
) -> jax.Array:
    """Computes x @ kernel + bias, with FP8 products where an ``fp8_autocast`` region is enabled.

    Differentiable. The gradient with respect to ``state`` is the state after the step.

    Args:
        x: [..., in] float32, float16 or bfloat16.
        kernel: [in, out] in x's dtype.
        bias: [out] or None.
        state: FP8 state of the layer, as ``state.initial`` makes it; needed for delayed scaling.
        gemm: number of this product among those of the state.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a shape that does not match, or no state for delayed scaling.
    """
    if kernel.ndim != 2 or x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"dense: x and kernel must be [..., in] and [in, out], got {list(x.shape)} and"
            f" {list(kernel.shape)}"
        )
    if x.dtype != kernel.dtype:
        raise TypeError(f"dense: kernel must have x's dtype {x.dtype}, got {kernel.dtype}")
    recipe = active_recipe()
    if recipe is None:
        y = jnp.matmul(x, kernel)
        return y if bias is None else y + bias.astype(y.dtype)
    if not quantizer_of(recipe).keeps_state:
        state = None
    elif state is None:
        raise ValueError("dense: state must be given with DelayedScaling, got None")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = _fp8_dense(recipe, gemm)(rows, kernel, bias, None if state is None else dict(state))
    return y.reshape(*x.shape[:-1], kernel.shape[1])


def _copy(q: Quantized, columnwise: bool) -> tuple[jax.Array, jax.Array]:
    """Returns FP8 data and scales of one copy."""
    pair = (
        (q.columnwise, q.columnwise_scale_inv) if columnwise else (q.rowwise, q.rowwise_scale_inv)
    )
    assert pair[0] is not None
    assert pair[1] is not None
    return pair[0], pair[1]


@functools.lru_cache(maxsize=64)
def _fp8_dense(recipe: Recipe, gemm: int) -> Callable[..., jax.Array]:
    """Returns the differentiable layer of a recipe, over rows of x, with one part of the state."""
    quantizer = quantizer_of(recipe)
    high_precision_wgrad = recipe.override_linear_precision[2]  # type: ignore[attr-defined]

    def scale_of(state: Any, way: str, slot: int) -> Any:
        return None if state is None else state[f"scale_{way}"][slot : slot + 1]

    def enter(state: Any) -> Any:
        if state is None:
            return None
        part = fp8_state.of_gemm(fp8_state.as_floats(state), gemm)
        return fp8_state.entered(part, recipe)  # type: ignore[arg-type]

    def forward(x: Any, kernel: Any, bias: Any, state: Any, keep: tuple[bool, bool]) -> Any:
        """Returns y and the casts of x and kernel, with the copies that backward needs."""
        x_columnwise, kernel_rowwise = keep
        qx = quantizer.cast(
            x, "input", scale_of(state, "fwd", _INPUT), rowwise=True, columnwise=x_columnwise
        )
        qk = quantizer.cast(
            kernel, "weight", scale_of(state, "fwd", _WEIGHT),
            rowwise=kernel_rowwise, columnwise=True,
        )  # fmt: skip
        y = quantizer.multiply("fprop", _copy(qx, False), _copy(qk, True), x.dtype, bias)
        return y, qx, qk

    @jax.custom_vjp
    def layer(x: Any, kernel: Any, bias: Any, state: Any) -> Any:
        return forward(x, kernel, bias, enter(state), (False, False))[0]

    def fwd(x: Any, kernel: Any, bias: Any, state: Any) -> Any:
        wanted = flag(x), flag(kernel), flag(bias)
        x_value, kernel_value = x.value, kernel.value
        bias_value = None if bias is None else bias.value
        moved = None
        if state is not None:
            moved = enter({name: leaf.value for name, leaf in state.items()})
            for slot, each in ((_INPUT, x_value), (_WEIGHT, kernel_value)):
                moved = with_first_scale(moved, "fwd", slot, each, recipe)
        keep = is_wanted(wanted[1]) and not high_precision_wgrad, is_wanted(wanted[0])
        y, qx, qk = forward(x_value, kernel_value, bias_value, moved, keep)
        if moved is not None:
            history = moved["amax_history_fwd"]
            for slot, q in ((_INPUT, qx), (_WEIGHT, qk)):
                history = history.at[0, slot].set(q.amax[0])
            moved = {**moved, "amax_history_fwd": history}
        kept_x = _copy(qx, True) if keep[0] else x_value if is_wanted(wanted[1]) else None
        kept_kernel = _copy(qk, False) if keep[1] else None
        # For shapes, dtypes and axes of meshes.
        primals = (x_value[:0], kernel_value[:0], bias_value)
        before = None if state is None else {name: leaf.value for name, leaf in state.items()}
        return y, (wanted, primals, kept_x, kept_kernel, moved, before)

    def bwd(kept: Any, dy: Any) -> Any:
        wanted, (x, kernel, bias), kept_x, kept_kernel, state, before = kept
        dy = materialised(dy)
        with_dx, with_dkernel, with_dbias = map(is_wanted, wanted)
        columnwise = with_dkernel and not high_precision_wgrad
        dx = dkernel = None
        state = with_first_scale(state, "bwd", _GRAD, dy, recipe)
        qdy = quantizer.cast(
            dy, "grad", scale_of(state, "bwd", _GRAD),
            rowwise=with_dx or not columnwise, columnwise=columnwise, with_dbias=with_dbias,
        )  # fmt: skip
        if with_dx:
            dx = quantizer.multiply("dgrad", _copy(qdy, False), kept_kernel, x.dtype)
        if columnwise:
            dkernel = quantizer.multiply("wgrad", kept_x, _copy(qdy, True), kernel.dtype)
        elif with_dkernel:
            dkernel = jnp.matmul(
                kept_x.T, dy, precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            ).astype(kernel.dtype)  # fmt: skip
        dbias = qdy.dbias.astype(bias.dtype) if qdy.dbias is not None else None
        if state is not None:
            assert qdy.amax is not None
            history = state["amax_history_bwd"].at[0, _GRAD].set(qdy.amax[0])
            state = fp8_state.cotangent({**state, "amax_history_bwd": history}, gemm, before)
        return dx, _summed(kernel, dkernel), gradient_of(bias, dbias), state

    layer.defvjp(fwd, bwd, symbolic_zeros=True)
    return layer


def _summed(primal: Any, gradient: Any) -> Any:
    """Returns a gradient summed over mesh axes that its primal, given without rows, lacks."""
    from . import _partition

    return None if gradient is None else _partition.summed_like(primal, gradient)
