"""Sums over many rows: weight and bias gradients are as accurate as PyTorch's on the device."""

import pytest
import torch
from checks import assert_error_as_torch
from torch.nn import functional as F

from apex_te.ops import (
    bias_dropout_add,
    bias_gelu,
    cast_transpose,
    grouped_quantize,
    layer_norm,
    rms_norm,
    swiglu,
)

ROWS = 400_000


def gradients(function, dy, *inputs):
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves[1:], dy)


def exact_gradients(function, dy, x, *params):
    """Gradients of `params` in float64: sums over pieces of the rows, which need little memory."""
    params = [t.double() for t in params]
    pieces = zip(dy.split(ROWS // 8), x.split(ROWS // 8), strict=True)
    found = [gradients(function, d.double(), p.double(), *params) for d, p in pieces]
    return [torch.stack(sums).sum(0) for sums in zip(*found, strict=True)]


def columns_of(device, width=1):
    """Few for the CPU's time; on a GPU the kernels cut their rows by the width."""
    return (24,) if device.type == "cpu" else (24, 128 // width)


def check(device, ours, plain, width, params):
    """Gradients of `params` in float32 against PyTorch's, both against float64."""
    for cols in columns_of(device, width):
        for mean in (0.0, 1.0):
            x = torch.randn(ROWS, width * cols, device=device) + mean
            dy = torch.randn(ROWS, cols, device=device) + mean / 2
            inputs = [torch.rand(width * cols, device=device) + 0.5 for _ in range(params)]
            exact = exact_gradients(plain, dy, x, *inputs)
            same = gradients(plain, dy, x, *inputs)
            for found, *expected in zip(gradients(ours, dy, x, *inputs), exact, same, strict=True):
                assert_error_as_torch(found, *expected)


def test_rms_norm(device):
    check(
        device,
        lambda x, w: rms_norm.rms_norm(x, w, eps=1e-5),
        lambda x, w: F.rms_norm(x, x.shape[1:], w, 1e-5),
        width=1,
        params=1,
    )


@pytest.mark.long
def test_layer_norm(device):
    check(
        device,
        lambda x, w, b: layer_norm.layer_norm(x, w, b, eps=1e-5),
        lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b, 1e-5),
        width=1,
        params=2,
    )


@pytest.mark.long
def test_bias_gelu(device):
    check(
        device,
        bias_gelu.bias_gelu,
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        width=1,
        params=1,
    )


def test_swiglu(device):
    def plain(x, bias):
        gate, up = (x + bias).chunk(2, -1)
        return F.silu(gate) * up

    check(device, lambda x, bias: swiglu.swiglu(x, bias=bias), plain, width=2, params=1)


def column_sums_of_a_cast(dy):
    one = torch.ones(1, device=dy.device)
    return cast_transpose.cast_transpose(dy, one, torch.float8_e4m3fn, with_dbias=True).dbias


def sums_of_bias_dropout_add(dy):
    return bias_dropout_add.bias_dropout_add_bwd(
        dy, None, 0.0, x_dtype=None, bias_dtype=torch.float32
    )[1]


def sums_of_a_group(dy):
    groups = grouped_quantize.groups_of(torch.tensor([len(dy)], device=dy.device), len(dy))
    return grouped_quantize.column_sums(dy, groups)[0]


@pytest.mark.parametrize("sums", [column_sums_of_a_cast, sums_of_bias_dropout_add, sums_of_a_group])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_bias_gradient(device, sums, mean):
    for cols in columns_of(device):
        dy = torch.randn(ROWS, cols, device=device) + mean
        assert_error_as_torch(sums(dy), dy.double().sum(0), dy.sum(0))
