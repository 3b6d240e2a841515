"""byte_transpose against PyTorch's transposition, byte for byte, on each device."""

import pytest
import torch
from checks import needs_cuda

from apex_te.ops.byte_transpose import byte_transpose, reference

SHAPES = [
    (0, 5), (5, 0), (1, 1), (3, 7), (8, 15), (16, 16), (17, 128), (127, 129), (128, 128),
    (129, 1000), (256, 384), (1000, 3), (272, 3584), (33, 4095), (512, 264), (264, 512),
]  # fmt: skip
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]


def random_codes(shape, device, dtype=torch.uint8):
    return torch.randint(0, 256, shape, dtype=torch.uint8).to(device).view(dtype)


def assert_transposed(codes, found):
    assert found.dtype == codes.dtype
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), reference(codes).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_reference(device, poison, shape, dtype):
    codes = random_codes(shape, device, dtype)
    assert_transposed(codes, byte_transpose(codes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(0, 3, 5), (1, 16, 32), (3, 33, 4095), (5, 128, 272), (70, 8, 15)]
)
def test_stacks(device, poison, shape, dtype):
    codes = random_codes(shape, device, dtype)
    assert_transposed(codes, byte_transpose(codes))
    out = torch.empty(shape[0], shape[2], shape[1], dtype=dtype, device=device)
    assert byte_transpose(codes, out=out) is out
    assert_transposed(codes, out)


def test_twice_is_the_matrix_itself(device):
    codes = random_codes((1111, 2049), device)
    assert torch.equal(byte_transpose(byte_transpose(codes)), codes)


def test_large_is_streamed(device):
    codes = random_codes((4096, 2304), device)
    assert_transposed(codes, byte_transpose(codes))


@needs_cuda
def test_more_than_2_31_elements():
    codes = random_codes((32768, 65552), "cuda")
    out = byte_transpose(codes)
    for part in (slice(0, 300), slice(32500, None)):
        assert torch.equal(out[:, part], codes[part].t())


def test_errors(device):
    codes = random_codes((4, 6), device)
    with pytest.raises(ValueError, match=r"^byte_transpose: fp8_data must have 2 or 3 dimensions"):
        byte_transpose(codes[0])
    with pytest.raises(ValueError, match=r"^byte_transpose: pad_columnwise must be False for a st"):
        byte_transpose(codes[None], pad_columnwise=True)
    with pytest.raises(TypeError, match=r"^byte_transpose: fp8_data must have a dtype of one byte"):
        byte_transpose(torch.zeros(2, 2, device=device))
    with pytest.raises(TypeError, match=r"^byte_transpose: out must have dtype torch.uint8"):
        byte_transpose(codes, out=torch.empty(6, 4, dtype=torch.int8, device=device))
