"""wgrad_gemm against the float64 product: sums in float32, one rounding to the dtype of out."""

import pytest
import torch
from checks import in_pairs, sqnr

from apex_te.ops.wgrad_gemm import wgrad_gemm

SHORT = [torch.float16, torch.bfloat16]
SHAPES = [(1, 1, 1), (5, 7, 3), (64, 16, 32), (257, 48, 80), (33, 100, 57)]  # rows, M, N


def floor(device):
    """Tensor cores align the terms of a sum before they add them, which costs some last bits."""
    return 120 if device.type == "cpu" else 100


def operands(rows, m, n, dtype, device):
    return torch.randn(rows, m).to(device, dtype), torch.randn(rows, n).to(device, dtype)


def product(dy, x):
    return dy.double().t() @ x.double()


@in_pairs(
    shape=SHAPES,
    dtype=[*SHORT, torch.float32, torch.float64],
    out_dtype=[torch.float32, torch.float64],
)
def test_wide_out(device, poison, shape, dtype, out_dtype):
    """With sums in float32 the error is float32's, whatever the operands are."""
    rows, m, n = shape
    dy, x = operands(rows, m, n, dtype, device)
    start = torch.randn(m, n, device=device).to(out_dtype)
    out = torch.empty_like(start)
    assert wgrad_gemm(dy, x, out) is out
    assert sqnr(product(dy, x), out) >= floor(device)
    out.copy_(start)
    wgrad_gemm(dy, x, out, accumulate=True)
    assert sqnr(product(dy, x) + start, out) >= floor(device)


@in_pairs(shape=SHAPES, dtype=[*SHORT, torch.float32], out_dtype=SHORT)
def test_short_out_is_rounded_once(device, shape, dtype, out_dtype):
    """Integers have exact sums in float32, so that one rounding is the only one."""
    rows, m, n = shape
    dy = torch.randint(-9, 10, (rows, m)).to(device, dtype)
    x = torch.randint(-9, 10, (rows, n)).to(device, dtype)
    start = torch.randint(-900, 901, (m, n)).to(device, out_dtype)
    out = start.clone()
    wgrad_gemm(dy, x, out)
    assert torch.equal(out, product(dy, x).to(out_dtype))
    out.copy_(start)
    wgrad_gemm(dy, x, out, accumulate=True)
    assert torch.equal(out, (product(dy, x) + start.double()).to(out_dtype))


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_beyond_float16(device, accumulate):
    dy = torch.full((64, 8), 20.0, device=device).half()
    x = torch.full((64, 8), 100.0, device=device).half()
    out = torch.full((8, 8), 1.0, device=device)
    wgrad_gemm(dy, x, out, accumulate=accumulate)
    assert torch.equal(out, torch.full((8, 8), 128000.0 + accumulate, device=device))


@pytest.mark.parametrize("dtype", [*SHORT, torch.float32])
def test_empty(device, dtype):
    dy, x = operands(0, 4, 6, dtype, device)
    out = torch.full((4, 6), 3.0, device=device)
    wgrad_gemm(dy, x, out, accumulate=True)
    assert torch.equal(out, torch.full_like(out, 3.0))
    wgrad_gemm(dy, x, out)
    assert not out.any()
    dy, x = operands(5, 0, 6, dtype, device)
    assert wgrad_gemm(dy, x, torch.empty(0, 6, device=device), accumulate=True).shape == (0, 6)


@pytest.mark.parametrize("dtype", SHORT)
def test_misaligned_and_views(device, dtype):
    """A main_grad that is part of a bucket may begin at any element, and rows may have strides."""
    dy, x = operands(40, 9, 11, dtype, device)
    bucket = torch.zeros(1 + 9 * 11, device=device)
    out = bucket[1:].view(9, 11)
    wide = torch.zeros(40, 20, dtype=dtype, device=device)
    wide[:, :11] = x
    wgrad_gemm(dy, wide[:, :11], out, accumulate=True)
    assert sqnr(product(dy, x), out) >= floor(device)
    assert bucket[0] == 0


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", SHORT)
def test_no_memory_beside_the_workspace(dtype):
    """Nothing as large as ``out`` is made: the product itself adds to it."""
    dy, x = operands(64, 2048, 2048, dtype, "cuda")
    out = torch.zeros(2048, 2048, device="cuda")
    wgrad_gemm(dy, x, out, accumulate=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    wgrad_gemm(dy, x, out, accumulate=True)
    assert torch.cuda.max_memory_allocated() == before


def test_errors(device):
    dy, x = operands(8, 4, 6, torch.bfloat16, device)
    out = torch.zeros(4, 6, device=device)
    with pytest.raises(TypeError, match=r"wgrad_gemm: x must have dtype torch.bfloat16"):
        wgrad_gemm(dy, x.float(), out)
    with pytest.raises(ValueError, match=r"wgrad_gemm: dy and x must be \[rows, M\] and"):
        wgrad_gemm(dy, x[:7], out)
    with pytest.raises(ValueError, match=r"wgrad_gemm: out must have shape \[4, 6\], got \[6, 4\]"):
        wgrad_gemm(dy, x, torch.zeros(6, 4, device=device))
