"""``MLP``: linear layers with an activation after each, the last one too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ....compatibility.apex import mlp_cuda
from .._autocast_utils import call_autocast

_ACTIVATIONS = {"none": 0, "relu": 1, "sigmoid": 2}


class MlpFunction(torch.autograd.Function):
    """Autograd function of ``mlp_cuda``: bias, activation, x, weights, biases."""

    @staticmethod
    def forward(ctx: Any, bias: int, activation: int, *args: torch.Tensor) -> torch.Tensor:
        """Returns the output [rows, out] of x [rows, in]."""
        outputs = mlp_cuda.forward(bias, activation, args)
        ctx.save_for_backward(*outputs, *args)
        ctx.bias, ctx.activation = bias, activation
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Returns the gradients of x, weights and biases."""
        output, reserved, *args = ctx.saved_tensors
        grads = mlp_cuda.backward(ctx.bias, ctx.activation, grad_output, [output, reserved], args)
        return (None, None, *grads)


def mlp_function(bias: int, activation: int, *args: torch.Tensor) -> torch.Tensor:
    """Computes linear layers with an activation after each.

    Args:
        bias: 1 if ``args`` has biases, else 0.
        activation: 0 none, 1 ReLU, 2 sigmoid.
        args: x [rows, in], the weights [out, in], then the biases [out].
    """
    return call_autocast(MlpFunction.apply, bias, activation, *args)


class MLP(torch.nn.Module):
    """Linear layers with an activation after each, the last one too.

    Args:
        mlp_sizes: the input's size, and the output's size of each layer.
        bias: the layers have biases.
        activation: "relu", "sigmoid" or "none".

    Raises:
        TypeError: ``activation`` is not one of these.
    """

    def __init__(
        self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu"
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise TypeError(
                f"MLP: activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}"
            )
        self.mlp_sizes = list(mlp_sizes)
        self.num_layers = len(self.mlp_sizes) - 1
        self.bias = int(bool(bias))
        self.activation = _ACTIVATIONS[activation]
        for i, (inner, outer) in enumerate(itertools.pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{i}", torch.nn.Parameter(torch.empty(outer, inner)))
            if self.bias:
                self.register_parameter(f"bias_{i}", torch.nn.Parameter(torch.empty(outer)))
        self.reset_parameters()

    @property
    def weights(self) -> list[torch.Tensor]:
        """The layers' weights [out, in]."""
        return [getattr(self, f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[torch.Tensor]:
        """The layers' biases [out]; empty without biases."""
        return [getattr(self, f"bias_{i}") for i in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Draws weights and biases from normal distributions."""
        for weight in self.weights:
            torch.nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
        for bias in self.biases:
            torch.nn.init.normal_(bias, 0.0, math.sqrt(1.0 / bias.shape[0]))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the output [rows, mlp_sizes[-1]] of ``input`` [rows, mlp_sizes[0]].

        ``input`` has the parameters' dtype; under ``torch.autocast`` all are cast to its dtype.
        """
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Returns the options for ``repr``."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"
