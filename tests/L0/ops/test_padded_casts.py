"""Padded columnwise copies of casts and norms: the data of the plain copy, then zeros up to 16."""

import pytest
import torch
from checks import DTYPES, FP8, assert_same_bits, codes, in_pairs

from apex_te.ops.byte_transpose import byte_transpose
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.cast_transpose import reference as cast_reference
from apex_te.ops.current_scale import current_scale
from apex_te.ops.current_scale import reference as current_reference
from apex_te.ops.fp8_output import columnwise_length
from apex_te.ops.layer_norm import layer_norm_fwd_fp8
from apex_te.ops.rms_norm import rms_norm_fwd_fp8

ROWS = [1, 15, 16, 17, 33, 254, 255, 257]
NAMES = ["cast_transpose", "current_scale", "layer_norm", "layer_norm_residual", "rms_norm"]


def runs(x, fp8, scale):
    """Runs of the ops by their names: each takes options and returns rowwise and columnwise."""
    scale = torch.full((1,), scale, device=x.device)
    weight, bias = (torch.randn(x.shape[1]).to(x) for _ in range(2))
    norm = (1e-5, scale, fp8)
    return {
        "cast_transpose": lambda **k: cast_transpose(x, scale, fp8, **k),
        "current_scale": lambda **k: current_scale(x, fp8, **k),
        "layer_norm": lambda **k: layer_norm_fwd_fp8(x, weight, bias, *norm, **k).y,
        "layer_norm_residual": lambda **k: (
            layer_norm_fwd_fp8(x, weight, bias, *norm, residual=x, **k).y
        ),
        "rms_norm": lambda **k: rms_norm_fwd_fp8(x, weight, *norm, **k).y,
    }


def check(run, rows):
    """Compares a padded copy with the one that is not padded; returns the padded output."""
    plain, padded, alone = run(), run(pad_columnwise=True), run(pad_columnwise=True, rowwise=False)
    assert plain.columnwise.shape[1] == rows
    assert padded.columnwise.shape == (plain.columnwise.shape[0], columnwise_length(rows, True))
    assert padded.columnwise.is_contiguous()
    assert torch.equal(codes(padded.columnwise)[:, :rows], codes(plain.columnwise))
    assert not codes(padded.columnwise)[:, rows:].any()
    assert_same_bits(padded.rowwise, plain.rowwise)
    assert_same_bits(alone.columnwise, padded.columnwise)
    return padded


@in_pairs(name=NAMES, rows=ROWS, cols=[1, 37, 128, 520, 4096])
def test_data_then_zeros(device, poison, name, rows, cols):
    for dtype in DTYPES:
        for fp8 in FP8:
            x = torch.randn(rows, cols).to(dtype).to(device)
            check(runs(x, fp8, 3.7)[name], rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0])
def test_zeros_whatever_the_values_are(device, poison, name, scale):
    """A scale of NaN turns even a zero into NaN, and a norm a missing row into its bias."""
    x = torch.randn(33, 520)
    x[3] = float("inf")
    x[32] = float("nan")
    for fp8 in FP8:
        check(runs(x.to(device).bfloat16(), fp8, scale)[name], 33)


@pytest.mark.cover(1)
@pytest.mark.parametrize("rows", [2049, 2057, 8190])
@pytest.mark.parametrize("name", NAMES)
def test_larger_than_a_cache(device, poison, name, rows):
    x = torch.randn(rows, 2048).bfloat16().to(device)
    run = runs(x, FP8[0], 3.7)[name]
    if "norm" not in name:
        check(run, rows)
        return
    # Padding lets a GPU take another kernel here, which adds a row in another order.
    plain, padded = run(), run(pad_columnwise=True)
    assert torch.equal(codes(padded.columnwise)[:, :rows], codes(padded.rowwise).t())
    assert not codes(padded.columnwise)[:, rows:].any()
    differ = codes(padded.rowwise) != codes(plain.rowwise)
    assert differ.float().mean() < 1e-4
    assert (codes(padded.rowwise).int() - codes(plain.rowwise).int())[differ].abs().le(1).all()


@pytest.mark.cover(1)
@pytest.mark.parametrize("cols", [7, 121, 250, 4091, 4095, 4097])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_odd_columns_at_any_alignment(device, poison, cols, offset):
    """Rows that begin anywhere: each element, and nothing behind the row or the matrix, counts."""
    rows, scale = 270, torch.full((1,), 7.3)
    for dtype in DTYPES:
        memory = torch.full((rows * cols + offset + 9,), float("inf")).to(dtype)
        memory[offset : offset + rows * cols] = torch.randn(rows * cols).to(dtype) * 30
        x = memory[offset : offset + rows * cols].view(rows, cols)
        on_device = memory.to(device)[offset : offset + rows * cols].view(rows, cols)
        amax = torch.zeros(1, device=device)
        found = cast_transpose(on_device, scale.to(device), FP8[0], amax=amax, pad_columnwise=True)
        expected = cast_reference(x, scale, FP8[0])
        assert amax.item() == x.float().abs().max().item()
        assert_same_bits(found.rowwise.cpu(), expected.rowwise)
        assert torch.equal(codes(found.columnwise)[:, :rows], codes(expected.columnwise))
        assert not codes(found.columnwise)[:, rows:].any()
        summed = cast_transpose(
            on_device, scale.to(device), FP8[0], with_dbias=True, pad_columnwise=True
        )
        assert_same_bits(summed.columnwise, found.columnwise)
        cpu = cast_transpose(x, scale, FP8[0], with_dbias=True)
        assert_same_bits(summed.dbias.cpu(), cpu.dbias)
        current = current_scale(on_device, FP8[1], pad_columnwise=True)
        expected = current_reference(x, FP8[1])
        assert_same_bits(current.rowwise.cpu(), expected.rowwise)
        assert torch.equal(codes(current.columnwise)[:, :rows], codes(expected.columnwise))


@pytest.mark.parametrize("name", ["cast_transpose", "current_scale"])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_given_output(device, poison, name, offset):
    """A padded tensor that is given is filled, at every alignment, and nothing around it."""
    rows, cols = 33, 40
    x = torch.randn(rows, cols, device=device)
    memory = torch.full((cols * 48 + offset + 16,), 77, dtype=torch.uint8, device=device)
    out = memory[offset : offset + cols * 48].view(FP8[0]).view(cols, 48)
    run = runs(x, FP8[0], 3.7)[name]
    found = run(out_columnwise=out)
    assert found.columnwise is out
    assert_same_bits(out, run(pad_columnwise=True).columnwise)
    assert (memory[:offset] == 77).all()
    assert (memory[offset + cols * 48 :] == 77).all()


@pytest.mark.parametrize("length", [32, 34, 47, 64])
def test_refuses_other_lengths(device, length):
    x, scale = torch.randn(33, 40, device=device), torch.ones(1, device=device)
    out = torch.empty(40, length, dtype=FP8[0], device=device)
    with pytest.raises(ValueError, match=r"columnwise must have shape \[40, 33\]"):
        cast_transpose(x, scale, FP8[0], out_columnwise=out)


def test_noop_leaves_the_padding(device):
    x, scale = torch.randn(33, 40, device=device), torch.ones(1, device=device)
    out = torch.full((40, 48), 77, dtype=torch.uint8, device=device)
    noop = torch.ones(1, dtype=torch.int32, device=device)
    cast_transpose(x, scale, FP8[0], noop=noop, out_columnwise=out.view(FP8[0]))
    assert (out == 77).all()


def test_column_sums_are_those_of_the_rows(device, poison):
    x, scale = torch.randn(255, 136, device=device), torch.ones(1, device=device)
    plain, padded = (
        cast_transpose(x, scale, FP8[0], with_dbias=True, pad_columnwise=pad)
        for pad in (False, True)
    )
    assert torch.equal(plain.dbias, padded.dbias)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cols", [1, 37, 128, 520])
def test_byte_transpose(device, poison, rows, cols):
    data = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, device=device)
    found = byte_transpose(data, pad_columnwise=True)
    assert found.shape == (cols, columnwise_length(rows, True))
    assert torch.equal(found[:, :rows], data.t())
    assert not found[:, rows:].any()


def test_no_rows(device):
    x, scale = torch.randn(0, 40, device=device), torch.ones(1, device=device)
    assert cast_transpose(x, scale, FP8[0], pad_columnwise=True).columnwise.shape == (40, 0)
    assert current_scale(x, FP8[0], pad_columnwise=True).columnwise.shape == (40, 0)
    data = torch.empty(0, 40, dtype=torch.uint8, device=device)
    assert byte_transpose(data, pad_columnwise=True).shape == (40, 0)
