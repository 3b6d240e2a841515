"""current_scale against its plain-PyTorch reference, bit for bit, on each device."""

import math

import pytest
import torch
from checks import FP8, assert_same_bits, codes, needs_cuda, needs_memory, one

from apex_te.ops import current_scale as op
from apex_te.ops.current_scale import current_scale, tensor_amax

ALL_16_BITS = torch.arange(65536, dtype=torch.int32).to(torch.int16).reshape(256, 256)


def assert_equals_reference(out, x, fp8, **options):
    expected = op.reference(x.cpu(), fp8, **options)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize(
    ("amax", "eps", "ratio"),
    [
        (448.0, 0.0, 1.0),
        (3.0, 0.0, 448 / 3),
        (500.0, 0.0, 448 / 500),
        (0.0, 0.0, 1.0),
        (0.0, 2.0, 224.0),
        (1.0, 1e-3, 448.0),
        (1e-4, 1e-3, 448e3),
        (1e-40, 0.0, torch.finfo(torch.float32).max),
        (float("inf"), 0.0, 1.0),
        (float("nan"), 0.5, 1.0),
    ],
)
def test_scale(device, amax, eps, ratio, pow2):
    x = torch.zeros(40, 20)
    x[33, 7] = -amax
    out = current_scale(x.to(device), FP8[0], eps=eps, pow2=pow2)
    expected = one(ratio)
    if pow2:
        expected = torch.ldexp(one(1.0), torch.frexp(expected).exponent - 1)
    # eps is rounded to float32 first
    torch.testing.assert_close(out.scale.cpu(), expected, rtol=2e-7, atol=0)
    assert_same_bits(out.scale_inv, one(amax) if amax == math.inf else 1 / out.scale.cpu())
    assert_same_bits(out[2:], op.reference(x, FP8[0], eps=eps, pow2=pow2)[2:])
    known = current_scale(x.to(device), FP8[0], eps=eps, pow2=pow2, amax=out.amax)
    assert_same_bits(known[:4], out[:4])


@pytest.mark.parametrize("position", [(0, 0), (127, 127), (128, 0), (200, 256), (299, 319)])
@pytest.mark.parametrize("value", [-1e6, float("inf"), float("nan")])
def test_amax_finds_planted_value(device, position, value):
    """NaN and infinity show in amax and in the values; the codes are NaN and fp8_max."""
    x = torch.randn(300, 320, device=device)
    x[position] = value
    out = current_scale(x, FP8[0])
    code = codes(out.rowwise)[position].item()
    if value != value:
        assert torch.isnan(out.amax).all()
        assert torch.isnan(tensor_amax(x)).all()
        assert code == 0x7F
    else:
        assert out.amax.item() == tensor_amax(x).item() == abs(value)
        assert code == (0x7E if value > 0 else 0xFE)
        assert torch.isinf(out.scale_inv).item() == math.isinf(value)
    assert codes(out.columnwise)[position[::-1]].item() == code


def test_repeatable_and_workspace_needs_no_reset(device, poison):
    """A second, smaller tensor must not see the first one's partial amaxes."""
    large, small = torch.randn(2000, 264) * 100, torch.randn(30, 40)
    for x in (large, small, large, small):
        assert_equals_reference(current_scale(x.to(device), FP8[1]), x, FP8[1])


@needs_cuda
def test_back_to_back_calls_wait_for_each_other():
    """The second kernel starts early: it must read this call's amaxes, the next call's not."""
    xs = [torch.randn(4096, 2048, device="cuda").bfloat16() * 2.0**k for k in range(8)]
    expected = [op.reference(x.cpu(), FP8[0]) for x in xs]
    torch.cuda.synchronize()
    found = [current_scale(x, FP8[0]) for _ in range(3) for x in xs]
    for i, out in enumerate(found):
        assert_same_bits(out, expected[i % 8])
    # what the next kernel in the stream reads is complete
    x = xs[0].clone()
    for k in range(4):
        x.mul_(2)
        out = current_scale(x, FP8[0])
        x.mul_(1)
        assert_same_bits(out.amax, expected[0].amax * 2.0 ** (k + 1))


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(24)
    rows, cols = 65552, 32784  # 2.149e9 elements
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    x[-1, -1] = 77
    out = current_scale(x, FP8[0])
    row_only = current_scale(x, FP8[0], columnwise=False)
    assert out.amax.item() == 77
    for begin in (0, rows // 2, rows - 16):
        part = x[begin : begin + 16].cpu()
        expected = codes(op.reference(part, FP8[0], amax=one(77)).rowwise)
        assert torch.equal(codes(out.rowwise[begin : begin + 16]), expected)
        assert torch.equal(codes(row_only.rowwise[begin : begin + 16]), expected)
        assert torch.equal(codes(out.columnwise[:, begin : begin + 16].contiguous()).t(), expected)
