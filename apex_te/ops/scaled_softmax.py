"""Softmax of scaled attention scores, optionally masked or causal, in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch

from .binding import OpFunction, bind, checked, needs_autograd, note_written, once_differentiable

_fwd = bind("scaled_softmax", "scaled_softmax_fwd")
_bwd = bind("scaled_softmax", "scaled_softmax_bwd")

_CAUSAL = {None: 0, "upper_left": 1, "bottom_right": 2}


@checked
def scaled_softmax(
    x: torch.Tensor, scale: float, mask: torch.Tensor | None = None, *, causal: str | None = None
) -> torch.Tensor:
    """Computes softmax(scale * x) over the visible elements of the last dimension, 0 elsewhere.

    Elements hidden by ``mask`` or ``causal`` have no influence, even if they are NaN. Arithmetic is
    in float32. If a row has no visible elements, or they are all -Inf once scaled, its result and
    gradient are zeros, as in ``scaled_dot_product_attention``. A visible NaN or +Inf (-Inf if
    ``scale`` is negative) makes the row's visible elements NaN, as in ``torch.softmax``. It is
    differentiable once, in x.

    Args:
        x: [B, H, Sq, Sk] or [N, Sq, Sk] float32, float16 or bfloat16; made contiguous if it is not.
        scale: factor of x.
        mask: bool, True = hidden, with as many dimensions as x, each of x's size or 1 (broadcast).
            None hides nothing.
        causal: "upper_left" hides column > row, and needs Sq == Sk; "bottom_right" hides column >
            row + Sk - Sq; None hides nothing. Elements hidden by it are ignored.

    Returns:
        A tensor of x's shape and dtype. Autograd keeps only this tensor for backward.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or an option is not supported.
    """
    if needs_autograd(x):
        return _ScaledSoftmax.apply(x, mask, scale, causal)
    return scaled_softmax_fwd(x, scale, mask, causal=causal)


@checked
def scaled_softmax_fwd(
    x: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    *,
    causal: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``scaled_softmax`` without autograd.

    Args:
        x: [B, H, Sq, Sk] or [N, Sq, Sk] float32, float16 or bfloat16; made contiguous if it is not.
        scale, mask, causal: as in ``scaled_softmax``.
        out: contiguous tensor in x's shape and dtype to write instead of a new one.

    Returns:
        ``out`` or the new tensor, in x's shape and dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or an option is not supported.
    """
    mode = _causal_mode("scaled_softmax_fwd", causal)
    x = x.contiguous()
    if mask is not None and mask.dim() == x.dim():
        if mask.shape[-1] == 1 != x.shape[-1]:
            mask = mask.expand(*mask.shape[:-1], x.shape[-1])
        if mask.stride(-1) != 1:
            mask = mask.contiguous()
    y = torch.empty_like(x) if out is None else out
    _fwd(x, mask, y, scale, mode)
    note_written(out)
    return y


@checked
def scaled_softmax_bwd(
    dy: torch.Tensor,
    y: torch.Tensor,
    scale: float,
    *,
    causal: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the gradient of x from the output y: scale * y * (dy - sum(dy * y)).

    An element with y = 0 has gradient 0 for every dy, so no mask is needed.

    Args:
        dy: gradient of the output, in y's shape and dtype.
        y: output of ``scaled_softmax``, [B, H, Sq, Sk] or [N, Sq, Sk] float32, float16 or bfloat16.
        scale: factor of x in the forward.
        causal: "upper_left", "bottom_right" or None, as passed to ``scaled_softmax``. Hidden
            elements are ignored.
        out: contiguous tensor in y's shape and dtype to write instead of a new one; may be ``dy``.

    Returns:
        The gradient of x: ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match, or an option is not supported.
    """
    mode = _causal_mode("scaled_softmax_bwd", causal)
    dy, y = dy.contiguous(), y.contiguous()
    dx = torch.empty_like(dy) if out is None else out
    _bwd(dy, y, dx, scale, mode)
    note_written(out)
    return dx


def _causal_mode(op: str, causal: str | None) -> int:
    """Returns the kernels' number of a value of ``causal``; ValueError if there is none."""
    if causal not in _CAUSAL:
        raise ValueError(
            f"{op}: causal must be None, 'upper_left' or 'bottom_right', got {causal!r}"
        )
    return _CAUSAL[causal]


class _ScaledSoftmax(OpFunction):
    LABEL = "scaled_softmax"

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: str | None
    ) -> torch.Tensor:
        y = scaled_softmax_fwd(x, scale, mask, causal=causal)
        ctx.save_for_backward(y)
        ctx.scale, ctx.causal = scale, causal
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        return scaled_softmax_bwd(grad_output, y, ctx.scale, causal=ctx.causal), None, None, None


def reference(
    x: torch.Tensor, scale: float, mask: torch.Tensor | None = None, *, causal: str | None = None
) -> torch.Tensor:
    """Computes ``scaled_softmax`` in plain PyTorch in x's dtype, as a differentiable reference.

    x is [..., Sq, Sk] in any floating-point dtype; ``mask`` is bool, True = hidden, and broadcasts
    to x; ``causal`` is "upper_left", "bottom_right" or None.
    """
    queries, cols = x.shape[-2:]
    hidden = torch.zeros(1, 1, dtype=torch.bool, device=x.device) if mask is None else mask
    if causal is not None:
        row = torch.arange(queries, device=x.device).unsqueeze(-1)
        hidden = hidden | (torch.arange(cols, device=x.device) > row + cols - queries)
    scores = (x * scale).masked_fill(hidden, -torch.inf)
    sees_nothing = (scores == -torch.inf).all(-1, keepdim=True)
    y = torch.softmax(scores.masked_fill(sees_nothing, 0.0), dim=-1)
    return y.masked_fill(hidden | sees_nothing, 0.0)
