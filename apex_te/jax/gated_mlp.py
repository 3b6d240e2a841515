"""Norm, dense layer, gated activation, dense layer in FP8: norm and activation write FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from ..recipe import Recipe
from .fused_casts import ActivationBackward, ActivationForward, Norm
from .fused_layer import FusedLayer, differentiable
from .ops._gradient import materialised
from .ops.swiglu import ClampedSwiglu
from .region import active_recipe


def gated_mlp(
    x: jax.Array,
    parameters: Iterable[jax.Array | None],
    state: Mapping[str, jax.Array],
    activation: str | ClampedSwiglu,
    norm: Norm | None = None,
) -> jax.Array:
    """Computes (act(gate) * up) @ wo + wo_bias, with gate and up of norm(x) @ wi + wi_bias.

    Differentiable. Recipes with one scale per tensor quantize float32 values of the norm and of
    the activation, recipes with blocks values rounded to x's dtype. The gradient with respect to
    ``state``, of two GEMMs, is the state after the step. Must be called inside of a region, and
    ``can_fuse_activation(state)`` must be True.

    Args:
        x: [..., in] with two dimensions or more.
        parameters: scale [in] and bias [in] of the norm, in x's dtype or float32; wi [in, 2, F]
            with the gate first, its bias [2, F], wo [F, out] and its bias [out] in x's dtype.
            All but wi and wo may be None.
    """
    recipe = active_recipe()
    assert recipe is not None
    whole = dict(state)
    # One argument for each GEMM, whose gradients JAX adds as those of two uses.
    return _layer(recipe, activation, norm)(x, *parameters, whole, whole)


class _Layer(FusedLayer):
    """Both dense layers, for a recipe, an activation and a norm.

    The primals are x, scale and bias of the norm, wi, wi_bias, wo and wo_bias.
    """

    def __init__(self, recipe: Recipe, activation: str | ClampedSwiglu, norm: Norm | None) -> None:
        super().__init__(recipe, norm, 2)
        self._activation = activation

    def forward(self, primals: Any, parts: Any, wanted: Sequence[bool]) -> tuple[Any, Any, Any]:
        """Returns the output, what backward keeps, and casts; see ``FusedLayer.forward``."""
        *_, wi, wi_bias, wo, wo_bias = primals
        in_front, through = any(wanted[:3]), any(wanted[:5])
        normed = self._normed(*primals[:3])
        h, *first = self.products[0].forward(
            normed, wi, wi_bias, parts[0], for_dx=in_front, for_dkernel=wanted[3]
        )
        gated = ActivationForward(self._activation, h)
        y, *second = self.products[1].forward(
            gated, wo, wo_bias, parts[1], for_dx=through, for_dkernel=wanted[5]
        )
        kept = self._kept(primals, normed, wanted), h if through else None
        return y, kept, [first, second]

    def backward(
        self, gradients: Any, kept: Any, copies: Any, parts: list[Any], kinds: Any,
        wanted: Sequence[bool],
    ) -> list[Any]:  # fmt: skip
        """Returns the gradients of the primals; see ``FusedLayer.backward``."""
        (one, two), ((x, wi), (a, wo)) = self.products, copies
        dy, (normed, h) = materialised(gradients), kept
        before = [None, None, None]
        dwi = dwi_bias = dwo = None
        in_front, through, with_dwi, with_dwi_bias = any(wanted[:3]), any(wanted[:5]), *wanted[3:5]
        rows, dtype = dy.ndim - 1, dy.dtype
        qdy, parts[1] = two.cast_gradient(
            dy, 1, parts[1], for_dx=through, for_dkernel=wanted[5], with_dbias=wanted[6]
        )
        if wanted[5]:
            dwo = two.kernel_gradient(a, qdy, rows, dtype)
        if through:
            da = two.input_gradient(qdy, wo, 1, dtype)
            dh = ActivationBackward(self._activation, da, h, with_dwi_bias)
            qdh, parts[0] = one.cast_gradient(
                dh, 2, parts[0], for_dx=in_front, for_dkernel=with_dwi, with_dbias=with_dwi_bias
            )
            dwi_bias = qdh.dbias
            if in_front:
                dx = one.input_gradient(qdh, wi, 2, dtype)
                before = self._norm_gradients(dx, normed, wanted)
            if with_dwi:
                dwi = one.kernel_gradient(x, qdh, rows, dtype)
        return [*before, dwi, dwi_bias, dwo, qdy.dbias]


@functools.lru_cache(maxsize=64)
def _layer(
    recipe: Recipe, activation: str | ClampedSwiglu, norm: Norm | None
) -> Callable[..., Any]:
    """Returns the differentiable layer of a recipe, an activation and a norm."""
    return differentiable(_Layer(recipe, activation, norm))
