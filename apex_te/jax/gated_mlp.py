"""Norm, dense layer, gated activation, dense layer in FP8: norm and activation write FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from ..recipe import Recipe
from . import fp8_state
from ._partition import Kind, gradient_like
from .fused_casts import ActivationBackward, ActivationForward, Norm, NormForward
from .ops._gradient import flag, is_wanted, materialised
from .ops.swiglu import ClampedSwiglu
from .product import Product, columns_of, rows_of
from .region import active_recipe


def gated_mlp(
    x: jax.Array,
    parameters: Iterable[jax.Array | None],
    state: Mapping[str, jax.Array],
    activation: str | ClampedSwiglu,
    norm: Norm | None = None,
) -> jax.Array:
    """Computes (act(gate) * up) @ wo + wo_bias, with gate and up of norm(x) @ wi + wi_bias.

    Differentiable. The ops of the norm, of the activation and of its backward write their results
    in FP8: recipes with one scale per tensor quantize float32 values, recipes with blocks quantize
    values rounded to x's dtype. The gradient with respect to ``state`` is the state after the step.
    Must be called inside of a region, and ``can_fuse_activation(state)`` must be True.

    Args:
        x: [..., in] with two dimensions or more.
        parameters: scale [in] and bias [in] of the norm, in x's dtype or float32; wi [in, 2, F]
            with the gate first, its bias [2, F], wo [F, out] and its bias [out] in x's dtype.
            All but wi and wo may be None.
        state: FP8 state of both layers, two GEMMs; empty for a recipe without state.
    """
    recipe = active_recipe()
    assert recipe is not None
    whole = dict(state)
    # One argument for each GEMM, whose gradients JAX adds as those of two uses.
    return _layer(recipe, activation, norm)(x, *parameters, whole, whole)


class _Wanted(NamedTuple):
    """Gradients that are wanted, as residuals of ``flag``."""

    x: Any
    scale: Any
    ln_bias: Any
    wi: Any
    wi_bias: Any
    wo: Any
    wo_bias: Any

    @property
    def in_front(self) -> bool:
        """Returns True if a gradient before the first GEMM is wanted."""
        return any(map(is_wanted, (self.x, self.scale, self.ln_bias)))

    @property
    def through(self) -> bool:
        """Returns True if a gradient before the activation is wanted."""
        return self.in_front or is_wanted(self.wi) or is_wanted(self.wi_bias)


class _Steps:
    """Forward and backward of both dense layers, for a recipe, an activation and a norm."""

    def __init__(self, recipe: Recipe, activation: str | ClampedSwiglu, norm: Norm | None) -> None:
        self.products = Product(recipe, 0), Product(recipe, 1)
        self._activation = activation
        self._norm = norm

    def forward(self, primals: Any, first: Any, second: Any, wanted: _Wanted) -> Any:
        """Returns the output, the activation's input, the norm's statistics, and the four casts."""
        x, scale, ln_bias, wi, wi_bias, wo, wo_bias = primals
        normed = None if self._norm is None else NormForward(self._norm, x, scale, ln_bias)
        h, qx, qwi = self.products[0].forward(
            x if normed is None else normed, wi, wi_bias, first,
            for_dx=wanted.in_front, for_dkernel=is_wanted(wanted.wi),
        )  # fmt: skip
        y, qa, qwo = self.products[1].forward(
            ActivationForward(self._activation, h), wo, wo_bias, second,
            for_dx=wanted.through, for_dkernel=is_wanted(wanted.wo),
        )  # fmt: skip
        return y, h, None if normed is None else normed.statistics, (qx, qwi, qa, qwo)

    def backward(
        self, dy: Any, normed: Any, h: Any, copies: Any, first: Any, second: Any, wanted: _Wanted
    ) -> tuple[list[Any], Any, Any]:
        """Returns the gradients of the primals, None for those not wanted, and both states."""
        x_columns, a_columns, wi_rows, wo_rows = copies
        dx = dwi = dwi_bias = dwo = None
        of_norm: list[Any] = [None, None]
        one, two = self.products
        rows, dtype = dy.ndim - 1, dy.dtype
        with_dwo, with_dwi = is_wanted(wanted.wo), is_wanted(wanted.wi)
        qdy, second = two.cast_gradient(
            dy, 1, second, for_dx=wanted.through, for_dkernel=with_dwo,
            with_dbias=is_wanted(wanted.wo_bias),
        )  # fmt: skip
        if with_dwo:
            dwo = two.kernel_gradient(a_columns, qdy, rows, dtype)
        if wanted.through:
            da = two.input_gradient(qdy, wo_rows, 1, dtype)
            with_dwi_bias = is_wanted(wanted.wi_bias)
            dh = ActivationBackward(self._activation, da, h, with_dwi_bias)
            qdh, first = one.cast_gradient(
                dh, 2, first, for_dx=wanted.in_front, for_dkernel=with_dwi,
                with_dbias=with_dwi_bias,
            )  # fmt: skip
            dwi_bias = qdh.dbias
            if wanted.in_front:
                dx = one.input_gradient(qdh, wi_rows, 2, dtype)
                if self._norm is not None:
                    needs = is_wanted(wanted.scale), is_wanted(wanted.ln_bias)
                    dx, *of_norm = self._norm.gradients(dx, normed, *needs)
                    dx = dx if is_wanted(wanted.x) else None
            if with_dwi:
                dwi = one.kernel_gradient(x_columns, qdh, rows, dtype)
        return [dx, *of_norm, dwi, dwi_bias, dwo, qdy.dbias], first, second


@functools.lru_cache(maxsize=64)
def _layer(
    recipe: Recipe, activation: str | ClampedSwiglu, norm: Norm | None
) -> Callable[..., Any]:
    """Returns the differentiable layer of a recipe, an activation and a norm."""
    steps = _Steps(recipe, activation, norm)
    one, two = steps.products

    @jax.custom_vjp
    def layer(*args: Any) -> Any:
        *primals, first_state, second_state = args
        first, second = one.entered(first_state), two.entered(second_state)
        nothing = _Wanted(*(None for _ in primals))
        return steps.forward(primals, first, second, nothing)[0]

    def fwd(*args: Any) -> Any:
        *given, first_state, second_state = args
        primals = [None if p is None else p.value for p in given]
        wanted = _Wanted(*map(flag, given))
        before = [
            fp8_state.differentiated(state, given[1:]) for state in (first_state, second_state)
        ]
        first, second = one.entered(before[0]), two.entered(before[1])
        y, h, statistics, (qx, qwi, qa, qwo) = steps.forward(primals, first, second, wanted)
        moved = one.with_forward_amaxes(first, qx, qwi), two.with_forward_amaxes(second, qa, qwo)
        kinds = [None if p is None else Kind(jax.typeof(p)) for p in primals]
        copies = columns_of(qx), columns_of(qa), rows_of(qwi), rows_of(qwo)
        normed = None if norm is None or not wanted.in_front else (*primals[:3], statistics)
        return y, (wanted, kinds, normed, h if wanted.through else None, copies, moved, before)

    def bwd(kept: Any, dy: Any) -> Any:
        wanted, kinds, normed, h, copies, (first, second), before = kept
        made, *after = steps.backward(materialised(dy), normed, h, copies, first, second, wanted)
        gradients = [
            gradient_like(kind, None if each is None else each.astype(kind.aval.dtype))
            for kind, each in zip(kinds, made, strict=True)
        ]
        states = (
            product.state_gradient(part, like)
            for product, part, like in zip(steps.products, after, before, strict=True)
        )
        return (*gradients, *states)

    layer.defvjp(fwd, bwd, symbolic_zeros=True)
    return layer
