"""mx_quantize against its plain-PyTorch reference, bit for bit, on each device."""

import pytest
import torch
from checks import DTYPES, FP8, assert_same_bits, codes, in_pairs, needs_cuda, needs_memory, spread

from apex_te.ops import mx_quantize as op
from apex_te.ops.mx_quantize import mx_dequantize, mx_quantize

E4M3, E5M2 = FP8
NAN, INF = float("nan"), float("inf")


def assert_same_values(actual, expected):
    """Equal with NaN in the same places, whatever its bits."""
    actual, expected = actual.cpu(), expected.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16384, 2048), (2560, 16896)], ids=str)
def test_large_is_as_its_parts(poison, shape, dtype):
    """Large matrices get their scales in two steps."""
    x = (4 * torch.randn(shape, device="cuda")).exp().to(dtype)
    parts = [mx_quantize(rows) for rows in x.split(shape[0] // 5 // 32 * 32)]
    joined = [
        torch.cat([part[i].view(torch.uint8) for part in parts], dim=i // 2) for i in range(4)
    ]
    for options in ({}, {"rowwise": False}, {"columnwise": False}):
        for out, expected in zip(mx_quantize(x, **options), joined, strict=True):
            assert out is None or torch.equal(out.view(torch.uint8), expected)


def test_one_layout_at_a_time(device, poison):
    x = torch.randn(200, 264, device=device).bfloat16()
    both = mx_quantize(x)
    row, col = mx_quantize(x, columnwise=False), mx_quantize(x, rowwise=False)
    assert row.columnwise is None
    assert col.rowwise_scale is None
    assert_same_bits([*row[:2], *col[2:]], both)
    assert_same_bits(both[2:], mx_quantize(x.t(), columnwise=False)[:2])


@pytest.mark.parametrize(
    ("amax", "up", "floor"),
    [
        (0.0, 0x00, 0x00),
        (INF, 0xFE, 0xFE),
        (NAN, 0xFF, 0xFF),
        (448.0, 127, 127),
        (449.0, 128, 127),
        (511.0, 128, 127),
        (512.0, 128, 128),
        (1.0, 119, 119),
        (2.0**-118, 1, 1),
        (1.75 * 2.0**-119, 0, 0),
        (1.8 * 2.0**-119, 1, 0),
        (2.0**-149, 0, 0),
        (torch.finfo(torch.float32).max, 247, 246),
    ],
)
def test_scale_of_a_block(device, amax, up, floor):
    """E4M3: up to 448 stands at 2^0; half of the smallest normal scale is 2^-127, code 0."""
    x = torch.zeros(40, 100)
    x[39, 70] = -amax
    for rounding, code in (("up", up), ("floor", floor)):
        out = mx_quantize(x.to(device), E4M3, rounding=rounding)
        assert codes(out.rowwise_scale)[39, 2].item() == code
        assert codes(out.columnwise_scale)[70, 1].item() == code
        assert codes(out.rowwise_scale).sum().item() == code


def test_special_blocks(device):
    """NaN takes its whole block; infinity stays infinite, the rest of its block vanishes."""
    x = torch.ones(2, 64, device=device)
    x[0, 3], x[1, 40] = NAN, -INF
    out = mx_quantize(x, columnwise=False)
    back = mx_dequantize(*out[:2], dtype=torch.float32).cpu()
    assert back[0, :32].isnan().all()
    assert (codes(out.rowwise)[0, :32] == 0x7F).all()
    assert (back[0, 32:] == 1).all()
    assert back[1, 40] == -INF
    assert back[1, 32:].count_nonzero() == 1


@in_pairs(fp8=FP8, dtype=DTYPES, shape=[(1, 1), (130, 257), (9, 4104), (256, 128)])
def test_dequantize(device, poison, shape, dtype, fp8):
    out = mx_quantize(spread(shape, dtype).to(device), fp8)
    for quantized in (out[:2], out[2:]):
        back = mx_dequantize(*quantized, dtype=dtype)
        exact = op.reference_dequantize(*(t.cpu() for t in quantized))
        assert_same_bits(back, exact.to(dtype))
    unaligned = torch.empty(back.numel() + 1, dtype=dtype, device=device)[1:].view(back.shape)
    mx_dequantize(*quantized, out=unaligned)
    assert_same_bits(unaligned, back)


def test_every_code_at_every_scale_dequantizes(device):
    c = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8).view(torch.float8_e8m0fnu)
    for fp8 in FP8:
        exact = op.reference_dequantize(c.view(fp8), scale)
        for dtype in DTYPES:
            back = mx_dequantize(c.view(fp8).to(device), scale.to(device), dtype=dtype)
            assert_same_values(back, exact.to(dtype))


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(24)
    rows, cols = 65552, 32784  # 2.149e9 elements
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    out = mx_quantize(x)
    back = mx_dequantize(*out[:2])
    for begin in (0, rows // 64 * 32, rows - 16):
        part = slice(begin, begin + 32)
        expected = op.reference(x[part].cpu())
        assert_same_bits([out.rowwise[part], out.columnwise[:, part]], expected[::2])
        block = begin // 32
        assert_same_bits(out.columnwise_scale[:, block : block + 1], expected[3])
        assert_same_bits(back[part], op.reference_dequantize(*expected[:2]).bfloat16())
