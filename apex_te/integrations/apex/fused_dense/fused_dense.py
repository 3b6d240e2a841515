"""Linear layers, whose matmul of PyTorch adds the bias, and two of them with GELU between."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ....compatibility.apex import fused_dense_cuda
from .._autocast_utils import call_autocast

_fused_dense = fused_dense_function = functional.linear
_dense_no_bias = dense_no_bias_function = functional.linear


class FusedDense(torch.nn.Linear):
    """Linear layer; ``torch.nn.Linear``, whose bias PyTorch's matmul adds."""


class FusedDenseGeluDenseFunc(torch.autograd.Function):
    """Autograd function of ``fused_dense_cuda``: input, weight1, bias1, weight2, bias2."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        """Returns the output [..., out] of ``input`` [..., in]."""
        x = input.reshape(-1, input.shape[-1])
        hidden, out, gelu_in = fused_dense_cuda.linear_gelu_linear_forward(x, *params)
        ctx.save_for_backward(x, gelu_in, hidden, params[0], params[2])
        ctx.shape = input.shape
        return out.view(*input.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Returns the gradients of all five."""
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        dx, *grads = fused_dense_cuda.linear_gelu_linear_backward(*ctx.saved_tensors, rows)
        return (dx.view(ctx.shape), *grads)


def fused_dense_gelu_dense_function(
    input: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor,
    weight2: torch.Tensor,
    bias2: torch.Tensor,
) -> torch.Tensor:
    """Returns two linear layers of ``input`` [..., in] with GELU, in its tanh form, between.

    Args:
        input: [..., in].
        weight1, bias1: [hidden, in] and [hidden].
        weight2, bias2: [out, hidden] and [out].

    Returns:
        A tensor [..., out].
    """
    return call_autocast(FusedDenseGeluDenseFunc.apply, input, weight1, bias1, weight2, bias2)


_fused_dense_gelu_dense = fused_dense_gelu_dense_function


class FusedDenseGeluDense(torch.nn.Module):
    """Two linear layers with GELU, in its tanh form, between them.

    Args:
        in_features: size of the input's last dimension.
        intermediate_features: size between the layers.
        out_features: size of the output's last dimension.
        bias: must be True.

    Raises:
        NotImplementedError: ``bias`` is False.
    """

    def __init__(
        self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True
    ) -> None:
        super().__init__()
        if not bias:
            raise NotImplementedError(
                "FusedDenseGeluDense: bias must be True, as in apex, got False; use two "
                "torch.nn.Linear with torch.nn.functional.gelu"
            )
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        first = torch.nn.Linear(in_features, intermediate_features)
        second = torch.nn.Linear(intermediate_features, out_features)
        self.weight1, self.bias1 = first.weight, first.bias
        self.weight2, self.bias2 = second.weight, second.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the output [..., out_features] of ``input`` [..., in_features]."""
        return fused_dense_gelu_dense_function(
            input, self.weight1, self.bias1, self.weight2, self.bias2
        )
