"""Rows of row products and of norms have the same bits for any number of other rows."""

import pytest
import torch
from checks import assert_same_bits

from apex_te.ops import row_products
from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.fp8_gemm import block_scaled_gemm
from apex_te.ops.layer_norm import layer_norm
from apex_te.ops.rms_norm import rms_norm
from apex_te.ops.row_products import row_block_product, row_product, row_scaled_product
from apex_te.ops.row_quantize import row_quantize
from apex_te.ops.rowwise_gemm import rowwise_gemm

COUNTS = [1, 2, 3, 7, 8, 31, 33, 64, 127, 129, 255, 257, 511, 513]


def rows(cols, device, dtype=torch.float32):
    return torch.randn(600 if device.type == "cuda" else 140, cols, device=device).to(dtype)


def assert_rows_independent(compute, x):
    """Prefixes, suffixes and single rows of ``x`` in batches of other rows give the bits of all."""
    full = compute(x)
    for count in COUNTS:
        if count < len(x):
            assert_same_bits(compute(x[:count].clone()), full[:count])
            assert_same_bits(compute(x[-count:].clone()), full[-count:])
    order = torch.randperm(len(x), device=x.device)
    assert_same_bits(compute(x[order]), full[order])
    return full


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("features", "depth"), [(64, 128), (50, 33), (264, 1000)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_row_product(features, depth, with_bias, dtype, device):
    x = rows(depth, device, dtype)
    w = torch.randn(features, depth, device=device).to(dtype)
    bias = torch.randn(features, device=device).to(dtype) if with_bias else None
    full = assert_rows_independent(lambda x: row_product(x, w, bias), x)
    exact = torch.nn.functional.linear(*(None if t is None else t.double() for t in (x, w, bias)))
    bound = {torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 1.0}[dtype]
    assert (full.double() - exact).abs().max() < bound
    assert_same_bits(row_product(x.view(20, -1, depth), w, bias), full.view(20, -1, features))
    assert row_product(x[:0], w, bias).shape == (0, features)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("features", "depth"), [(64, 128), (256, 400)])
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_row_block_product(features, depth, scales, out_dtype, device):
    if device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("block-scaled GEMMs need sm_90")
    x = rows(depth, device)
    w = torch.randn(features, depth, device=device)
    bias = torch.randn(features, device=device)
    weight = block_quantize(w, torch.float8_e4m3fn, block_rows=128, columnwise=False, scales=scales)

    def operands(x):
        made = block_quantize(x, torch.float8_e4m3fn, columnwise=False, scales=scales)
        return made.rowwise, weight.rowwise, made.rowwise_scale_inv, weight.rowwise_scale_inv

    def compute(x):
        return row_block_product(block_scaled_gemm, *operands(x), out_dtype, bias)

    full = assert_rows_independent(compute, x)
    usual = block_scaled_gemm(*operands(x), out_dtype=out_dtype, bias=bias)
    # Sums in another order, and on a GPU a product that is rounded before the bias is added.
    rtol, atol = (1e-5, 1e-3) if out_dtype is torch.float32 else (2e-2, 0.2)
    if device.type == "cuda" and out_dtype is torch.float32:
        atol = 0.1  # the matrix units keep fewer bits of a sum than float32
    torch.testing.assert_close(full, usual, rtol=rtol, atol=atol)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("features", "depth"), [(64, 128), (50, 33), (256, 400)])
def test_row_scaled_product(features, depth, out_dtype, device):
    x, bias = rows(depth, device), torch.randn(features, device=device)
    w = torch.randn(features, depth, device=device)
    weight = row_quantize(w, torch.float8_e4m3fn, columnwise=False)

    def operands(x):
        made = row_quantize(x, torch.float8_e4m3fn, columnwise=False)
        return made.rowwise, weight.rowwise, made.rowwise_scale_inv, weight.rowwise_scale_inv

    def compute(x):
        return row_scaled_product(rowwise_gemm, *operands(x), out_dtype, bias)

    full = assert_rows_independent(compute, x)
    usual = rowwise_gemm(*operands(x), out_dtype=out_dtype, bias=bias)
    rtol, atol = (1e-5, 1e-3) if out_dtype is torch.float32 else (2e-2, 0.2)
    if device.type == "cuda" and out_dtype is torch.float32:
        atol = 0.1  # the matrix units keep fewer bits of a sum than float32
    torch.testing.assert_close(full, usual, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols", [40, 264, 1024, 1032, 4096, 8448, 12288])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norms(cols, with_residual, dtype, device):
    x = rows(cols, device, dtype)
    gamma, beta = (torch.randn(cols, device=device).to(dtype) for _ in range(2))

    def layer(x):
        if not with_residual:
            return layer_norm(x, gamma, beta)
        return layer_norm(x, gamma, beta, residual=x)[0]

    def rms(x):
        return rms_norm(x, gamma, residual=x)[0] if with_residual else rms_norm(x, gamma)

    for norm in (layer, rms):
        assert_rows_independent(norm, x)


@pytest.mark.parametrize("count", [1, 100, 255, 256, 300])
def test_calls_of_grouped_kernels(count, monkeypatch):
    """What GPUs' kernels get, computed by their fallbacks on the CPU."""
    monkeypatch.setattr(row_products, "has_grouped_products", lambda device: True)
    monkeypatch.setattr(row_products, "multiplies_codes", lambda a, b: True)
    seen = []
    grouped = torch._grouped_mm

    def noted(a, b, offs):
        seen.append((a.shape[0], offs.tolist()))
        return grouped(a, b, offs=offs)

    monkeypatch.setattr(torch, "_grouped_mm", noted)
    x, w = torch.randn(count, 128).bfloat16(), torch.randn(64, 128).bfloat16()
    bias = torch.randn(64).bfloat16()
    out = row_product(x, w, bias)
    exact = torch.nn.functional.linear(x.float(), w.float(), bias.float())
    torch.testing.assert_close(out.float(), exact, rtol=1.6e-2, atol=0.2)
    assert seen == [(max(count, 256), [count])]
    a = block_quantize(x, torch.float8_e4m3fn, columnwise=False)
    b = block_quantize(w, torch.float8_e4m3fn, block_rows=128, columnwise=False)
    operands = a.rowwise, b.rowwise, a.rowwise_scale_inv, b.rowwise_scale_inv
    found = row_block_product(block_scaled_gemm, *operands, torch.bfloat16)
    assert_same_bits(found, block_scaled_gemm(*operands))
