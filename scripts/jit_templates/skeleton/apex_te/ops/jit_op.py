"""The function x / (1 + scale |x|) of every element, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from .binding import OpFunction, bind, checked, note_written

# Arguments as csrc/jit_op/jit_op.h declares them.
_fwd = bind("jit_op", "jit_op_fwd")
_bwd = bind("jit_op", "jit_op_bwd")


@checked
def jit_op(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Computes x / (1 + scale |x|) for every element, differentiably, in float32 arithmetic.

    NaN and infinities give NaN.

    Args:
        x: any shape, float32, float16 or bfloat16; made contiguous if it is not.
        scale: finite, at least 0.

    Returns:
        A tensor of x's shape and dtype; x is saved for backward.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a scale that does not fit.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _JitOp.apply(x, scale)
    return jit_op_fwd(x, scale)


@checked
def jit_op_fwd(
    x: torch.Tensor,
    scale: float = 1.0,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the function without autograd, in ``out`` if it is given, which may be x."""
    x = x.contiguous()
    y = torch.empty_like(x) if out is None else out
    _fwd(x, y, scale)
    note_written(out)
    return y


@checked
def jit_op_bwd(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    scale: float = 1.0,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the gradient with respect to x, grad_output / (1 + scale |x|)^2.

    Args:
        grad_output: x's shape and dtype.
        x: the forward's.
        scale: the forward's.
        out: written instead of a new tensor; may be ``grad_output``.
    """
    grad_output, x = grad_output.contiguous(), x.contiguous()
    grad_input = torch.empty_like(x) if out is None else out
    _bwd(grad_output, x, grad_input, scale)
    note_written(out)
    return grad_input


class _JitOp(OpFunction):
    LABEL = "jit_op"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return jit_op_fwd(x, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return jit_op_bwd(grad_output, x, ctx.scale), None


def reference(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Computes the function in plain PyTorch in x's dtype, differentiably; the specification."""
    return x / (1 + scale * x.abs())
