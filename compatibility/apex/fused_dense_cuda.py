"""apex's fused_dense_cuda: linear layers with bias and GELU, whose products PyTorch computes."""

from __future__ import annotations

import torch

from apex_te._version import __version__ as __version__
from apex_te.ops.activation import activation_fwd
from apex_te.ops.bias_gelu import bias_gelu_bwd

__all__ = [
    "linear_bias_backward",
    "linear_bias_forward",
    "linear_gelu_linear_backward",
    "linear_gelu_linear_forward",
]


@torch.no_grad()
def linear_bias_forward(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Computes input [rows, in] @ weight [out, in]^T + bias [out].

    Raises:
        ValueError: input or weight is not a matrix.
    """
    _check_matrices("linear_bias_forward", input=input, weight=weight)
    return torch.addmm(bias, input, weight.t())


@torch.no_grad()
def linear_bias_backward(
    input: torch.Tensor, weight: torch.Tensor, d_output: torch.Tensor
) -> list[torch.Tensor]:
    """Computes the gradients of ``linear_bias_forward`` from the output's gradient.

    Args:
        input: [rows, in].
        weight: [out, in].
        d_output: the output's gradient, [rows, out].

    Returns:
        A list of three tensors: the gradients of input, weight and bias.

    Raises:
        ValueError: a tensor is not a matrix.
    """
    _check_matrices("linear_bias_backward", input=input, weight=weight, d_output=d_output)
    return [d_output @ weight, d_output.t() @ input, d_output.sum(0)]


@torch.no_grad()
def linear_gelu_linear_forward(
    input: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor,
    weight2: torch.Tensor,
    bias2: torch.Tensor,
) -> list[torch.Tensor]:
    """Computes two linear layers with GELU (tanh form) between them.

    Returns:
        A list of three tensors: the output of GELU, the final output and the input of GELU.
        ``linear_gelu_linear_backward`` takes the first as output1 and the last as gelu_in.

    Raises:
        ValueError: input or a weight is not a matrix.
    """
    _check_matrices("linear_gelu_linear_forward", input=input, weight1=weight1, weight2=weight2)
    gelu_in = torch.addmm(bias1, input, weight1.t())
    output1 = activation_fwd(gelu_in, "gelu")
    return [output1, torch.addmm(bias2, output1, weight2.t()), gelu_in]


@torch.no_grad()
def linear_gelu_linear_backward(
    input: torch.Tensor,
    gelu_in: torch.Tensor,
    output1: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    d_output2: torch.Tensor,
) -> list[torch.Tensor]:
    """Computes the gradients of ``linear_gelu_linear_forward``.

    Args:
        input: input of the forward, [rows, in].
        gelu_in: third tensor that the forward returned.
        output1: first tensor that the forward returned.
        weight1: weight of the first layer.
        weight2: weight of the second layer.
        d_output2: gradient of the final output.

    Returns:
        A list of five gradients: of input, weight1, bias1, weight2 and bias2.

    Raises:
        ValueError: a tensor is not a matrix.
    """
    _check_matrices(
        "linear_gelu_linear_backward", input=input, gelu_in=gelu_in, output1=output1,
        weight1=weight1, weight2=weight2, d_output2=d_output2,
    )  # fmt: skip
    d_output1 = d_output2 @ weight2
    d_gelu_in, d_bias1 = bias_gelu_bwd(d_output1, gelu_in, with_dbias=True, out=d_output1)
    assert d_bias1 is not None
    return [
        d_gelu_in @ weight1,
        d_gelu_in.t() @ input,
        d_bias1,
        d_output2.t() @ output1,
        d_output2.sum(0),
    ]


def _check_matrices(op: str, **tensors: torch.Tensor) -> None:
    """Checks that the named arguments of ``op`` have 2 dimensions; raises ``ValueError``."""
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            raise ValueError(f"{op}: {name} must have 2 dimensions, got shape {list(tensor.shape)}")
