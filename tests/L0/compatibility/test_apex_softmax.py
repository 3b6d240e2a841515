"""apex's four softmax extensions against scale, mask, softmax in plain PyTorch."""

import math

import pytest
import torch
from apex_te.compatibility.apex import (
    generic_scaled_masked_softmax_cuda,
    scaled_masked_softmax_cuda,
    scaled_softmax_cuda,
    scaled_upper_triang_masked_softmax_cuda,
)
from checks import DTYPES, assert_as_good_as_torch

MASKED = [scaled_masked_softmax_cuda, generic_scaled_masked_softmax_cuda]


def formula(x, hidden, scale, dtype):
    """softmax of the scaled scores, 0 where hidden; a row that sees nothing is 0. Differentiable"""
    scores = (x.to(dtype) * scale).masked_fill(hidden, -math.inf)
    nothing = hidden.expand_as(x).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(hidden | nothing, 0.0)


def check(module, x, hidden, arguments, scale, dtype):
    """Forward, and backward from its result, as apex's functions call them."""
    scale_t = torch.tensor([scale])
    y = module.forward(x, *arguments, scale_t[0])
    dy = torch.randn(x.shape).to(dtype).to(x.device)
    kept = dy.clone()
    dx = module.backward(dy, y, scale_t[0])
    assert torch.equal(dy, kept)
    found = []
    for wide in (torch.float64, dtype):
        leaf = x.detach().cpu().to(wide).requires_grad_()
        out = formula(leaf, hidden.cpu(), scale, wide)
        found.append((out.detach(), torch.autograd.grad(out, leaf, dy.cpu().to(wide))[0]))
    assert_as_good_as_torch(y, found[0][0], found[1][0])
    assert_as_good_as_torch(dx, found[0][1], found[1][1])
    return y, dx


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 8, 65), (1, 2, 4, 2048), (3, 1, 5, 16)], ids=str)
def test_scaled(device, poison, shape, dtype):
    x = torch.randn(shape).to(dtype).to(device)
    hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    check(scaled_softmax_cuda, x, hidden, (), 0.7, dtype)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("batches", ["each", "one"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("module", MASKED, ids=lambda m: m.__name__.rpartition(".")[2])
def test_masked(device, poison, module, dtype, batches, mask_dtype):
    """1 hides; a row without a visible element gives zeros and no gradient."""
    batch, heads, sq, sk = 3, 2, 8, 70
    x = torch.randn(batch, heads, sq, sk).to(dtype).to(device)
    hidden = torch.rand(batch if batches == "each" else 1, 1, sq, sk, device=device) < 0.3
    hidden[0, 0, 2] = True
    y, dx = check(module, x, hidden, (hidden.to(mask_dtype),), 0.5, dtype)
    rows = (y[0, :, 2], dx[0, :, 2])
    assert not any(r.any() for r in rows)


def test_only_1_hides(device):
    x = torch.randn(1, 1, 4, 32, device=device)
    mask = torch.zeros(1, 1, 4, 32, dtype=torch.uint8, device=device)
    mask[..., 3], mask[..., 5] = 1, 2
    y = scaled_masked_softmax_cuda.forward(x, mask, 1.0)
    assert not y[..., 3].any()
    assert (y[..., 5] > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 17, 128])
def test_upper_triang(device, poison, length, dtype):
    x = torch.randn(6, length, length).to(dtype).to(device)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    check(scaled_upper_triang_masked_softmax_cuda, x, hidden, (), 1.3, dtype)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [(1, 256), (16, 16), (32, 8), (33, 8), (128, 8), (129, 4), (2048, 4)],
)
def test_batch_per_block(keys, expected):
    """128 threads of 32 a warp, two rows a warp up to 128 keys, keys rounded up to a power of 2."""
    assert scaled_masked_softmax_cuda.get_batch_per_block(64, keys, 2, 8) == expected


def test_bad_arguments_name_themselves(device):
    x = torch.randn(2, 2, 4, 8, device=device)
    mask = torch.zeros(2, 1, 4, 8, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="scaled_softmax_cuda: input must have 4 dimensions"):
        scaled_softmax_cuda.forward(x[0], 1.0)
    with pytest.raises(ValueError, match=r"upper_triang.*: input must have 3 dimensions"):
        scaled_upper_triang_masked_softmax_cuda.forward(x, 1.0)
    with pytest.raises(ValueError, match="mask must have 4 dimensions"):
        scaled_masked_softmax_cuda.forward(x, mask[0], 1.0)
    with pytest.raises(TypeError, match=r"mask must be bool or uint8, got torch.float32"):
        generic_scaled_masked_softmax_cuda.forward(x, mask.float(), 1.0)
    with pytest.raises(ValueError, match="mask"):
        scaled_masked_softmax_cuda.forward(x, mask[:, :, :, :5], 1.0)
    with pytest.raises(ValueError, match="output_grads must have 4 dimensions"):
        scaled_softmax_cuda.backward(x[0], x, 1.0)
