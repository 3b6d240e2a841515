"""Gradient rule of layers in FP8 whose norms and activations write FP8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..recipe import Recipe
from . import fp8_state
from .fused_casts import Norm, NormForward
from .ops._gradient import flag, gradients_like, is_wanted, kinds_of, values_of
from .product import Product, columns_of, rows_of


class FusedLayer:
    """Forward and backward of a layer that may begin with a norm, and the GEMMs ``products``.

    The first primals are x, and scale and bias of the norm. ``parts`` are the GEMMs' FP8 states,
    ``wanted`` has True for each primal whose gradient is wanted.
    """

    def __init__(self, recipe: Recipe, norm: Norm | None, gemms: int) -> None:
        self.products = tuple(Product(recipe, gemm) for gemm in range(gemms))
        self._norm = norm

    def forward(self, primals: Any, parts: Any, wanted: Sequence[bool]) -> tuple[Any, Any, Any]:
        """Returns the output, what backward keeps, and each GEMM's casts of input and kernel."""
        raise NotImplementedError

    def backward(
        self, gradients: Any, kept: Any, copies: Any, parts: list[Any], kinds: Any,
        wanted: Sequence[bool],
    ) -> list[Any]:  # fmt: skip
        """Returns the gradients of the primals, None for those not wanted, and updates ``parts``.

        ``copies`` has each GEMM's columnwise copy of the input and rowwise one of the kernel.
        """
        raise NotImplementedError

    def _normed(self, x: Any, scale: Any, bias: Any) -> Any:
        """Returns the first GEMM's input, or the norm that computes it."""
        return x if self._norm is None else NormForward(self._norm, x, scale, bias)

    def _kept(self, primals: Any, normed: Any, wanted: Sequence[bool]) -> Any:
        """Returns what ``_norm_gradients`` reads, None where it is not needed."""
        is_needed = self._norm is not None and any(wanted[:3])
        return (*primals[:3], normed.statistics) if is_needed else None

    def _norm_gradients(self, dx: Any, kept: Any, wanted: Sequence[bool]) -> list[Any]:
        """Returns the gradients of x, scale and bias from that of the first GEMM's input."""
        if self._norm is None:
            return [dx, None, None]
        dx, *others = self._norm.gradients(dx, kept, wanted[1], wanted[2])
        return [dx if wanted[0] else None, *others]


def differentiable(layer: FusedLayer) -> Callable[..., Any]:
    """Returns a layer as a differentiable function of primals and a state for each GEMM."""
    products = layer.products

    def entered(states: Any) -> list[Any]:
        return [product.entered(state) for product, state in zip(products, states, strict=True)]

    @jax.custom_vjp
    def run(*args: Any) -> Any:
        primals, states = args[: -len(products)], args[-len(products) :]
        return layer.forward(primals, entered(states), [False] * len(primals))[0]

    def fwd(*args: Any) -> Any:
        given, states = args[: -len(products)], args[-len(products) :]
        primals, wanted = values_of(given), [flag(p) for p in given]
        before = [fp8_state.differentiated(state, given[1:]) for state in states]
        parts = entered(before)
        out, kept, casts = layer.forward(primals, parts, [*map(is_wanted, wanted)])
        moved = [
            product.with_forward_amaxes(part, *pair)
            for product, part, pair in zip(products, parts, casts, strict=True)
        ]
        copies = [(columns_of(x), rows_of(kernel)) for x, kernel in casts]
        return out, (wanted, kinds_of(primals), kept, copies, moved, before)

    def bwd(residuals: Any, gradients: Any) -> Any:
        flags, kinds, kept, copies, parts, before = residuals
        wanted = [*map(is_wanted, flags)]
        made = layer.backward(gradients, kept, copies, parts, kinds, wanted)
        states = (
            product.state_gradient(part, like)
            for product, part, like in zip(products, parts, before, strict=True)
        )
        return (*gradients_like(kinds, made), *states)

    run.defvjp(fwd, bwd, symbolic_zeros=True)
    return run
