"""apex's fused_index_mul_2d: in1[idx1] * in2 and its gradients, written into given tensors."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops.index_mul_2d import index_mul_2d_bwd, index_mul_2d_fwd

__all__ = [
    "float_backward",
    "float_backward_backward",
    "float_forward",
    "half_backward",
    "half_backward_backward",
    "half_forward",
]


@torch.no_grad()
def float_forward(
    out: torch.Tensor, in1: torch.Tensor, in2: torch.Tensor, idx1: torch.Tensor
) -> None:
    """Writes in1[idx1] * in2 to out; in1 [m, d], in2 and out [e, d], idx1 [e] int64."""
    index_mul_2d_fwd(in1, in2, idx1, out=out)


@torch.no_grad()
def float_backward(
    grad_in1: torch.Tensor,
    grad_in2: torch.Tensor,
    grad_out: torch.Tensor,
    in1: torch.Tensor,
    in2: torch.Tensor,
    idx1: torch.Tensor,
) -> None:
    """Adds grad_out * in2 to rows idx1 of grad_in1, writes grad_out * in1[idx1] to grad_in2."""
    index_mul_2d_bwd(grad_out, in1, in2, idx1, din1=grad_in1, out=grad_in2)


@torch.no_grad()
def float_backward_backward(
    grad_grad_out: torch.Tensor,
    grad_in1: torch.Tensor,
    grad_in2: torch.Tensor,
    grad_out: torch.Tensor,
    grad_grad_in1: torch.Tensor,
    grad_grad_in2: torch.Tensor,
    in1: torch.Tensor,
    in2: torch.Tensor,
    idx1: torch.Tensor,
) -> None:
    """Writes the gradients of ``float_backward`` to the first three tensors; grad_in1 is added to.

    grad_grad_out = grad_grad_in1[idx1] * in2 + grad_grad_in2 * in1[idx1], grad_in1[idx1] +=
    grad_grad_in2 * grad_out and grad_in2 = grad_grad_in1[idx1] * grad_out.
    """
    index_mul_2d_fwd(grad_grad_in1, in2, idx1, in1, grad_grad_in2, out=grad_grad_out)
    index_mul_2d_bwd(grad_out, grad_grad_in1, grad_grad_in2, idx1, din1=grad_in1, out=grad_in2)


half_forward = float_forward
half_backward = float_backward
half_backward_backward = float_backward_backward
