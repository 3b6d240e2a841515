"""Norm and dense layer as a function: norm(x) @ kernel + bias, in FP8 inside of a region."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from .dense import dense_with_state
from .fused_casts import Norm
from .fused_dense import fused_dense
from .joined_columns import JoinedColumns
from .layernorm import in_dtype, norm_of, normalised
from .places import Axes, is_placed, placed
from .product import can_fuse_norm
from .quantize import QuantizerSet, entered

__all__ = ["layernorm_dense"]

# A norm with its scale and its bias or None.
NormOf = tuple[Norm, jax.Array, jax.Array | None]


def layernorm_dense(
    x: jax.Array, kernel: jax.Array, gamma: jax.Array, beta: jax.Array | None,
    bias: jax.Array | None = None, norm_type: str = "layernorm", zero_centered_gamma: bool = False,
    epsilon: float = 1e-6, transpose_batch_sequence: bool = False,
    layernorm_input_axes: Axes | None = None, dot_input_axes: Axes | None = None,
    kernel_axes: Axes | None = None, quantizer_set: QuantizerSet | None = None,
) -> jax.Array:  # fmt: skip
    """Computes norm(x) @ kernel + bias, differentiably.

    In FP8 the norm writes only FP8 data where its kernel supports this.

    Args:
        x: [..., in] float32, float16 or bfloat16.
        kernel: [in, out...], cast to x's dtype.
        gamma, beta, norm_type, zero_centered_gamma, epsilon: as in ``layernorm``.
        bias: [out...] or None.
        transpose_batch_sequence: no effect; the result is the same for both layouts.
        layernorm_input_axes, dot_input_axes, kernel_axes: logical axes to which ``x``, the norm's
            result and the kernel are constrained under Flax's rules; None does not constrain them.
        quantizer_set: recipe and FP8 state, as in ``dense``.

    Returns:
        [..., out...] in x's dtype.

    Raises:
        TypeError, ValueError: as ``layernorm`` and ``dense`` do.
    """
    norm = norm_of("layernorm_dense", norm_type, epsilon, zero_centered_gamma, beta)
    with entered("layernorm_dense", quantizer_set) as state:
        x = placed(x, layernorm_input_axes)
        given = norm, *in_dtype(x, gamma, beta)
        kernel = placed(kernel, kernel_axes)
        return norm_dense(x, given, kernel, bias, state, dot_input_axes)[0]


def norm_dense(
    x: jax.Array,
    norm: NormOf | None,
    kernel: jax.Array,
    bias: jax.Array | None,
    state: Mapping[str, jax.Array],
    dot_axes: Axes | None = None,
    columns: JoinedColumns | None = None,
    returns_norm: bool = False,
) -> tuple[Any, jax.Array | None]:
    """Returns norm(x) @ kernel + bias, and norm(x), which is None where it is only made in FP8.

    With ``columns`` the first result is a list of the outputs of several kernels.
    """
    kernel, bias = kernel.astype(x.dtype), None if bias is None else bias.astype(x.dtype)
    fuses = can_fuse_norm(state) and x.ndim > 1
    if norm is not None and fuses and not returns_norm and not is_placed(dot_axes):
        return fused_dense(x, (*norm[1:], kernel, bias), state, norm[0], columns), None
    normed = x if norm is None else normalised(x, *norm)
    h = placed(normed, dot_axes)
    if fuses and columns is not None:
        return fused_dense(h, (None, None, kernel, bias), state, None, columns), normed
    y = dense_with_state(h, kernel, bias, state)
    return y if columns is None else columns.split(y), normed
