"""Comparison of scaled_softmax with its formula, for its test files."""

import torch
from checks import assert_as_good_as_torch

from apex_te.ops import scaled_softmax as op


def hidden_of(x, mask, causal):
    """What the mask and causality hide, in x's shape."""
    hidden = torch.zeros(x.shape, dtype=torch.bool)
    if mask is not None:
        hidden = hidden | mask.cpu()
    if causal is not None:
        rows, cols = x.shape[-2:]
        hidden = hidden | (torch.ones(rows, cols).triu(1 + cols - rows) != 0)
    return hidden


def check(x, scale, mask=None, causal=None, device="cpu"):
    """Forward and gradient; x and mask on the CPU. Returns y and dx."""
    dy = torch.randn(x.shape).to(x.dtype)
    exact, plain, ours = (
        t.detach().requires_grad_() for t in (x.double(), x, x.to(device, copy=True))
    )
    mask_there = None if mask is None else mask.to(device)
    y = op.scaled_softmax(ours, scale, mask_there, causal=causal)
    y.backward(dy.to(device))
    expected = op.reference(exact, scale, mask, causal=causal)
    expected.backward(dy.double())
    same_dtype = op.reference(plain, scale, mask, causal=causal)
    same_dtype.backward(dy)
    assert_as_good_as_torch(y, expected, same_dtype)
    assert_as_good_as_torch(ours.grad, exact.grad, plain.grad)
    hidden = hidden_of(x, mask, causal)
    assert not y.detach().cpu()[hidden].any()
    assert not ours.grad.cpu()[hidden].any()
    return y.detach(), ours.grad


def random_mask(*shape):
    return torch.rand(shape) < 0.4
