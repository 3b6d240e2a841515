"""Two casts by one call of cast_transpose_pair give the bits of two calls of cast_transpose."""

import pytest
import torch
from checks import assert_same_bits, codes, in_pairs

from apex_te import runtime
from apex_te.runtime import scratch_sizes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
lib = runtime.ops("cast_transpose")
# Rows and columns of both: small aligned ones take one launch on a GPU, the others two.
SHAPES = [
    ((128, 256), (256, 256)),
    ((16, 8), (8, 16)),
    ((257, 136), (520, 264)),
    ((37, 40), (72, 24)),  # columns of no multiple of 16 rows, padded or not
    ((33, 51), (64, 64)),
    ((64, 64), (30, 7)),
    ((0, 64), (64, 32)),
    ((64, 0), (32, 64)),
    ((2048, 4096), (4096, 4096)),
]


def operands(rows, cols, dtype, fp8, device, copies, pad, start):
    """Arguments of a cast up to scale_inv, with poisoned outputs."""
    x = (torch.randn(rows, cols, device=device) * 3).to(dtype)
    scale = torch.full((1,), 2.5, device=device)
    length = -(-rows // 16) * 16 if pad else rows

    def fresh(*shape):
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(fp8)

    rowwise = fresh(rows, cols) if "r" in copies else None
    columnwise = fresh(cols, length) if "c" in copies else None
    amax = torch.full((1,), start, device=device)
    return [x, scale, rowwise, columnwise, amax, torch.full((1,), -1.0, device=device)]


def sums(x, with_dbias):
    if not with_dbias:
        return [None, None]
    lines = scratch_sizes.lines(x.shape[0], scratch_sizes.CAST_ROWS)
    workspace = torch.full((lines, x.shape[1]), float("nan"), device=x.device)
    return [torch.full_like(x[0] if len(x) else x.new_empty(x.shape[1]), -7.0), workspace]


def again(args):
    return [None if a is None else a.clone() for a in args]


def check(first, second, with_dbias):
    dbias = sums(first[0], with_dbias)
    expected, others, same = again(first), again(second), again(dbias)
    lib.cast_transpose(*expected, *same, None)
    lib.cast_transpose(*others, None, None, None)
    lib.cast_transpose_pair(*first, *dbias, *second)
    for wanted, found in zip(
        (*expected, *others, same[0]), (*first, *second, dbias[0]), strict=True
    ):
        assert (wanted is None) == (found is None)
        if wanted is not None:
            is_fp8 = wanted.element_size() == 1
            assert_same_bits(*((codes(t) if is_fp8 else t) for t in (wanted, found)))


@in_pairs(shapes=SHAPES, with_dbias=[False, True], fp8=[E4M3, E5M2])
def test_equals_two_casts(device, shapes, with_dbias, fp8):
    if shapes[0][0] > 1000 and device.type == "cpu":
        pytest.skip("large, for the choice of kernels on a GPU")
    first = operands(*shapes[0], torch.bfloat16, fp8, device, "rc", True, 0.0)
    second = operands(*shapes[1], torch.bfloat16, E4M3, device, "r", False, 0.5)
    check(first, second, with_dbias and shapes[0][0] > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("copies", [("r", "r"), ("c", "c"), ("rc", "c"), ("r", "rc"), ("", "r")])
def test_dtypes_and_copies(device, dtype, copies):
    for pad in (False, True):
        first = operands(48, 80, dtype, E5M2, device, copies[0], pad, 0.0)
        second = operands(40, 32, dtype, E4M3, device, copies[1], pad, 0.0)
        check(first, second, False)
        first[2:4] = [None if t is None else torch.empty_like(t) for t in first[2:4]]
        check(first, second, bool(copies[0]))


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_other_formats_and_dtypes_of_the_second(device, fp8):
    first = operands(48, 80, torch.bfloat16, E4M3, device, "rc", True, 0.0)
    for dtype in (torch.float32, torch.bfloat16):
        check(again(first), operands(40, 32, dtype, fp8, device, "rc", False, 0.0), True)


def test_nan_and_infinity(device):
    first = operands(48, 80, torch.bfloat16, E5M2, device, "rc", True, 0.0)
    second = operands(64, 32, torch.bfloat16, E4M3, device, "rc", False, 0.0)
    first[0][5, 7], second[0][9, 3] = float("nan"), float("-inf")
    check(first, second, True)
    assert first[4].isnan().all()
    assert second[4].isinf().all()


def test_misaligned(device):
    first = operands(48, 80, torch.bfloat16, E4M3, device, "rc", True, 0.0)
    second = operands(64, 32, torch.bfloat16, E4M3, device, "rc", False, 0.0)
    moved = torch.empty(64 * 32 + 1, dtype=torch.bfloat16, device=device)[1:].view(64, 32)
    second[0] = moved.copy_(second[0])
    dbias = sums(first[0], False)
    expected = again(second)
    lib.cast_transpose(*expected, None, None, None)
    lib.cast_transpose_pair(*first, *dbias, *second)
    for wanted, found in zip(expected[2:4], second[2:4], strict=True):
        assert_same_bits(codes(wanted), codes(found))
