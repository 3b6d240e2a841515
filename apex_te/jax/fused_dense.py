"""Norm and dense layer in FP8, where the norm and the join of heads' gradients write FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from ..recipe import Recipe
from .fused_casts import Norm
from .fused_layer import FusedLayer, differentiable
from .head_gradients import HeadGradients
from .joined_columns import JoinedColumns
from .ops._gradient import materialised
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

    The gradient with respect to ``state`` is the state after the step. Must be called inside of a
    region, and ``can_fuse_norm(state)`` must be True.

    Args:
        x: [..., in] with two dimensions or more.
        parameters: scale [in] and bias [in] of the norm, in x's dtype or float32; kernel
            [in, out...] and its bias [out...] in x's dtype. All but the kernel may be None.
    """
    recipe = active_recipe()
    assert recipe is not None
    made = _layer(recipe, norm, columns)(x, *parameters, dict(state))
    return made if columns is None else list(made)


class _Layer(FusedLayer):
    """Layer of a recipe, a norm and a layout of columns."""

    def __init__(self, recipe: Recipe, norm: Norm | None, columns: JoinedColumns | None) -> None:
        super().__init__(recipe, norm, 1)
        self._columns = columns

    def forward(self, primals: Any, parts: Any, wanted: Sequence[bool]) -> tuple[Any, Any, Any]:
        """Returns outputs, what backward keeps, and casts; see ``FusedLayer.forward``."""
        normed, (kernel, bias) = self._normed(*primals[:3]), primals[3:]
        y, qx, qkernel = self.products[0].forward(
            normed, kernel, bias, parts[0], for_dx=any(wanted[:3]), for_dkernel=wanted[3]
        )
        out = y if self._columns is None else tuple(self._columns.split(y))
        return out, self._kept(primals, normed, wanted), [(qx, qkernel)]

    def backward(
        self, gradients: Any, kept: Any, copies: Any, parts: list[Any], kinds: Any,
        wanted: Sequence[bool],
    ) -> list[Any]:  # fmt: skip
        """Returns the gradients of the primals; see ``FusedLayer.backward``."""
        (product,), ((x, kernel),) = self.products, copies
        made = [materialised(c) for c in ((gradients,) if self._columns is None else gradients)]
        dy: Any = made[0]
        dtype, columns, in_front = dy.dtype, len(kinds[3].aval.shape) - 1, any(wanted[:3])
        rows = dy.ndim - (columns if self._columns is None else 1)
        if self._columns is not None and len(made) > 1:
            dy = HeadGradients(self._columns, made, wanted[4])
        qdy, parts[0] = product.cast_gradient(
            dy, columns, parts[0], for_dx=in_front, for_dkernel=wanted[3], with_dbias=wanted[4]
        )
        before = [None, None, None]
        if in_front:
            dx = product.input_gradient(qdy, kernel, columns, dtype)
            before = self._norm_gradients(dx, kept, wanted)
        dkernel = product.kernel_gradient(x, qdy, rows, dtype) if wanted[3] else None
        return [*before, dkernel, qdy.dbias]


@functools.lru_cache(maxsize=64)
def _layer(recipe: Recipe, norm: Norm | None, columns: JoinedColumns | None) -> Callable[..., Any]:
    """Returns the differentiable layer of a recipe, a norm and a layout of columns."""
    return differentiable(_Layer(recipe, norm, columns))
