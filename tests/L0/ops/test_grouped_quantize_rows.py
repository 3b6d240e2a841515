"""Offsets, scales, sums and decoded codes of groups of rows."""

import pytest
import torch
from checks import DTYPES, FP8, assert_same_bits
from group_layouts import LAYOUTS, made, nan_behind

from apex_te.ops import amax_scale_update, reference_codec
from apex_te.ops import grouped_quantize as op
from apex_te.ops.current_scale import current_scale
from apex_te.ops.reference_codec import decode_fp8


@pytest.mark.parametrize(("rows", "splits"), LAYOUTS, ids=lambda v: str(v)[:24])
@pytest.mark.parametrize("int64", [False, True])
def test_offsets(device, poison, rows, splits, int64):
    groups = made(rows, splits, device, int64)
    assert torch.equal(groups.table.cpu(), op.reference_table(torch.tensor(splits), rows))
    assert groups.column_ends[-1] <= groups.columns


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("fp8", FP8)
def test_scales_are_those_of_current_scaling(device, fp8, pow2):
    values = [3.0, 0.0, float("inf"), float("nan"), 1e-42, 0.01]
    amax = torch.tensor(values, device=device)
    scale, scale_inv = op.scales_of(amax, fp8, eps=0.1, pow2=pow2)
    for g, value in enumerate(values):
        one = current_scale(torch.tensor([[value]], device=device), fp8, eps=0.1, pow2=pow2)
        assert_same_bits([scale[g : g + 1], scale_inv[g : g + 1]], [one.scale, one.scale_inv])
        expected = reference_codec.scale_of(amax[g : g + 1].cpu(), torch.finfo(fp8).max, 0.1, pow2)
        assert scale[g].item() == expected.item()


@pytest.mark.parametrize(("margin", "pow2"), [(0, False), (2, False), (-1, True)])
def test_first_scales_are_those_of_an_update(device, margin, pow2):
    values = [3.0, 7.0, 0.0, float("inf"), float("nan"), 1e-42, 5.0]
    splits, flags = [1, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]
    amax, due = torch.tensor(values, device=device), torch.tensor(flags, dtype=torch.int32)
    due = due.to(device)
    state = torch.full((2, 21), 5.0, device=device)
    scale, scale_inv = state[0, 1::3], state[1, 1::3]
    op.first_scales(
        amax, made(6, splits, device), due, scale, scale_inv, 448.0, margin=margin, pow2=pow2
    )
    assert due.tolist() == [0, 1, 0, 0, 0, 0, 0]
    expected, inverse = torch.full((2, 7), 5.0)
    history = torch.tensor(values)[None]
    amax_scale_update.amax_scale_update(
        [history], [expected], [inverse], [448.0], margin=margin, pow2=pow2
    )
    for g in range(7):
        taken = splits[g] and flags[g]
        assert scale[g].item() == (expected[g].item() if taken else 5)
        assert scale_inv[g].item() == (inverse[g].item() if taken else 5)
    assert (state[:, ::3] == 5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "splits"), LAYOUTS, ids=lambda v: str(v)[:24])
@pytest.mark.parametrize("cols", [16, 33])
def test_rows(device, rows, splits, cols, dtype):
    groups, total = made(rows, splits, device), sum(splits)
    x = nan_behind(torch.randn(rows, cols), splits).to(device, dtype)
    bias = torch.randn(len(splits), cols).to(device, dtype)
    for added in (None, bias):
        out = x.clone()
        op.finish_rows(out, groups, added)
        expected = x[:total]
        if added is not None:
            parts = zip(expected.split(splits), added, strict=True)
            expected = torch.cat([part + one for part, one in parts])
        assert_same_bits(out[:total], expected)
        assert not out[total:].any()
    sums = op.column_sums(x, groups)
    assert_same_bits(sums, op.column_sums(x, groups))
    for part, found in zip(x[:total].split(splits), sums.cpu(), strict=True):
        exact = part.double().cpu().sum(0)
        rounding = torch.finfo(dtype).eps * exact.abs() + 1e-6 * part.double().cpu().abs().sum(0)
        assert ((found.double() - exact).abs() <= rounding).all()
    matrices = torch.randn(len(splits), 3, cols).to(device, dtype)
    cleared = matrices.clone()
    op.zero_unused(cleared, groups)
    used = torch.tensor(splits) > 0
    assert_same_bits(cleared.cpu()[used], matrices.cpu()[used])
    assert not cleared.cpu()[~used].any()


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("offset", [0, 1])
def test_decode(device, poison, fp8, offset):
    every = torch.arange(256, dtype=torch.uint8).repeat(9)[offset:].view(fp8)
    found = op.decode(every.to(device))
    expected = decode_fp8(every).bfloat16()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.cpu().isnan(), expected.isnan())
    assert torch.equal(found.cpu().nan_to_num(7, 9, 11), expected.nan_to_num(7, 9, 11))
    assert op.decode(every[:0].to(device)).shape == (0,)
    storage = torch.zeros(len(every) + 1, dtype=torch.uint8, device=device)[1:].view(fp8)
    storage.view(torch.uint8).copy_(every.view(torch.uint8))
    assert_same_bits(op.decode(storage), found)
    assert op.decode(every[:48].view(2, 8, 3).to(device)).shape == (2, 8, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 16), (300, 33), (4, 3, 8), (0, 4)])
def test_scale_rows(device, dtype, shape):
    x, factor = torch.randn(shape).to(device, dtype), torch.rand(shape[0], device=device)
    out = x.clone()
    op.scale_rows(out, factor)
    wide = factor.view(-1, *[1] * (len(shape) - 1))
    assert_same_bits(out, (x.float() * wide).to(dtype))
