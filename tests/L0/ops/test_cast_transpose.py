"""cast_transpose against its plain-PyTorch reference, bit for bit, on each device."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import assert_same_bits, codes, in_pairs, needs_memory, one

from apex_te.ops import cast_transpose as op
from apex_te.ops.cast_transpose import cast_transpose

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [
    (1, 1), (3, 7), (8, 15), (16, 16), (17, 128), (127, 129), (128, 128), (129, 1000),
    (256, 384), (1000, 3), (144, 3584), (33, 4095),
]  # fmt: skip


@in_pairs(fp8=FORMATS, dtype=DTYPES, shape=SHAPES)
def test_fwd(device, poison, shape, dtype, fp8):
    x = (torch.randn(shape) * 30).to(dtype)
    scale, amax = one(7.3, device), one(0, device)
    out = cast_transpose(x.to(device), scale, fp8, amax=amax, with_dbias=True)
    assert_same_bits(out[:3], op.reference(x, one(7.3, "cpu"), fp8)[:3])
    assert amax.item() == x.float().abs().max().item()
    exact = x.double().sum(0)
    rounding = torch.finfo(dtype).eps * exact.abs() + 1e-6 * x.double().abs().sum(0)
    assert ((out.dbias.cpu().double() - exact).abs() <= rounding).all()


@pytest.mark.cover(1)
@pytest.mark.parametrize("shape", [(2048, 2112), (2053, 2049)], ids=str)
@pytest.mark.parametrize("offset", [0, 16])
def test_fwd_larger_than_a_cache(device, shape, offset):
    """On a CPU such codes go past the caches, in whole lines where they are aligned to them."""
    x = torch.randn(shape, device=device).bfloat16()
    storage = torch.zeros(2, x.numel() + 64, dtype=torch.uint8, device=device)
    row, col = (s[offset : offset + x.numel()].view(FORMATS[0]) for s in storage)
    row, col = row.view(shape), col.view(shape[::-1])
    amax = one(0, device)
    out = cast_transpose(
        x, one(3.0, device), FORMATS[0], amax=amax, with_dbias=offset == 0,
        out_rowwise=row, out_columnwise=col,
    )  # fmt: skip
    expected = op.reference(x.cpu(), one(3.0, "cpu"), FORMATS[0])
    assert torch.equal(codes(out.rowwise), codes(expected.rowwise))
    assert torch.equal(codes(out.columnwise), codes(expected.columnwise))
    assert amax.item() == x.abs().max().item()
    assert not storage[:, :offset].any()
    assert not storage[:, offset + x.numel() :].any()
    row.view(torch.uint8).zero_()
    cast_transpose(x, one(3.0, device), FORMATS[0], columnwise=False, out_rowwise=row)
    assert torch.equal(codes(row), codes(expected.rowwise))


@pytest.mark.parametrize(
    ("fp8", "other"),
    [(torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn), (torch.float8_e5m2, ml_dtypes.float8_e5m2)],
)
def test_reference_rounds_like_ml_dtypes(fp8, other):
    limit = torch.finfo(fp8).max
    x = torch.cat([torch.randn(20000), torch.randn(20000) * 1e-3, torch.randn(20000) * limit / 4])
    x = x.clamp(-limit, limit)
    expected = torch.from_numpy(x.numpy().astype(other).view(np.uint8))
    assert torch.equal(codes(op.reference(x[None], one(1, "cpu"), fp8).rowwise)[0], expected)


@pytest.mark.parametrize(
    ("value", "e4m3", "e5m2"),
    [
        (float("nan"), 0x7F, 0x7F),
        (-float("nan"), 0x7F, 0x7F),
        (float("inf"), 0x7E, 0x7B),
        (-float("inf"), 0xFE, 0xFB),
        (1e30, 0x7E, 0x7B),
        (464.0, 0x7E, 0x5F),
        (-1e-30, 0x80, 0x80),
        (0.0, 0x00, 0x00),
        (2.0**-10, 0x00, 0x14),
        (1.5 * 2.0**-9, 0x02, 0x1A),
    ],
)
def test_special_values(device, value, e4m3, e5m2):
    x = torch.tensor([[value]], device=device)
    assert codes(cast_transpose(x, one(1, device), FORMATS[0]).rowwise).item() == e4m3
    assert codes(cast_transpose(x, one(1, device), FORMATS[1]).rowwise).item() == e5m2


@pytest.mark.parametrize("position", [(0, 0), (127, 127), (128, 0), (200, 256), (299, 319)])
@pytest.mark.parametrize("value", [-1e6, float("inf"), float("nan")])
def test_amax_finds_planted_value(device, position, value):
    x = torch.randn(300, 320, device=device)
    x[position] = value
    for transposed in (False, True):
        amax = one(2.0, device)
        cast_transpose(x, one(1, device), FORMATS[0], columnwise=transposed, amax=amax)
        if value != value:
            assert torch.isnan(amax).all()
        else:
            assert amax.item() == abs(value)


def test_amax_accumulates_and_may_be_recorded_alone(device):
    x = torch.randn(64, 48, device=device)
    history = torch.zeros(4, 3, device=device)
    slot = history[0, 1:2]
    cast_transpose(x, one(1, device), FORMATS[0], rowwise=False, columnwise=False, amax=slot)
    cast_transpose(x / 2, one(1, device), FORMATS[0], rowwise=False, columnwise=False, amax=slot)
    assert history[0, 1] == x.abs().max()
    assert history.count_nonzero() == 1


def test_noop_flag_leaves_everything(device):
    x = torch.randn(130, 144, device=device)
    flag = torch.ones(1, dtype=torch.int32, device=device)
    row = torch.full((130, 144), 3, dtype=torch.uint8, device=device).view(FORMATS[0])
    amax, scale_inv = one(0, device), one(9, device)
    for transposed in (False, True):
        cast_transpose(
            x, one(2, device), FORMATS[0], columnwise=transposed, amax=amax, scale_inv=scale_inv,
            noop=flag, out_rowwise=row,
        )  # fmt: skip
        assert (codes(row) == 3).all()
        assert amax.item() == 0
        assert scale_inv.item() == 9
    flag.zero_()
    cast_transpose(x, one(2, device), FORMATS[0], scale_inv=scale_inv, noop=flag, out_rowwise=row)
    assert torch.equal(codes(row), codes(op.reference(x.cpu(), one(2, "cpu"), FORMATS[0]).rowwise))
    assert scale_inv.item() == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 17, 255, 256, 257, 1000])
def test_repeatable_and_equal_on_devices(device, rows, dtype):
    x = torch.randn(rows, 264).to(dtype)
    x[:, 0], x[:, 1], x[0, 2], x[-1, -1] = -0.0, 0.0, float("inf"), float("nan")
    first = cast_transpose(x.to(device), one(3, device), FORMATS[1], with_dbias=True)
    again = cast_transpose(x.to(device), one(3, device), FORMATS[1], with_dbias=True)
    on_cpu = cast_transpose(x, one(3, "cpu"), FORMATS[1], with_dbias=True)
    assert_same_bits(first.dbias, again.dbias)
    assert_same_bits(first.dbias[:-1].cpu(), on_cpu.dbias[:-1])
    assert first.dbias[-1].isnan()
    assert on_cpu.dbias[-1].isnan()
    assert torch.equal(codes(first.columnwise), codes(on_cpu.columnwise))


@pytest.mark.cuda
def test_device_mismatch_is_named():
    with pytest.raises(ValueError, match="scale must be on cuda:0 like x, got cpu"):
        cast_transpose(
            torch.zeros(2, 2, device="cuda"), torch.ones(1), FORMATS[0],
            scale_inv=torch.ones(1, device="cuda"),
        )  # fmt: skip


@pytest.mark.cuda
def test_more_than_2_to_31_elements():
    needs_memory(24)
    rows, cols = 65552, 32784  # 2.149e9 elements
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    amax = one(0, "cuda")
    out = cast_transpose(x, one(2, "cuda"), FORMATS[0], amax=amax)
    assert amax.item() == max(part.abs().max().item() for part in x.split(8192))
    for begin in (0, rows // 2, rows - 16):
        expected = op.reference(x[begin : begin + 16].cpu(), one(2, "cpu"), FORMATS[0]).rowwise
        assert torch.equal(codes(out.rowwise[begin : begin + 16]), codes(expected))
        assert torch.equal(
            codes(out.columnwise[:, begin : begin + 16].contiguous()).t(), codes(expected)
        )
