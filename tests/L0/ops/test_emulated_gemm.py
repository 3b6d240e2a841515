"""Products of MXFP8 and HiF8 operands against the float64 product of what they stand for."""

import functools

import pytest
import torch
from checks import assert_same_bits, sqnr
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from apex_te.ops import hif8, mx_quantize
from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.emulated_gemm import emulated_block_gemm, hif8_gemm, mx_gemm
from apex_te.ops.gemm_common import product_into

SHAPES = [(16, 16, 128), (144, 272, 384), (1, 16, 32), (7, 5, 3), (33, 100, 57)]


def mx_operand(rows, cols, device):
    x = torch.randn(rows, cols) * 10.0 ** torch.randint(-2, 2, (rows, 1))
    codes, scale = mx_quantize.mx_quantize(x, columnwise=False)[:2]
    exact = mx_quantize.reference_dequantize(codes, scale).double()
    return codes.to(device), scale.to(device), exact


def hif8_operand(rows, cols, device):
    x = torch.randn(rows, cols) * 3
    codes = hif8.encode(x)
    scale_inv = torch.rand(1) + 0.5
    exact = hif8.decode(codes, torch.float32).double() * scale_inv.double()
    return codes.to(device), scale_inv.to(device), exact


CASES = [(mx_gemm, mx_operand), (hif8_gemm, hif8_operand)]


@pytest.mark.parametrize(("gemm", "operand"), CASES, ids=["mx", "hif8"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fwd(device, poison, shape, out_dtype, gemm, operand):
    m, n, k = shape
    a, sa, exact_a = operand(m, k, device)
    b, sb, exact_b = operand(n, k, device)
    exact = exact_a @ exact_b.t()
    floor = 100 if out_dtype is torch.float32 else 48
    out = gemm(a, b, sa, sb, out_dtype=out_dtype)
    assert out.dtype is out_dtype
    assert sqnr(exact, out) >= floor
    bias = torch.randn(n, device=device)
    assert sqnr(exact + bias.double().cpu(), gemm(a, b, sa, sb, bias=bias)) >= 48
    start = torch.randn(m, n, device=device).to(out_dtype)
    total = start.clone()
    assert gemm(a, b, sa, sb, out=total, accumulate=True) is total
    assert sqnr(exact + start.double().cpu(), total) >= floor


@pytest.mark.parametrize(("gemm", "operand"), CASES, ids=["mx", "hif8"])
@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 0, 16), (16, 32, 0)], ids=str)
def test_empty(device, poison, shape, gemm, operand):
    m, n, k = shape
    a, sa, _ = operand(m, k, device)
    b, sb, _ = operand(n, k, device)
    assert torch.equal(gemm(a, b, sa, sb).cpu(), torch.zeros(m, n, dtype=torch.bfloat16))


def test_three_products_of_a_linear_layer(device):
    x, w, dy = torch.randn(160, 256), torch.randn(128, 256), torch.randn(160, 128)
    qx, qw, qd = (mx_quantize.mx_quantize(t.to(device)) for t in (x, w, dy))
    y = mx_gemm(qx.rowwise, qw.rowwise, qx.rowwise_scale, qw.rowwise_scale)
    dx = mx_gemm(qd.rowwise, qw.columnwise, qd.rowwise_scale, qw.columnwise_scale)
    dw = mx_gemm(qd.columnwise, qx.columnwise, qd.columnwise_scale, qx.columnwise_scale)
    assert sqnr(x @ w.t(), y) >= 25
    assert sqnr(dy @ w, dx) >= 25
    assert sqnr(dy.t() @ x, dw) >= 25


@pytest.mark.parametrize("rows", [1, 15, 33, 129, 254])
@pytest.mark.parametrize("kind", ["mx", "hif8", "block"])
def test_weight_gradient_of_padded_copies(device, poison, kind, rows):
    dy, x = torch.randn(rows, 48, device=device), torch.randn(rows, 64, device=device)

    def gradient(pad):
        if kind == "hif8":
            a, b = (hif8.quantize_current(t, pad_columnwise=pad) for t in (dy, x))
            return hif8_gemm(a.columnwise, b.columnwise, a.scale_inv, b.scale_inv)
        if kind == "mx":
            a, b = (mx_quantize.mx_quantize(t, pad_columnwise=pad) for t in (dy, x))
            return mx_gemm(a[2], b[2], a[3], b[3])
        e4m3 = torch.float8_e4m3fn
        a, b = (block_quantize(t, e4m3, pad_columnwise=pad) for t in (dy, x))
        return emulated_block_gemm(a[2], b[2], a[3], b[3], b_block_rows=1)

    assert sqnr(gradient(False), gradient(True)) >= 48


@pytest.mark.parametrize(("gemm", "operand"), CASES, ids=["mx", "hif8"])
def test_rejects(gemm, operand):
    a, sa, _ = operand(16, 64, "cpu")
    b, sb, _ = operand(8, 64, "cpu")
    with pytest.raises(ValueError, match=r"a and b must be \[M, K\] and \[N, K\]"):
        gemm(a, b[:, :32], sa, sb)
    with pytest.raises(ValueError, match="out must have shape"):
        gemm(a, b, sa, sb, out=torch.empty(16, 9))
    with pytest.raises(ValueError, match="out must be given with accumulate"):
        gemm(a, b, sa, sb, accumulate=True)
    with pytest.raises(
        TypeError, match="out must have dtype float32, float16 or bfloat16, got int"
    ):
        gemm(a, b, sa, sb, out_dtype=torch.int32)
    with pytest.raises(ValueError, match=r"bias must have shape \[8\], got \[3\]"):
        gemm(a, b, sa, sb, bias=torch.zeros(3))
    compiled = torch.compile(gemm, backend="eager")
    for function in (gemm, compiled):
        with pytest.raises(TypeError, match=r"bias must have a real dtype, got torch\.complex64"):
            function(a, b, sa, sb, bias=torch.zeros(8, dtype=torch.complex64))


def test_hif8_rejects_a_scale_of_rows():
    a, sa, _ = hif8_operand(16, 64, "cpu")
    with pytest.raises(ValueError, match="b_scale_inv must have one element"):
        hif8_gemm(a, a, sa, torch.ones(16))


def test_a_product_that_a_selective_checkpoint_has_saved(device):
    """The recompute gets what was saved, in whichever tensor it was to be written."""
    a, b = torch.randn(3, 4, device=device), torch.randn(4, 5, device=device)
    for bias in (None, torch.randn(5, device=device)):
        seen = []

        def function(x, bias=bias, seen=seen):
            out = torch.full((3, 5), float("nan"), device=device)
            with torch.no_grad():
                product_into(a, b, out, bias)
            seen.append(out)
            return x * out

        def save_all(ctx, func, *args, **kwargs):
            return func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)

        context_fn = functools.partial(create_selective_checkpoint_contexts, save_all)
        x = torch.ones(3, 5, device=device, requires_grad=True)
        checkpoint(function, x, use_reentrant=False, context_fn=context_fn).sum().backward()
        assert len(seen) == 2
        expected = a @ b if bias is None else torch.addmm(bias, a, b)
        assert torch.equal(seen[0], expected)
        assert torch.equal(seen[1], expected)
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize(("gemm", "operand"), CASES, ids=["mx", "hif8"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bias_is_added_in_the_dtype_of_the_other_products(device, out_dtype, gemm, operand):
    """The bias is added as fp8_gemm adds it, so that every recipe computes the same."""
    a, sa, _ = operand(32, 64, device)
    b, sb, _ = operand(48, 64, device)
    bias = 100 * torch.randn(48, device=device)
    narrow = bias.to(torch.bfloat16 if out_dtype is torch.float32 else out_dtype)
    expected = gemm(a, b, sa, sb, out_dtype=torch.float32) + narrow.float()
    actual = gemm(a, b, sa, sb, out_dtype=out_dtype, bias=bias)
    assert_same_bits(actual, expected.to(out_dtype))
    assert_same_bits(actual, gemm(a, b, sa, sb, out_dtype=out_dtype, bias=narrow))
