"""Joint of a transducer (RNN-T): sums of all pairs of frames and labels, with ReLU and dropout."""

from __future__ import annotations

from typing import Any

import torch

from .bias_dropout_add import drop_threshold, keep_mask
from .binding import OpFunction, bind, checked, once_differentiable

_fwd = bind("transducer_joint", "transducer_joint_fwd")
_bwd = bind("transducer_joint", "transducer_joint_bwd")


@checked
def transducer_joint(
    f: torch.Tensor,
    g: torch.Tensor,
    f_len: torch.Tensor,
    g_len: torch.Tensor,
    batch_offset: torch.Tensor | None = None,
    packed_rows: int = 0,
    *,
    relu: bool = False,
    p: float = 0.0,
    seed: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Computes ``dropout(relu(f[:, :, None] + g[:, None]), p)``, the joint of a transducer (RNN-T).

    It is differentiable. Elements beyond a sample's lengths are -1 and have no gradient. With
    ``batch_offset`` they are left out: the result is packed sample by sample, and row ``t * g_len +
    u`` of a sample is the sum of frame t and label position u. Sums are computed in float32 and
    rounded once. With ReLU or dropout, backward needs one byte per element.

    Args:
        f: output of the encoder, [B, T, H] float32, float16 or bfloat16; made contiguous if it is
            not.
        g: output of the predictor, [B, U, H] of the same dtype; made contiguous if it is not.
        f_len, g_len: int32 [B], the number of frames (at most T) and label positions (at most U) of
            each sample.
        batch_offset: int64 [B], the end of each sample in the packed result, ``cumsum(f_len *
            g_len)``; None does not pack.
        packed_rows: number of rows of the packed result, the last element of ``batch_offset``.
        relu: apply a ReLU to the sums.
        p: dropout probability, from 0 to 1.
        seed: one int64 element on the device of ``f``, which determines the dropout mask; None
            draws one.
        generator: generator that draws the seed; None uses the device's default generator.

    Returns:
        [B, T, U, H], or packed [packed_rows, H], in the dtype of ``f``.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, ``p`` is out of range, both ``seed`` and ``generator``
            are given, or, on the CPU, a length or an offset is out of range.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"transducer_joint: p must be from 0 to 1, got {p}")
    if seed is not None and generator is not None:
        raise ValueError("transducer_joint: generator must be None if seed is given")
    if 0.0 < p < 1.0 and seed is None:
        seed = torch.randint(
            0, 2**63 - 1, (1,), dtype=torch.int64, device=f.device, generator=generator
        )
    args = f, g, f_len, g_len, batch_offset, packed_rows, relu, float(p), seed
    return _TransducerJoint.apply(*args)


@checked
def transducer_joint_fwd(
    f: torch.Tensor,
    g: torch.Tensor,
    f_len: torch.Tensor,
    g_len: torch.Tensor,
    batch_offset: torch.Tensor | None = None,
    packed_rows: int = 0,
    *,
    relu: bool = False,
    p: float = 0.0,
    seed: torch.Tensor | None = None,
    with_mask: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes ``transducer_joint`` without autograd, and the mask for ``transducer_joint_bwd``.

    Args:
        f: [B, T, H] float32, float16 or bfloat16.
        g: [B, U, H] in the same dtype.
        f_len, g_len: int32 [B], lengths of each sample in T and U.
        batch_offset, packed_rows, relu, p, seed: as in ``transducer_joint``; ``seed`` is required
            unless p is 0 or 1.
        with_mask: False skips the mask.

    Returns:
        (result, mask): [B, T, U, H] or [packed_rows, H] in the dtype of ``f``; and uint8 of the
        same shape, 1 where the gradient passes, or None.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match, or ``p`` is out of range.
    """
    if batch_offset is None:
        shape = [*f.shape[:2], *g.shape[1:]]
    else:
        shape = [packed_rows, *f.shape[2:]]
        batch_offset = batch_offset.contiguous()
    out = f.new_empty(shape)
    mask = torch.empty_like(out, dtype=torch.uint8) if with_mask else None
    lengths = f_len.contiguous(), g_len.contiguous()
    _fwd(f.contiguous(), g.contiguous(), *lengths, batch_offset, seed, out, mask, relu, p)
    return out, mask


@checked
def transducer_joint_bwd(
    grad: torch.Tensor,
    mask: torch.Tensor | None,
    f_len: torch.Tensor,
    g_len: torch.Tensor,
    batch_offset: torch.Tensor | None,
    max_f_len: int,
    max_g_len: int,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gradients of ``f`` and ``g`` in ``transducer_joint``, in one pass.

    Args:
        grad: gradient of the result, [B, T, U, H] or packed [rows, H], float32, float16 or
            bfloat16; elements beyond a sample's lengths are ignored.
        mask: uint8 in the shape of ``grad``, from ``transducer_joint_fwd``; None passes every
            gradient.
        f_len, g_len: int32 [B], lengths of each sample in T and U.
        batch_offset: int64 [B], the end of each sample in a packed ``grad``; None if it is not
            packed.
        max_f_len, max_g_len: T and U, the extents of ``f`` and ``g``.
        scale: factor of the gradient, 1 / (1 - p) after dropout.

    Returns:
        (gradient of ``f`` [B, T, H], gradient of ``g`` [B, U, H]) in the dtype of ``grad``, summed
        in float32 in a fixed order and rounded once.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: a shape does not match.
    """
    if grad.dim() == 0:
        raise ValueError("transducer_joint_bwd: grad must have 2 or 4 dimensions, got shape []")
    batch, cols = f_len.numel(), grad.shape[-1]
    df, dg = (grad.new_empty(batch, extent, cols) for extent in (max_f_len, max_g_len))
    tiles = -(-max_f_len // _tile_of(batch, max_f_len, cols))
    workspace = grad.new_empty((batch, tiles, max_g_len, cols), dtype=torch.float32)
    kept = None if mask is None else mask.contiguous()
    offset = None if batch_offset is None else batch_offset.contiguous()
    lengths = f_len.contiguous(), g_len.contiguous()
    _bwd(grad.contiguous(), kept, *lengths, offset, df, dg, workspace, scale)
    return df, dg


def _tile_of(batch: int, frames: int, cols: int) -> int:
    """Returns the number of frames that one sum of the workspace has (transducer_joint.h)."""
    sums_64, sums_32 = (batch * -(-frames // tile) * -(-cols // 128) for tile in (64, 32))
    return 64 if sums_64 >= 500 else 32 if sums_32 >= 250 else 16


def keep_scale(p: float) -> float:
    """Returns the factor of the elements that dropout keeps, or 0 if ``p`` is 1."""
    return 1.0 - p if p in (0.0, 1.0) else 65536 / (65536 - drop_threshold(p))


class _TransducerJoint(OpFunction):
    LABEL = "transducer_joint"

    @staticmethod
    def forward(
        ctx: Any,
        f: torch.Tensor,
        g: torch.Tensor,
        f_len: torch.Tensor,
        g_len: torch.Tensor,
        batch_offset: torch.Tensor | None,
        packed_rows: int,
        relu: bool,
        p: float,
        seed: torch.Tensor | None,
    ) -> torch.Tensor:
        with_mask = (relu or p > 0.0) and any(ctx.needs_input_grad[:2])
        out, mask = transducer_joint_fwd(
            f, g, f_len, g_len, batch_offset, packed_rows, relu=relu, p=p, seed=seed,
            with_mask=with_mask,
        )  # fmt: skip
        ctx.save_for_backward(mask, f_len, g_len, batch_offset)
        ctx.options = f.shape[1], g.shape[1], keep_scale(p)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        df, dg = transducer_joint_bwd(grad, *ctx.saved_tensors, *ctx.options)
        return df, dg, None, None, None, None, None, None, None


def reference(
    f: torch.Tensor,
    g: torch.Tensor,
    f_len: torch.Tensor,
    g_len: torch.Tensor,
    batch_offset: torch.Tensor | None = None,
    packed_rows: int = 0,
    *,
    relu: bool = False,
    p: float = 0.0,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``transducer_joint`` in plain PyTorch in the dtype of ``f``, differentiably.

    ``f`` is [B, T, H], ``g`` [B, U, H], and the result [B, T, U, H] or, with ``batch_offset``,
    packed [rows, H]; ``packed_rows`` is not read. ``seed``, one int64, must be given if 0 < p < 1.
    """
    out = f[:, :, None] + g[:, None]
    cells = cells_of(f_len, g_len, *out.shape[1:3])
    if relu:
        out = out.relu()
    if batch_offset is not None:
        out = out[cells]
    if 0.0 < p < 1.0:
        assert seed is not None
        kept = keep_mask(seed, out[..., 0].numel(), out.shape[-1], p).view(out.shape)
        out = out * kept
    out = out * keep_scale(p)
    return out if batch_offset is not None else out.masked_fill(~cells[..., None], -1.0)


def cells_of(
    f_len: torch.Tensor, g_len: torch.Tensor, max_f_len: int, max_g_len: int
) -> torch.Tensor:
    """Returns a bool [B, T, U], True within the lengths of each sample."""
    frames, places = (torch.arange(n, device=f_len.device) for n in (max_f_len, max_g_len))
    return (frames < f_len[:, None])[..., None] & (places < g_len[:, None])[:, None]
