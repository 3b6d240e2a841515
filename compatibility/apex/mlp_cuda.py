"""apex's mlp_cuda, computed by PyTorch: a chain of linear layers with an activation after each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apex_te._version import __version__ as __version__

__all__ = ["backward", "forward"]

_NONE, _RELU, _SIGMOID = range(3)


@torch.no_grad()
def forward(use_bias: int, activation: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Computes a chain of linear layers, each with an activation.

    Args:
        use_bias: 1 if ``inputs`` has biases.
        activation: 0 none, 1 ReLU, 2 sigmoid; after every layer, the last one too.
        inputs: x [rows, in], then the layers' weights [out, in], then their biases [out].

    Returns:
        [output, outputs of the layers before the last in one flat tensor], for ``backward``.
    """
    x, weights, biases = _split("forward", use_bias, activation, inputs)
    hidden = weights[:-1]
    reserved = x.new_empty(sum(x.shape[0] * w.shape[0] for w in hidden))
    for i, weight in enumerate(weights):
        last = i + 1 == len(weights)
        out = x.new_empty(x.shape[0], weight.shape[0]) if last else _hidden(reserved, x, weights, i)
        if biases:
            torch.addmm(biases[i], x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out=out)
        if activation == _RELU:
            out.relu_()
        elif activation == _SIGMOID:
            out.sigmoid_()
        x = out
    return [x, reserved]


@torch.no_grad()
def backward(
    use_bias: int,
    activation: int,
    grad_o: torch.Tensor,
    fprop_outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Returns the gradients of ``inputs``, in their order; None for x if it requires no gradient.

    Args:
        use_bias, activation, inputs: as in ``forward``.
        grad_o: the output's gradient.
        fprop_outputs: the list that ``forward`` returned.
    """
    x, weights, biases = _split("backward", use_bias, activation, inputs)
    output, reserved = fprop_outputs
    outputs = [_hidden(reserved, x, weights, i) for i in range(len(weights) - 1)]
    before, after = [x, *outputs], [*outputs, output]
    grads: list[torch.Tensor | None] = [None] * len(inputs)
    grad = grad_o
    for i in reversed(range(len(weights))):
        if activation == _RELU:
            grad = grad * (after[i] > 0)
        elif activation == _SIGMOID:
            grad = grad * after[i] * (1 - after[i])
        grads[1 + i] = grad.t() @ before[i]
        if biases:
            grads[1 + len(weights) + i] = grad.sum(0)
        if i or x.requires_grad:
            grad = grad @ weights[i]
    if x.requires_grad:
        grads[0] = grad
    return grads


def _split(
    op: str, use_bias: int, activation: int, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Splits ``inputs`` of function ``op`` into x, weights and biases.

    Returns:
        The tensor x, the weights, and the biases, which are empty without ``use_bias``.
    """
    if activation not in (_NONE, _RELU, _SIGMOID):
        raise ValueError(
            f"mlp_cuda.{op}: activation must be 0 (none), 1 (ReLU) or 2 (sigmoid), "
            f"got {activation!r}"
        )
    layers, rest = divmod(len(inputs) - 1, 2 if use_bias else 1)
    if layers < 1 or rest:
        wanted = "x, n weights and n biases" if use_bias else "x and weights"
        raise ValueError(f"mlp_cuda.{op}: inputs must be {wanted}, got {len(inputs)} tensors")
    return inputs[0], inputs[1 : 1 + layers], inputs[1 + layers :]


def _hidden(
    reserved: torch.Tensor, x: torch.Tensor, weights: Sequence[torch.Tensor], layer: int
) -> torch.Tensor:
    """Returns the view of ``reserved``, [rows, out], that holds the output of one layer."""
    rows = x.shape[0]
    begin = rows * sum(w.shape[0] for w in weights[:layer])
    width = weights[layer].shape[0]
    return reserved[begin : begin + rows * width].view(rows, width)
