"""apex's rotary embedding, in its four layouts, and its SwiGLU with bias."""

import pytest
import torch
from apex_te.compatibility.apex import fused_bias_swiglu
from apex_te.compatibility.apex import fused_rotary_positional_embedding as rotary
from checks import DTYPES, assert_as_good_as_torch, assert_same_bits


def rotate(x, cos, sin):
    """x cos + rotate_half(x) sin over the first columns, as apex's tests write it."""
    dim = cos.shape[-1]
    head, rest = x[..., :dim], x[..., dim:]
    a, b = head.chunk(2, -1)
    return torch.cat([head * cos + torch.cat([-b, a], -1) * sin, rest], -1)


def check(outputs, x, dy, turn, dtype):
    """(output, input gradient) against ``turn`` and its gradient, in float64 and ``dtype``."""
    found = []
    for wide in (torch.float64, dtype):
        leaf = x.detach().cpu().to(wide).requires_grad_()
        y = turn(leaf, wide)
        found.append((y.detach(), torch.autograd.grad(y, leaf, dy.cpu().to(wide))[0]))
    for k, out in enumerate(outputs):
        assert_as_good_as_torch(out, found[0][k], found[1][k])


def angles(length, dim, device, halves="equal"):
    """Angles whose second half of columns repeats the first, or that are all random."""
    if halves == "random":
        return (6 * torch.rand(length, 1, 1, dim)).to(device)
    half = torch.arange(length).float()[:, None] * 10000.0 ** (-torch.arange(dim // 2) / dim * 2)
    return torch.cat([half, half], -1).reshape(length, 1, 1, dim).to(device)


each_table = pytest.mark.parametrize("halves", ["equal", "random"])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dim", [32, 24])
@each_table
@pytest.mark.parametrize("dtype", DTYPES)
def test_sbhd(device, poison, dtype, halves, dim, transposed):
    """Angles and cached tables; the input a view into a fused qkv tensor, partly rotated."""
    x = torch.randn(9, 2, 3, 3 * 32).to(dtype).to(device)[..., 32:64]
    dy = torch.randn(9, 2, 3, 32).to(dtype).to(device)
    freqs = angles(9, dim, device, halves)
    outputs = rotary.forward(x, freqs, transposed), rotary.backward(dy, freqs, transposed)
    for out in outputs:
        assert (out.transpose(0, 1) if transposed else out).is_contiguous()
        assert out.shape == x.shape
    cpu = freqs.cpu().double()
    check(outputs, x, dy, lambda t, d: rotate(t, cpu.cos().to(d), cpu.sin().to(d)), dtype)
    for table in (torch.float32, dtype):
        cos, sin = freqs.cos().to(table), freqs.sin().to(table)
        cached = (
            rotary.forward_cached(x, cos, sin, transposed),
            rotary.backward_cached(dy, cos, sin, transposed),
        )
        tables = cos.cpu(), sin.cpu()
        check(cached, x, dy, lambda t, d, c=tables: rotate(t, c[0].to(d), c[1].to(d)), dtype)


@each_table
@pytest.mark.parametrize("dtype", DTYPES)
def test_thd(device, poison, dtype, halves):
    lengths = [4, 1, 7]
    starts = torch.tensor([0, 4, 5, 12], dtype=torch.int32, device=device)
    x, dy = (torch.randn(12, 3, 32).to(dtype).to(device) for _ in range(2))
    freqs = angles(8, 16, device, halves)
    outputs = rotary.forward_thd(x, starts, freqs), rotary.backward_thd(dy, starts, freqs)
    cpu = torch.cat([freqs.cpu()[:n, 0] for n in lengths]).double()
    check(outputs, x, dy, lambda t, d: rotate(t, cpu.cos().to(d), cpu.sin().to(d)), dtype)


@each_table
@pytest.mark.parametrize("dtype", DTYPES)
def test_2d(device, poison, dtype, halves):
    """The result and the gradient are [b, H * W, h, d], as apex's callers take them."""
    batch, height, width, heads, dim = 2, 3, 5, 4, 32
    x, dy = (torch.randn(batch, height, width, heads, dim).to(dtype).to(device) for _ in range(2))
    tables = [
        angles(n, dim // 2, device, halves).view(1, n, 1, dim // 2) for n in (height + 1, width)
    ]
    arguments = [f(t) for t in tables for f in (torch.cos, torch.sin)]
    outputs = rotary.forward_2d(x, *arguments), rotary.backward_2d(dy, *arguments)
    assert [out.shape for out in outputs] == [(batch, height * width, heads, dim)] * 2
    outputs = [out.view(x.shape) for out in outputs]
    row, column = (t.cpu().double() for t in tables)

    def turn(t, wide):
        first, second = t.chunk(2, -1)
        by_row = row[0, :height, :, :].view(1, height, 1, 1, -1)
        by_column = column[0].view(1, 1, width, 1, -1)
        return torch.cat(
            [
                rotate(first, by_row.cos().to(wide), by_row.sin().to(wide)),
                rotate(second, by_column.cos().to(wide), by_column.sin().to(wide)),
            ],
            -1,
        )

    check(outputs, x, dy, turn, dtype)


def test_rotary_refuses(device):
    x, freqs = torch.randn(9, 2, 3, 32, device=device), angles(9, 32, device)
    with pytest.raises(ValueError, match="freqs must have length 9, input's, got 8"):
        rotary.forward(x, freqs[:8])
    with pytest.raises(ValueError, match="input must have 4 dimensions"):
        rotary.backward(x[0], freqs)
    with pytest.raises(ValueError, match=r"sin must have shape \[length, 1, 1, an even"):
        rotary.forward_cached(x, freqs, freqs[..., 0])
    with pytest.raises(ValueError, match=r"freqs must have shape .*got \[9, 1, 1, 64\]"):
        rotary.forward(x, angles(9, 64, device))
    with pytest.raises(ValueError, match=r"freqs must have shape .*got \[9, 1, 1, 31\]"):
        rotary.forward(x, freqs[..., :31])
    square = torch.randn(1, 4, 4, 2, 16, device=device)
    table = angles(4, 8, device).view(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"cos_w must have shape \[1, at least 4, 1, 8\]"):
        rotary.forward_2d(square, table, table, table[:, :3], table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 512), (3, 14), (70, 270)], ids=str)
def test_bias_swiglu(device, poison, shape, dtype):
    x = torch.randn(shape).to(dtype).to(device)
    bias = torch.randn(shape[1]).to(dtype).to(device)
    dy = torch.randn(shape[0], shape[1] // 2).to(dtype).to(device)
    outputs = fused_bias_swiglu.forward(x, bias), fused_bias_swiglu.backward(dy, x, bias)

    def formula(t, wide):
        gate, up = (t + bias.cpu().to(wide)).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    check(outputs, x, dy, formula, dtype)
    assert_same_bits(fused_bias_swiglu.backward(dy, x, bias), outputs[1])


def test_bias_swiglu_refuses(device):
    x = torch.randn(4, 7, device=device)
    with pytest.raises(ValueError, match=r"input must have shape \[rows, 2 \* features\]"):
        fused_bias_swiglu.forward(x, x[0])
    with pytest.raises(ValueError, match="bias"):
        fused_bias_swiglu.forward(x[:, :6], x[0])
