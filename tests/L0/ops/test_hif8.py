"""hif8 against an independent table of values, bit for bit, on each device."""

import numpy as np
import pytest
import torch
from checks import DTYPES, assert_same_bits, needs_cuda, needs_memory, one

from apex_te.ops import hif8

ALL_16_BITS = torch.arange(65536, dtype=torch.int32).to(torch.int16).reshape(256, 256)
CODES = torch.arange(256, dtype=torch.uint8)

# The positive values in order of their codes, 0x00 to 0x7F: zero, powers of two, then all mantissas
# of these exponents.
EXPONENTS = [
    0, 1, -1, 2, 3, -2, -3, 4, 5, 6, 7, -4, -5, -6, -7,
    8, 9, 10, 11, 12, 13, 14, 15, -8, -9, -10, -11, -12, -13, -14, -15,
]  # fmt: skip
VALUES = [0.0, *(2.0**e for e in range(-22, -15))]
for e in EXPONENTS:
    width = 3 if abs(e) < 4 else 2 if abs(e) < 8 else 1
    VALUES += [(1 + m / 2**width) * 2.0**e for m in range(2**width)]
VALUES[0x6F] = float("inf")

GOLDEN = [
    (1.0, 0x08), (-1.0, 0x88), (0.5, 0x18), (2.0, 0x10), (4.0, 0x20), (16.0, 0x40),
    (0.0625, 0x50), (256.0, 0x60), (32768.0, 0x6E), (40959.996, 0x6E), (2.0**-15, 0x7E),
    (2.0**-16, 0x07), (1.5 * 2.0**-16, 0x7E), (2.0**-22, 0x01), (1.5 * 2.0**-22, 0x02),
    (2.0**-23, 0x01), (-(2.0**-23), 0x81), ((1 - 2.0**-24) * 2.0**-23, 0x00), (-0.0, 0x00),
    (-(2.0**-24), 0x00), (1.0625, 0x09), (-1.0625, 0x89), (14.5, 0x2F), (15.5, 0x40),
    (0.484375, 0x18), (224.0, 0x4F), (240.0, 0x60), (448.0, 0x62), (3.141592653589793, 0x15),
    (-0.1, 0xD2), (0.001, 0x74), (float("nan"), 0x80), (-float("nan"), 0x80),
]  # fmt: skip


def random_fp32_bits(shape):
    bits = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)
    # half of them with exponents inside HiF8's range
    near = bits & ~0x7F800000 | (103 + bits.abs() % 41) << 23
    return torch.where(bits % 2 == 0, bits, near).view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_every_code(device, poison, dtype):
    expected = torch.tensor(VALUES + [-v for v in VALUES])
    expected[0x80] = float("nan")
    values = hif8.decode(CODES.to(device), dtype).cpu()
    assert torch.isnan(values[0x80])
    torch.testing.assert_close(values.float(), expected, rtol=0, atol=0, equal_nan=True)
    assert not torch.signbit(values[0])
    torch.testing.assert_close(
        hif8.reference_decode(CODES), expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (7, 3), (129, 127), (3, 5, 70), (1000, 33)], ids=str)
def test_decode_with_scale(device, poison, shape, dtype):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    values = torch.empty(shape, dtype=dtype, device=device)
    hif8.decode(codes.to(device), scale_inv=one(0.37, device), out=values)
    expected = (hif8.reference_decode(codes) * one(0.37)).to(dtype)
    torch.testing.assert_close(values.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("value", "code"), GOLDEN)
def test_encode_golden(device, value, code):
    assert hif8.encode(torch.tensor([value], device=device)).item() == code


@pytest.mark.parametrize("value", [40960.0, 65504.0, 1e30, float("inf")])
def test_overflow_policy(device, value):
    x = torch.tensor([value, -value], device=device)
    assert hif8.encode(x).tolist() == [0x6E, 0xEE]
    assert hif8.encode(x, saturate=False).tolist() == [0x6F, 0xEF]


@pytest.mark.parametrize("saturate", [True, False])
def test_encode_random_fp32_bits(device, saturate):
    x = random_fp32_bits((700, 700))
    actual = hif8.encode(x.to(device), saturate=saturate)
    assert_same_bits(actual, hif8.reference_encode(x, saturate=saturate))


def test_encode_around_every_midpoint(device):
    values = torch.tensor(sorted(VALUES[:0x6F] + VALUES[0x70:]))
    middle = (values[1:] + values[:-1]) / 2
    below, above = (torch.nextafter(middle, torch.tensor(v)) for v in (0.0, 1e9))
    x = torch.stack([below, middle, above]).to(device)
    nearest = torch.stack([values[:-1], values[1:], values[1:]])
    for sign in (1, -1):
        decoded = hif8.decode(hif8.encode(x * sign), torch.float32).cpu()
        assert torch.equal(decoded, nearest * sign)


def test_encode_is_what_en_dtypes_gives():
    en_dtypes = pytest.importorskip("en_dtypes")
    x = torch.cat([random_fp32_bits((100_000,)), ALL_16_BITS.view(torch.bfloat16).float().view(-1)])
    with np.errstate(invalid="ignore"):  # numpy warns of NaN
        expected = torch.from_numpy(x.numpy().astype(en_dtypes.hifloat8).view(np.uint8))
    assert torch.equal(hif8.encode(x, saturate=False), expected)


@pytest.mark.parametrize("shape", [(2048, 2112), (2053, 2049)], ids=str)
def test_larger_than_a_cache(device, shape):
    """On a CPU such codes and values go past the caches."""
    x = torch.randn(shape).bfloat16()
    expected = hif8.reference_quantize(x, one(0.4))
    out = hif8.quantize(x.to(device), one(0.4, device))
    assert_same_bits(out[:2], expected[:2])
    row = hif8.quantize(x.to(device), one(0.4, device), columnwise=False).rowwise
    assert_same_bits(row, expected.rowwise)
    values = hif8.reference_decode(expected.rowwise)
    for dtype in DTYPES:
        assert_same_bits(hif8.decode(row, dtype), values.to(dtype))
        assert_same_bits(hif8.decode(row.view(-1)[1:], dtype), values.view(-1)[1:].to(dtype))


def test_amax_accumulates(device):
    x = torch.randn(300, 48, device=device)
    amax = one(0, device)
    for factor in (1, 0.5):
        hif8.quantize(x * factor, one(1, device), amax=amax)
    assert amax.item() == x.abs().max().item()
    x[77, 3] = float("inf")
    hif8.quantize(x, one(1, device), amax=amax, columnwise=False)
    assert amax.item() == float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (31, 32), (257, 129)], ids=str)
def test_current_scale_of_a_known_amax(device, poison, shape, dtype):
    x = (torch.randn(shape) * 30).to(dtype)
    out = hif8.quantize_current(x.to(device), rowwise=False, eps=1.0, amax=one(77, device))
    expected = hif8.reference_quantize_current(x, eps=1.0, amax=one(77))
    assert out.rowwise is None
    assert_same_bits(out, expected._replace(rowwise=None))


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_current_scale_of_unusable_amax_is_one(device, value):
    x = torch.zeros(20, 24)
    x[3, 4] = value
    out = hif8.quantize_current(x.to(device))
    assert out.scale.item() == 1.0
    assert out.scale_inv.item() == (value if value == float("inf") else 1.0)
    assert_same_bits(out[:4], hif8.reference_quantize_current(x)[:4])


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(24)
    rows, cols = 65552, 32784  # 2.149e9 elements
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    out = hif8.quantize(x, one(2, "cuda"))
    decoded = hif8.decode(out.rowwise)
    for begin in (0, rows // 2, rows - 16):
        expected = hif8.reference_quantize(x[begin : begin + 16].cpu(), one(2)).rowwise
        assert_same_bits(out.rowwise[begin : begin + 16], expected)
        assert_same_bits(out.columnwise[:, begin : begin + 16], expected.t())
        assert_same_bits(decoded[begin : begin + 16], hif8.reference_decode(expected).bfloat16())
