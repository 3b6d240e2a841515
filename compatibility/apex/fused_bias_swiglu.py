"""apex's fused_bias_swiglu: SwiGLU of input + bias."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops.swiglu import swiglu_bwd, swiglu_fwd

__all__ = ["backward", "forward"]


def forward(input: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up, [rows, F], where input + bias is gate and up side by side.

    Args:
        input: [rows, 2F], gate first.
        bias: [2F].

    Raises:
        ValueError: the input is not of shape [rows, 2F].
    """
    _check(input)
    return swiglu_fwd(input, None, bias.contiguous())


def backward(grad_output: torch.Tensor, input: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Computes the input's gradient [rows, 2F], whose sum over rows is the bias's gradient.

    ``grad_output`` is [rows, F]; ``input`` and ``bias`` are those of ``forward``.

    Raises:
        ValueError: the input is not of shape [rows, 2F].
    """
    _check(input)
    return swiglu_bwd(grad_output, input, None, bias.contiguous()).input


def _check(input: torch.Tensor) -> None:
    """Checks that the input has shape [rows, 2F]; raises ``ValueError``."""
    if input.dim() != 2 or input.shape[1] % 2:
        raise ValueError(
            "fused_bias_swiglu: input must have shape [rows, 2 * features], "
            f"got {list(input.shape)}"
        )
