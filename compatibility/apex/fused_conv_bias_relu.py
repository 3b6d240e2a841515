"""apex's fused_conv_bias_relu: 2D convolutions with bias and ReLU, computed by PyTorch (cuDNN).

x is [N, C, H, W], weight [K, C, R, S], bias and scale K elements of any shape, all of one dtype;
``padding`` and ``stride`` are ints for both directions. Lists are apex's lists of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import conv2d

from apex_te._version import __version__ as __version__

__all__ = [
    "backward",
    "backward_cscale_cbias_relu",
    "backward_no_relu",
    "forward",
    "forward_cscale_cbias_relu",
    "forward_mask",
    "forward_no_relu",
]

Tensors = Sequence[torch.Tensor]


@torch.no_grad()
def forward(inputs: Tensors, padding: int, stride: int) -> list[torch.Tensor]:
    """Computes relu(conv(x) + bias) of [x, weight, bias]; returns [y]."""
    return [_conv("forward", inputs, 3, padding, stride).relu_()]


@torch.no_grad()
def forward_mask(inputs: Tensors, padding: int, stride: int) -> list[torch.Tensor]:
    """Computes relu((conv(x) + bias) * mask) of [x, weight, bias, mask]; returns [y].

    The mask has y's shape, or one that broadcasts to it, and elements 0 and 1: ``backward`` takes
    its effect from y.
    """
    y = _conv("forward_mask", inputs, 4, padding, stride)
    return [y.mul_(inputs[3]).relu_()]


@torch.no_grad()
def forward_no_relu(inputs: Tensors, padding: int, stride: int) -> list[torch.Tensor]:
    """Computes conv(x) + bias of [x, weight, bias]; returns [y]."""
    return [_conv("forward_no_relu", inputs, 3, padding, stride)]


@torch.no_grad()
def forward_cscale_cbias_relu(inputs: Tensors, padding: int, stride: int) -> list[torch.Tensor]:
    """Computes relu(conv(x) * scale + bias) of [x, weight, scale, bias]; returns [y]."""
    op = "forward_cscale_cbias_relu"
    y = _conv(op, inputs, 4, padding, stride, with_bias=False)
    scale, bias = (_channels(op, *named, y) for named in zip(_SCALED, inputs[2:], strict=True))
    return [torch.addcmul(bias, y, scale).relu_()]


@torch.no_grad()
def backward(inputs: Tensors, padding: int, stride: int) -> list[torch.Tensor]:
    """Returns the gradients [dx, dweight, dbias] of ``forward`` from [x, weight, y, dy]."""
    x, weight, y, dy = _tensors("backward", inputs, 4)
    return _conv_backward(dy * (y > 0), x, weight, padding, stride, with_bias=True)


@torch.no_grad()
def backward_no_relu(inputs: Tensors, padding: int, stride: int) -> list[torch.Tensor]:
    """Returns the gradients [dx, dweight, dbias] of ``forward_no_relu`` from [x, weight, dy]."""
    x, weight, dy = _tensors("backward_no_relu", inputs, 3)
    return _conv_backward(dy, x, weight, padding, stride, with_bias=True)


@torch.no_grad()
def backward_cscale_cbias_relu(inputs: Tensors, padding: int, stride: int) -> list[torch.Tensor]:
    """Returns the gradients [dx, dweight] of the scaled forward from [x, weight, scale, y, dy]."""
    op = "backward_cscale_cbias_relu"
    x, weight, scale, y, dy = _tensors(op, inputs, 5)
    dconv = dy * (y > 0) * _channels(op, "scale", scale, y)
    return _conv_backward(dconv, x, weight, padding, stride, with_bias=False)


_SCALED = ("scale", "bias")


def _tensors(op: str, inputs: Tensors, count: int) -> Tensors:
    if len(inputs) != count:
        raise ValueError(
            f"fused_conv_bias_relu.{op}: inputs must be {count} tensors, got {len(inputs)}"
        )
    return inputs


def _channels(op: str, name: str, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns ``t`` of one element per channel of y as [1, K, 1, 1]."""
    if t.numel() != y.shape[1]:
        raise ValueError(
            f"fused_conv_bias_relu.{op}: {name} must have {y.shape[1]} elements, got {t.numel()}"
        )
    return t.reshape(1, -1, 1, 1)


def _conv(
    op: str, inputs: Tensors, count: int, padding: int, stride: int, with_bias: bool = True
) -> torch.Tensor:
    """Returns conv(x) of the first ``inputs``, x and weight, plus the third if ``with_bias``."""
    x, weight, bias, *_ = _tensors(op, inputs, count)
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"fused_conv_bias_relu.{op}: x must have shape [N, C, H, W] and weight [K, C, R, S], "
            f"got {list(x.shape)} and {list(weight.shape)}"
        )
    if with_bias:
        bias = _channels(op, "bias", bias, weight.transpose(0, 1)).flatten()
    return conv2d(x, weight, bias if with_bias else None, stride, padding)


def _conv_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, padding: int, stride: int,
    with_bias: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Returns the gradients of x, weight and, if ``with_bias``, bias [1, K, 1, 1]."""
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1,
        [True, True, False],
    )  # fmt: skip
    if not with_bias:
        return [dx, dweight]
    return [dx, dweight, dy.sum((0, 2, 3), keepdim=True)]
