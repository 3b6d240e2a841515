"""Inputs of swiglu and what its formula gives, for its test files."""

import torch

from apex_te.ops import swiglu as op

SHAPES = [
    (1, 1), (3, 7), (8, 15), (16, 16), (17, 128), (127, 129), (128, 128), (129, 1000), (65, 264),
    (48, 3584), (5, 4095), (2, 8192),
]  # fmt: skip
# With limits that most, few or none of the inputs pass.
CLAMPED = [op.ClampedSwiglu(limit=1.0), op.ClampedSwiglu(alpha=1.0), op.ClampedSwiglu(float("inf"))]
ACTIVATIONS = [*op.ACTIVATIONS, *CLAMPED]


def make(shape, dtype, *, two=False, bias=False, spread=2):
    """Inputs (input, up, bias, up_bias) and the output's gradient, on the CPU."""
    rows, cols = shape
    grad_output = torch.randn(rows, cols).to(dtype)
    width = cols if two else 2 * cols
    parts = [
        torch.randn(rows, width),
        torch.randn(rows, cols),
        torch.randn(width),
        torch.randn(cols),
    ]
    gate, up, gate_bias, up_bias = ((spread * part).to(dtype) for part in parts)
    return (
        gate, up if two else None, gate_bias if bias else None, up_bias if bias and two else None,
    ), grad_output  # fmt: skip


def to(device, tensors):
    return [t if t is None else t.to(device) for t in tensors]


def formula(inputs, grad_output, dtype, activation):
    """Output, gradient of the [M, 2F] input and of its bias, in PyTorch computed in `dtype`."""
    leaves = [t if t is None else t.to(dtype).requires_grad_() for t in inputs]
    out = op.reference(*leaves, activation=activation)
    out.backward(grad_output.to(dtype))
    grad = torch.cat([t.grad for t in leaves[:2] if t is not None], dim=1)
    biases = [t.grad for t in leaves[2:] if t is not None]
    dbias = torch.cat(biases) if biases else grad.sum(0)
    return out.detach(), grad, dbias
