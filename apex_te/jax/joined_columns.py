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


class JoinedColumns(NamedTuple):
    """Layout of several kernels in one joined kernel.

    Attributes:
        widths: numbers of columns of the kernels.
        parts: number of parts, 1 for kernels side by side; None for those in a dimension of their
            own.
    """

    widths: tuple[int, ...]
    parts: int | None

    def join(self, arrays: Sequence[jax.Array], lead: int) -> jax.Array:
        """Joins kernels, or their biases, which have ``lead`` = 1 or 0 dimensions before the
        columns.

        The arrays are [..., width] or [..., kernels, width]; their widths in order are ``widths``.
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
        """Splits the result of a GEMM with the joined kernel: [..., width] for each kernel."""
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
    """Returns the layout in which kernels [in, width] or [in, kernels, width] are joined.

    The columns are sharded over ``parts`` devices. If a shard would end within a block that shares
    a scale, kernels are concatenated unsharded, and XLA gathers them.
    """
    widths = tuple(
        kernel.shape[-1] for kernel in kernels for _ in range(math.prod(kernel.shape[1:-1]))
    )
    unit = parts * (1 if recipe is None else quantizer_of(recipe).block)
    fits = parts == 1 or all(width % unit == 0 for width in widths)
    if len(set(widths)) == 1 and fits:
        return JoinedColumns(widths, None)
    return JoinedColumns(widths, parts if fits else 1)
