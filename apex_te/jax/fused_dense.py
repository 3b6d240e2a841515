"""Norm and dense layer in FP8, where the norm and the join of heads' gradients write FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from ..recipe import Recipe
from . import fp8_state
from ._partition import Kind, gradient_like
from .fused_casts import Norm, NormForward
from .head_gradients import HeadGradients
from .joined_columns import JoinedColumns
from .ops._gradient import flag, is_wanted, materialised
from .product import Product, columns_of, rows_of
from .region import active_recipe


def fused_dense(
    x: jax.Array,
    parameters: Iterable[jax.Array | None],
    state: Mapping[str, jax.Array],
    norm: Norm | None = None,
    columns: JoinedColumns | None = None,
) -> Any:
    """Computes norm(x) @ kernel + bias, differentiably; with ``columns`` a list of kernels'
    outputs.

    The norm's op writes its result in FP8, from float32 values. With ``columns``, the layout of
    several kernels that are joined in the kernel, one op joins the outputs' gradients and casts
    them to FP8. The gradient with respect to ``state`` is the state after the step. Must be called
    inside of a region, and ``can_fuse_norm(state)`` must be True.

    Args:
        x: [..., in] with two dimensions or more.
        parameters: scale [in] and bias [in] of the norm, in x's dtype or float32; kernel
            [in, out...] and its bias [out...] in x's dtype. All but the kernel may be None.
        state: FP8 state of the layer; empty for a recipe without state.
    """
    recipe = active_recipe()
    assert recipe is not None
    made = _layer(recipe, norm, columns)(x, *parameters, dict(state))
    return made if columns is None else list(made)


class _Steps:
    """Forward and backward of a recipe, a norm and a layout of columns."""

    def __init__(self, recipe: Recipe, norm: Norm | None, columns: JoinedColumns | None) -> None:
        self.product = Product(recipe, 0)
        self._norm = norm
        self._columns = columns

    def forward(self, primals: Any, part: Any, **needs: bool) -> Any:
        """Returns the output, the norm's statistics, and the casts of input and kernel."""
        x, scale, ln_bias, kernel, bias = primals
        normed = None if self._norm is None else NormForward(self._norm, x, scale, ln_bias)
        y, qx, qkernel = self.product.forward(
            x if normed is None else normed, kernel, bias, part, **needs
        )
        out = y if self._columns is None else tuple(self._columns.split(y))
        return out, None if normed is None else normed.statistics, qx, qkernel

    def backward(
        self, gradients: list[Any], normed: Any, copies: Any, part: Any, columns: int, wanted: Any
    ) -> tuple[list[Any], Any]:
        """Returns the gradients of the primals, None for those not wanted, and the state."""
        with_x, with_scale, with_ln_bias, with_kernel, with_bias = map(is_wanted, wanted)
        in_front = with_x or with_scale or with_ln_bias
        dy: Any = gradients[0]
        dtype = dy.dtype
        rows = dy.ndim - (columns if self._columns is None else 1)
        if self._columns is not None and len(gradients) > 1:
            dy = HeadGradients(self._columns, gradients, with_bias)
        qdy, part = self.product.cast_gradient(
            dy, columns, part, for_dx=in_front, for_dkernel=with_kernel, with_dbias=with_bias
        )
        dx = dkernel = None
        of_norm: list[Any] = [None, None]
        if in_front:
            dx = self.product.input_gradient(qdy, copies[1], columns, dtype)
            if self._norm is not None:
                dx, *of_norm = self._norm.gradients(dx, normed, with_scale, with_ln_bias)
        if with_kernel:
            dkernel = self.product.kernel_gradient(copies[0], qdy, rows, dtype)
        return [dx if with_x else None, *of_norm, dkernel, qdy.dbias], part


@functools.lru_cache(maxsize=64)
def _layer(recipe: Recipe, norm: Norm | None, columns: JoinedColumns | None) -> Callable[..., Any]:
    """Returns the differentiable layer of a recipe, a norm and a layout of columns."""
    steps = _Steps(recipe, norm, columns)
    product = steps.product

    @jax.custom_vjp
    def layer(*args: Any) -> Any:
        *primals, state = args
        return steps.forward(primals, product.entered(state), for_dx=False, for_dkernel=False)[0]

    def fwd(*args: Any) -> Any:
        *given, state = args
        primals = [None if p is None else p.value for p in given]
        before = fp8_state.differentiated(state, given[1:])
        wanted = [flag(p) for p in given]
        in_front, part = any(map(is_wanted, wanted[:3])), product.entered(before)
        out, statistics, qx, qkernel = steps.forward(
            primals, part, for_dx=in_front, for_dkernel=is_wanted(wanted[3])
        )
        moved = product.with_forward_amaxes(part, qx, qkernel)
        kinds = [None if p is None else Kind(jax.typeof(p)) for p in primals]
        normed = None if norm is None or not in_front else (*primals[:3], statistics)
        return out, (wanted, kinds, normed, (columns_of(qx), rows_of(qkernel)), moved, before)

    def bwd(kept: Any, cotangents: Any) -> Any:
        wanted, kinds, normed, copies, part, before = kept
        outputs = (cotangents,) if columns is None else cotangents
        made, part = steps.backward(
            [materialised(c) for c in outputs], normed, copies, part,
            len(kinds[3].aval.shape) - 1, wanted,
        )  # fmt: skip
        gradients = [
            gradient_like(kind, None if each is None else each.astype(kind.aval.dtype))
            for kind, each in zip(kinds, made, strict=True)
        ]
        return (*gradients, product.state_gradient(part, before))

    layer.defvjp(fwd, bwd, symbolic_zeros=True)
    return layer
