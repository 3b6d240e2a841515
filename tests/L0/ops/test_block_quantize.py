"""block_quantize against its plain-PyTorch reference, bit for bit, on each device."""

import math

import pytest
import torch
from checks import DTYPES, FP8, assert_same_bits, codes, in_pairs, needs_cuda, needs_memory, spread

from apex_te.ops import block_quantize as op
from apex_te.ops.block_quantize import block_dequantize, block_quantize

E4M3 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


def test_transposed_is_the_quantization_of_the_transpose(device):
    x = torch.randn(300, 200, device=device)
    for block_rows in (1, 128):
        there = block_quantize(x, E4M3, block_rows=block_rows)
        back = block_quantize(x.t(), E4M3, block_rows=block_rows)
        assert_same_bits(there[2:], back[:2])
    assert torch.equal(codes(there.rowwise).t(), codes(there.columnwise))


@pytest.mark.parametrize(
    ("amax", "options", "scale"),
    [
        (0.0, {}, 1.0),
        (INF, {}, 1.0),
        (NAN, {}, 1.0),
        (0.0, {"eps": 1.0}, 256.0),
        (448.0, {}, 1.0),
        (449.0, {}, 0.5),
        (449.0, {"pow2": False}, (torch.tensor(448.0) / 449).item()),
        (1e-3, {"eps": 2.0, "pow2": False}, 224.0),
        (2.0**-140, {"pow2": False}, torch.finfo(torch.float32).max),
        (2.0**-140, {}, 2.0**127),
    ],
)
def test_scale_of_a_block(device, amax, options, scale):
    x = torch.zeros(130, 256)
    x[129, 130] = -amax
    for block_rows in (1, 128):
        out = block_quantize(x.to(device), E4M3, block_rows=block_rows, **options)
        found = out.rowwise_scale_inv[(1, 129) if block_rows == 1 else (1, 1)]
        expected = INF if amax == INF else (1 / torch.tensor(scale)).item()
        assert found.item() == expected
        found = out.columnwise_scale_inv[(1, 130) if block_rows == 1 else (1, 1)]
        assert found.item() == expected
        assert math.isfinite(out.rowwise_scale_inv[0, 0].item())  # another block


@pytest.mark.parametrize("eps", [0.0, 0.03])
@pytest.mark.parametrize("fp8_dtype", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_second_cast_changes_no_value(device, dtype, fp8_dtype, eps):
    """With scales that are powers of two, whatever they are: codes may be doubled, values not."""
    x = spread((64, 300), dtype).clamp(-3e4, 3e4)
    largest = torch.finfo(fp8_dtype).max
    # Amax values around half of the largest code, to which some are rounded down.
    x[:32, 128:256] /= x[:32, 128:256].abs().amax(1, True)
    x[:32, 128:256] *= torch.linspace(0.4, 0.6, 32)[:, None] * (largest if largest < 1e3 else 1e3)
    x[40] = torch.finfo(dtype).tiny * torch.randn(300)
    x[41] = 0.0
    x[42, 7] = NAN
    first = block_quantize(x.to(device), fp8_dtype, columnwise=False, eps=eps)
    values = block_dequantize(*first[:2], dtype=dtype)
    again = block_quantize(values, fp8_dtype, columnwise=False, eps=eps)
    assert_same_bits(block_dequantize(*again[:2], dtype=dtype), values)
    exact = block_dequantize(*first[:2], dtype=torch.float32)
    torch.testing.assert_close(values.float(), exact, rtol=0.0, atol=0.0, equal_nan=True)
    doubled = (codes(first.rowwise) != codes(again.rowwise)).float().mean()
    assert 0 < doubled < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_scale_becomes_the_input_dtypes_largest(device, dtype):
    x = torch.full((1, 8), torch.finfo(dtype).tiny, dtype=dtype)
    out = block_quantize(x.to(device), torch.float8_e5m2, pow2=False)
    assert out.rowwise_scale_inv[0, 0].item() == (1 / torch.tensor(torch.finfo(dtype).max)).item()


@pytest.mark.parametrize("position", [(0, 0), (127, 127), (128, 0), (200, 256), (299, 319)])
@pytest.mark.parametrize("value", [-1e6, INF, NAN])
def test_planted_values(device, position, value):
    x = torch.randn(300, 320)
    x[position] = value
    for block_rows in (1, 128):
        amax = torch.zeros(1, device=device)
        out = block_quantize(x.to(device), E4M3, block_rows=block_rows, amax=amax)
        assert_same_bits(out, op.reference(x, E4M3, block_rows=block_rows))
        assert amax.isnan().item() if value != value else amax.item() == abs(value)
        back = block_dequantize(*out[:2], block_rows=block_rows, dtype=torch.float32)
        if value != value:
            assert back.isnan().nonzero().tolist() == [list(position)]
        if value == INF:  # no value of its block is finite, every other one is
            row, col = position[0] // block_rows * block_rows, position[1] // 128 * 128
            finite = torch.ones(x.shape, dtype=torch.bool)
            finite[row : row + block_rows, col : col + 128] = False
            assert torch.equal(back.isfinite().cpu(), finite)


@in_pairs(
    shape=[(1, 1), (130, 257), (9, 4104), (256, 384), (300, 4), (1000, 130)],
    dtype=DTYPES, fp8=FP8, scales=["pow2", "fp32", "server"], pad=[False, True],
    rowwise=[False, True],
)  # fmt: skip
def test_columnwise_blocks_of_128_rows(device, poison, shape, dtype, fp8, scales, pad, rowwise):
    x = spread(shape, dtype)
    amax = torch.zeros(1, device=device)
    options = {"columnwise_block_rows": 128, "scales": scales}
    out = block_quantize(
        x.to(device), fp8, rowwise=rowwise, pad_columnwise=pad, amax=amax, **options
    )
    expected = op.reference(x, fp8, **options)
    if rowwise:
        assert_same_bits(out[:2], expected[:2])
    assert_same_bits(out.columnwise[:, : shape[0]].contiguous(), expected.columnwise)
    assert not codes(out.columnwise)[:, shape[0] :].any()
    assert_same_bits(out.columnwise_scale_inv, expected.columnwise_scale_inv)
    assert amax.item() == x.abs().max().item()
    whole = block_quantize(x.to(device), fp8, block_rows=128, scales=scales, pad_columnwise=pad)
    assert_same_bits(out[2:], whole[2:])


def test_blocks_of_a_copy_are_checked(device):
    x = torch.randn(4, 8, device=device)
    with pytest.raises(ValueError, match="columnwise_block_rows must be 1 or 128, got 64"):
        block_quantize(x, E4M3, columnwise_block_rows=64)
    with pytest.raises(ValueError, match="columnwise_block_rows must be 128 where block_rows is"):
        block_quantize(x, E4M3, block_rows=128, columnwise_block_rows=1)


@in_pairs(
    block_rows=[1, 128], fp8=FP8, dtype=DTYPES, shape=[(1, 1), (130, 257), (9, 4104), (256, 128)]
)
def test_dequantize(device, poison, shape, dtype, fp8, block_rows):
    x = spread(shape, dtype)
    out = block_quantize(x.to(device), fp8, block_rows=block_rows, pow2=False)
    for quantized in (out[:2], out[2:]):
        back = block_dequantize(*quantized, block_rows=block_rows, dtype=dtype)
        exact = op.reference_dequantize(*(t.cpu() for t in quantized), block_rows=block_rows)
        assert_same_bits(back, exact.to(dtype))
    unaligned = torch.empty(x.numel() + 1, dtype=dtype, device=device)[1:].view(shape[::-1])
    block_dequantize(*quantized, block_rows=block_rows, out=unaligned)
    assert_same_bits(unaligned, back)


def test_every_code_dequantizes(device):
    every = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scale_inv = torch.tensor([[0.75, 2.0**-126, 1.0, 1.0]])
    for fp8 in FP8:
        c = every.view(fp8)
        exact = op.reference_dequantize(c, scale_inv)
        for dtype in DTYPES:
            back = block_dequantize(c.to(device), scale_inv.to(device), dtype=dtype).cpu()
            assert torch.equal(back.isnan(), exact.isnan())
            assert torch.equal(back.nan_to_num(), exact.to(dtype).nan_to_num())


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(24)
    rows, cols = 65552, 32784  # 2.149e9 elements
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    out = block_quantize(x, E4M3)
    end = (rows - 1) // 128 * 128
    back = block_dequantize(*out[:2])
    for begin in (0, rows // 256 * 128, end):
        part = slice(begin, begin + 128)
        expected = op.reference(x[part].cpu(), E4M3)
        assert_same_bits([out.rowwise[part], out.columnwise[:, part]], expected[::2])
        block = begin // 128
        assert_same_bits(out.columnwise_scale_inv[block : block + 1], expected[3])
        exact = op.reference_dequantize(*expected[:2]).bfloat16()
        assert_same_bits(back[part], exact)
