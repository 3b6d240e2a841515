"""Products of two arrays over any dimensions, with batch dimensions, by the layer of ``dense``."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ._partition import check_batch
from .dense import dense_with_state

__all__ = ["dot_general", "einsum"]


def einsum(
    spec: str, x: jax.Array, kernel: jax.Array, state: Mapping[str, jax.Array] | None = None
) -> jax.Array:
    """Computes ``jnp.einsum`` of two arrays, in FP8 inside of an enabled ``fp8_autocast`` region.

    Dimensions that are in both arrays and in the result are batch dimensions, such as those of
    experts or heads. With tensor scaling, arrays with batch dimensions have one scale each; block
    scaling has blocks of its own for each element of the batch. Differentiable; the gradient with
    respect to ``state`` is the state after the step.

    Args:
        spec: indices of both arrays and of the result, such as "becd,edf->becf". "..." stands for
            further dimensions, which are batch dimensions if both arrays have them.
        x: an array, cast as a layer's input; float32, float16 or bfloat16.
        kernel: another one in x's dtype, cast as a weight.
        state: as in ``dense``.

    Returns:
        The result in x's dtype.

    Raises:
        TypeError: ``x`` has a dtype that is not listed, or ``kernel`` another one.
        ValueError: ``spec`` does not fit the arrays, or ``state`` is None with delayed scaling.
        NotImplementedError: an index is twice in one array, or in one array alone; or Explicit mesh
            axes split a batch dimension.
    """
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    left, right, out = terms(spec, x.ndim, kernel.ndim)
    for name, term, others in (("x", left, right + out), ("kernel", right, left + out)):
        if len(set(term)) < len(term) or not set(term) <= set(others):
            raise NotImplementedError(
                f"einsum: each index of {name} must be in it once, and in the other array or the"
                f" result, got {spec!r}"
            )
    extents = dict(zip(right, kernel.shape, strict=True))
    if any(extents.get(i, extent) != extent for i, extent in zip(left, x.shape, strict=True)):
        raise ValueError(
            f"einsum: x and kernel must have equal extents along common indices of {spec!r}, got"
            f" {list(x.shape)} and {list(kernel.shape)}"
        )
    batch = [i for i in left if i in right and i in out]
    inner = [i for i in left if i in right and i not in out]
    pairs = [
        (tuple(map(left.index, names)), tuple(map(right.index, names))) for names in (inner, batch)
    ]
    y = dot_general(x, kernel, pairs, state)
    rest = [i for i in (*left, *right) if i not in batch and i not in inner]
    made = [*batch, *rest]
    return y.transpose([made.index(i) for i in out])


def terms(spec: str, left_ndim: int, right_ndim: int) -> tuple[str, str, str]:
    """Returns the indices of both arrays and of the result in ``einsum``, letters for "..."."""
    both, arrow, out = spec.replace(" ", "").partition("->")
    sides = both.split(",")
    free = [c for c in string.ascii_letters if c not in spec]
    found, most = [], 0
    for side, ndim in zip(sides, (left_ndim, right_ndim), strict=False):
        more = ndim - len(side.replace("...", ""))
        found.append(side.replace("...", "".join(free[:more][::-1])) if more >= 0 else side)
        most = max(most, more)
    out = out.replace("...", "".join(free[:most][::-1]))
    known = {*"".join(found)}
    fits = [len(term) for term in found] == [left_ndim, right_ndim] and all(
        c in string.ascii_letters for c in (*known, *out)
    )
    if not arrow or len(sides) != 2 or not fits or len({*out}) < len(out) or not {*out} <= known:
        raise ValueError(
            f"einsum: spec must have the form 'ab,bc->ac' for arrays of {left_ndim} and"
            f" {right_ndim} dimensions, got {spec!r}"
        )
    return found[0], found[1], out


def dot_general(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers: Any,
    state: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    """Computes ``jax.lax.dot_general`` of two arrays, in FP8 in an enabled region.

    Args:
        x: an array, cast as a layer's input; float32, float16 or bfloat16.
        kernel: another one in x's dtype, cast as a weight.
        dimension_numbers: ``((x's, kernel's contracted), (x's, kernel's batch dimensions))``.
        state: as in ``dense``.

    Returns:
        The result in x's dtype, with the dimensions in the order of ``jax.lax.dot_general``.
    """
    (left, right), (left_batch, right_batch) = dimension_numbers
    rows = [i for i in range(x.ndim) if i not in (*left, *left_batch)]
    columns = [i for i in range(kernel.ndim) if i not in (*right, *right_batch)]
    x = x.transpose(*left_batch, *rows, *left)
    kernel = kernel.transpose(*right_batch, *right, *columns)
    batch = len(tuple(left_batch))
    check_batch("dot_general", x, batch)
    check_batch("dot_general", kernel, batch)
    shape = (*x.shape[: batch + len(rows)], *kernel.shape[kernel.ndim - len(columns) :])
    # Each side of the product has a dimension, of extent 1 where there is none.
    if not rows:
        x = jnp.expand_dims(x, batch)
    if not columns:
        kernel = kernel[..., None]
    if not left:
        x, kernel = x[..., None], jnp.expand_dims(kernel, batch)
    inner = max(len(tuple(left)), 1)

    def product(x: Any, kernel: Any) -> Any:
        return dense_with_state(x, kernel, None, state, inner=inner)

    for _ in range(batch):
        product = jax.vmap(product)
    return product(x, kernel).reshape(shape)
