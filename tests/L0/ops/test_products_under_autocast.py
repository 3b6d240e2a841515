"""Products of FP8 operands by the ops themselves, with torch.autocast on around the call."""

import torch
from checks import assert_same_bits, in_pairs

from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.emulated_gemm import mx_gemm
from apex_te.ops.fp8_gemm import block_scaled_gemm, fp8_gemm
from apex_te.ops.mx_quantize import mx_quantize

ONE = torch.ones(1)


def tensorwise(a, b, dtype):
    a, b = (x.to(torch.float8_e4m3fn) for x in (a, b))
    return fp8_gemm(a, b, ONE, ONE, out_dtype=dtype)


def blockwise(a, b, dtype):
    a, b = (block_quantize(x, torch.float8_e4m3fn) for x in (a, b))
    return block_scaled_gemm(a[0], b[0], a[1], b[1], b_block_rows=1, out_dtype=dtype)


def mx(a, b, dtype):
    a, b = mx_quantize(a), mx_quantize(b)
    return mx_gemm(a[0], b[0], a[1], b[1], out_dtype=dtype)


@in_pairs(
    autocast=[torch.bfloat16, torch.float16],
    dtype=[torch.float32, torch.bfloat16],
    product=[tensorwise, blockwise, mx],
)
def test_it_changes_no_bits(product, dtype, autocast):
    a, b = torch.randn(16, 128), torch.randn(32, 128)
    expected = product(a, b, dtype)
    with torch.autocast("cpu", autocast):
        found = product(a, b, dtype)
    assert_same_bits(found, expected)
