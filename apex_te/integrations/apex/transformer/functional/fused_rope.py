"""Rotary position embeddings in apex's layouts, by the functions of its extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .....compatibility.apex import fused_rotary_positional_embedding as kernels


class _Rotation(torch.autograd.Function):
    """Calls a pair of functions of the extension; ``args`` follow the rotated tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        t: torch.Tensor,
        there: Callable[..., torch.Tensor],
        back: Callable[..., torch.Tensor],
        *args: Any,
    ) -> torch.Tensor:
        ctx.back, ctx.args, ctx.shape = back, args, t.shape
        return there(t, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # images' results have one dimension for rows and columns
        grad = ctx.back(grads[0].reshape(ctx.shape), *ctx.args).reshape(ctx.shape)
        return (grad, None, None, *(None for _ in ctx.args))


def _rotate(t: torch.Tensor, name: str, *args: Any) -> torch.Tensor:
    pair = (getattr(kernels, f"{way}{name}") for way in ("forward", "backward"))
    out: torch.Tensor = _Rotation.apply(t, *pair, *args)
    return out


def fused_apply_rotary_pos_emb(
    t: torch.Tensor, freqs: torch.Tensor, transpose_output_memory: bool = False
) -> torch.Tensor:
    """Rotates t [s, b, h, d] by the angles freqs [s, 1, 1, d'], float32, d' <= d.

    ``t`` is float32, float16 or bfloat16. Elements i and i + d' / 2 are a pair; those from d' on
    are copied. Differentiable in ``t``.

    With ``transpose_output_memory`` the result has the memory layout of [b, s, h, d].

    Raises:
        TypeError: ``t`` has another dtype.
        ValueError: a shape does not match, or d' is odd or above d.
    """
    return _rotate(t, "", freqs, transpose_output_memory)


def fused_apply_rotary_pos_emb_cached(
    t: torch.Tensor,
    cos_: torch.Tensor,
    sin_: torch.Tensor,
    transpose_output_memory: bool = False,
) -> torch.Tensor:
    """Rotates t [s, b, h, d] by angles whose cosines and sines are [s, 1, 1, d'] each, d' <= d.

    ``cos_`` and ``sin_`` are converted to float32. Other arguments, pairs and errors are those of
    ``fused_apply_rotary_pos_emb``.
    """
    return _rotate(t, "_cached", cos_, sin_, transpose_output_memory)


def fused_apply_rotary_pos_emb_thd(
    t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor
) -> torch.Tensor:
    """Rotates packed sequences t [tokens, h, d], which begin at cu_seqlens [b + 1], int32.

    ``freqs`` are angles [positions, 1, 1, d']; later tokens of a longer sequence become NaN.
    Dtypes, pairs and errors are those of ``fused_apply_rotary_pos_emb``.
    """
    return _rotate(t, "_thd", cu_seqlens, freqs)


def fused_apply_rotary_pos_emb_2d(
    t: torch.Tensor,
    img_h: int,
    img_w: int,
    cos_h: torch.Tensor,
    sin_h: torch.Tensor,
    cos_w: torch.Tensor,
    sin_w: torch.Tensor,
) -> torch.Tensor:
    """Rotates images' patches t [b, img_h * img_w, h, d] by their row and by their column.

    Args:
        t: the first half of d rotates by the row, the second by the column.
        img_h: rows.
        img_w: columns.
        cos_h: [1, H, 1, d / 2], H >= img_h.
        sin_h: as ``cos_h``.
        cos_w: [1, W, 1, d / 2], W >= img_w.
        sin_w: as ``cos_w``.

    Raises:
        ValueError: t has another number of patches.
    """
    b, s, h, d = t.shape
    if s != img_h * img_w:
        raise ValueError(
            f"fused_apply_rotary_pos_emb_2d: t must have {img_h} * {img_w} patches, got {s}"
        )
    patches = t.reshape(b, img_h, img_w, h, d)
    return _rotate(patches, "_2d", cos_h, sin_h, cos_w, sin_w)
