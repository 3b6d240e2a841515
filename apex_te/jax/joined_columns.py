"""Columns of several kernels that have one input, as those of one product.

Kernels of equal widths lie in a dimension of their own, [in, kernels, width]. Others lie side by
side, [in, columns], or in parts, [in, parts, columns of a part], where every part has its share of
each kernel, as a rank has in Megatron's fused projections: devices that share the columns then
need none of each other's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..recipe import Recipe
from .quantizer import quantizer_of

__all__ = ["JoinedColumns", "joined_columns"]


class JoinedColumns(NamedTuple):
    """Layout of the columns of several kernels in one.

    Attributes:
        widths: numbers of columns of the kernels.
        parts: number of parts that have a share of every kernel; None for a dimension of kernels.
    """

    widths: tuple[int, ...]
    parts: int | None

    def join(self, arrays: Sequence[jax.Array], lead: int) -> jax.Array:
        """Returns kernels, or their biases, as one array.

        Args:
            arrays: [..., width] or [..., kernels, width] each; together, all widths in order.
            lead: number of dimensions before the columns: 1 of kernels, 0 of biases.
        """
        if self.parts is None and len(arrays) == 1:
            return arrays[0]
        flat = []
        for x in arrays:
            if x.ndim == lead + 1:
                flat.append(x)
                continue
            for i in range(x.shape[lead]):
                flat.append(jax.lax.index_in_dim(x, i, lead, keepdims=False))
        if self.parts is None:
            return jnp.stack(flat, axis=lead)
        if self.parts > 1:
            flat = [x.reshape(*x.shape[:lead], self.parts, -1) for x in flat]
        return jnp.concatenate(flat, axis=-1)

    def split(self, product: jax.Array) -> list[jax.Array]:
        """Returns the columns of each kernel, [..., width], of a GEMM with the joined kernel."""
        if len(self.widths) == 1:
            return [product]
        if self.parts is None:
            return [product[..., i, :] for i in range(len(self.widths))]
        found, first = [], 0
        for width in self.widths:
            last = first + width // self.parts
            found.append(product[..., first:last])
            first = last
        if self.parts == 1:
            return found
        return [x.reshape(*x.shape[:-2], -1) for x in found]


def joined_columns(
    kernels: Sequence[jax.Array], parts: int, recipe: Recipe | None
) -> JoinedColumns:
    """Returns the layout of the columns of several kernels for devices that share them.

    Args:
        kernels: [in, width] or [in, kernels, width] each.
        parts: number of parts into which devices cut the columns of each kernel.
        recipe: recipe of the region. Where a part of a kernel would end within a block of its
            scales the kernels lie side by side, and XLA gathers them.
    """
    widths = tuple(
        kernel.shape[-1] for kernel in kernels for _ in range(math.prod(kernel.shape[1:-1]))
    )
    unit = parts * (1 if recipe is None else quantizer_of(recipe).block)
    fits = parts == 1 or all(width % unit == 0 for width in widths)
    if len(set(widths)) == 1 and fits:
        return JoinedColumns(widths, None)
    return JoinedColumns(widths, parts if fits else 1)
