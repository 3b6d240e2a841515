"""FP8 products by the suite's own kernel, against float64; elsewhere fp8_gemm makes them."""

import pytest
import torch

from apex_te.ops import dense_gemm as op
from apex_te.ops.dense_gemm import dense_gemm, reference
from tests.checks import assert_same_bits, in_pairs, needs_cuda

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
SHAPES = [
    (1, 8, 16), (16, 16, 32), (127, 136, 48), (128, 256, 128), (129, 264, 144), (257, 200, 640),
    (300, 520, 1040), (385, 1000, 2064), (640, 776, 512), (1023, 2056, 656),
]  # fmt: skip
# Relative errors (norm of the error over norm of the result): three times those of a model of the
# matrix units that keeps 13 fraction bits of sums, K of 8192.
SPLIT, FAST = 3 * 5.5e-4, 3 * 2.4e-3
BF16 = 2.0**-8


def operands(m, n, k, pair, device, seed=0):
    torch.manual_seed(seed)
    a, b = (
        torch.randn(m, k, device=device).to(pair[0]),
        torch.randn(n, k, device=device).to(pair[1]),
    )
    # Each its own: cuBLASLt wants them at multiples of 16 bytes.
    return a, b, torch.rand(1, device=device) + 0.5, torch.rand(1, device=device) + 0.5


def error(actual, expected):
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    return ((actual.double() - expected).norm() / expected.norm()).item()


def bound(out_dtype, split):
    return (SPLIT if split else FAST) + (BF16 if out_dtype is torch.bfloat16 else 0)


@in_pairs(split=[False, True], pair=PAIRS, out_dtype=[torch.bfloat16, torch.float32], shape=SHAPES)
def test_product(device, poison, shape, out_dtype, pair, split):
    x = operands(*shape, pair, device)
    out = dense_gemm(*x, out_dtype=out_dtype, use_split_accumulator=split)
    assert out.dtype is out_dtype
    assert error(out, reference(*x)) <= bound(out_dtype, split)


@in_pairs(split=[False, True], out_dtype=[torch.bfloat16, torch.float32], shape=SHAPES)
def test_accumulate(device, shape, out_dtype, split):
    x = operands(*shape, (E5M2, E4M3), device)
    start = (torch.randn(shape[:2], device=device) * 20).to(out_dtype)
    out = start.clone()
    result = dense_gemm(*x, out=out, accumulate=True, use_split_accumulator=split)
    assert result is out
    assert error(out, reference(*x) + start.double()) <= bound(out_dtype, split)


@pytest.mark.cover(1)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_and_residual(device, poison, shape, out_dtype):
    x = operands(*shape, (E4M3, E4M3), device)
    bias = torch.randn(shape[1], device=device).bfloat16() * 10
    residual = torch.randn(shape[:2], device=device).bfloat16() * 10
    for terms in ({"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):
        out = dense_gemm(*x, out_dtype=out_dtype, **terms)
        assert error(out, reference(*x, **terms)) <= bound(out_dtype, False)


def test_residual_is_added_before_rounding(device):
    """1 + 2^-8 + 2^-9 is rounded up; rounded before the addition, 1 + 2^-8 would become 1."""
    a = torch.zeros(16, 32, device=device)
    a[:, 0] = 1
    a[:, 1] = 2.0**-8
    one = torch.ones(1, device=device)
    b = torch.ones(8, 32, device=device).to(E4M3)
    residual = torch.full((16, 8), 2.0**-9, dtype=torch.bfloat16, device=device)
    out = dense_gemm(a.to(E4M3), b, one, one, residual=residual)
    assert (out == 1 + 2.0**-7).all()


def test_inner_dimension_of_zero(device):
    x = operands(24, 16, 0, (E4M3, E4M3), device)
    residual = torch.randn(24, 16, device=device).bfloat16()
    assert not dense_gemm(*x).any()
    assert_same_bits(dense_gemm(*x, residual=residual), residual)
    out = residual.clone()
    dense_gemm(*x, out=out, accumulate=True)
    assert_same_bits(out, residual)


@pytest.mark.parametrize("shape", [(0, 16, 32), (16, 0, 32)], ids=str)
def test_no_elements(device, shape):
    assert dense_gemm(*operands(*shape, PAIRS[0], device)).shape == shape[:2]


@pytest.mark.parametrize("shape", [(5, 12, 40), (33, 20, 32), (17, 24, 24)], ids=str)
def test_sizes_without_a_kernel(device, shape):
    x = operands(*shape, (E5M2, E4M3), device)
    assert not op.multiplies(*x[:2])
    out = dense_gemm(*x, out_dtype=torch.float32, use_split_accumulator=True)
    assert error(out, reference(*x)) <= SPLIT


def test_rejects():
    a, b, one, _ = operands(16, 8, 32, PAIRS[0], "cpu")
    residual = torch.zeros(16, 8, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="float8_e5m2 twice"):
        dense_gemm(a.view(E5M2), b.view(E5M2), one, one)
    with pytest.raises(TypeError, match=r"out must have dtype bfloat16 or float32, got .*float16"):
        dense_gemm(a, b, one, one, out_dtype=torch.float16)
    with pytest.raises(ValueError, match="promotion must be 128, 256 or 512, got 64"):
        dense_gemm(a, b, one, one, promotion=64)
    with pytest.raises(TypeError, match=r"residual must have dtype bfloat16, got .*float32"):
        dense_gemm(a, b, one, one, residual=residual.float())
    with pytest.raises(ValueError, match=r"residual must have shape \[16, 8\], got \[8, 8\]"):
        dense_gemm(a, b, one, one, residual=residual[:8])
    with pytest.raises(ValueError, match="accumulate must be False with residual"):
        dense_gemm(a, b, one, one, out=residual.clone(), residual=residual, accumulate=True)
    with pytest.raises(ValueError, match=r"a and b must be \[M, K\] and \[N, K\]"):
        dense_gemm(a, b[:, :16], one, one)


@needs_cuda
class TestKernel:
    """Tests of the kernel for sm_90 alone, which no other device runs."""

    device = torch.device("cuda")

    @pytest.fixture(autouse=True)
    def _has_kernel(self):
        if not op.has_dense_fp8(self.device):
            pytest.skip("no kernel for this GPU")

    def run(self, x, promotion, columns=0, strip=0, cache=0, dtype=torch.float32):
        out = torch.full((x[0].shape[0], x[1].shape[0]), float("nan"), dtype=dtype, device="cuda")
        op._lib.dense_gemm(*x, out, None, None, False, promotion, columns, strip, cache)
        return out

    @pytest.mark.parametrize("columns", [128, 192, 256])
    @pytest.mark.parametrize("promotion", [0, 128, 256, 512])
    def test_every_tile(self, promotion, columns):
        if promotion and columns == 256:
            pytest.skip("there are no registers for such tiles")
        for shape in (*SHAPES, (1300, 2600, 4112)):
            x = operands(*shape, (E5M2, E4M3), "cuda")
            for dtype in (torch.bfloat16, torch.float32):
                for strip in (0, 1, 3):
                    out = self.run(x, promotion, columns, strip, dtype=dtype)
                    assert error(out, reference(*x)) <= bound(dtype, promotion > 0)

    def test_tiles_make_no_difference_to_bits(self):
        """The order of summation is that of K, whatever the strips."""
        x = operands(1300, 2600, 4112, (E5M2, E4M3), "cuda")
        for promotion, columns in ((0, 256), (512, 192)):
            first = self.run(x, promotion, columns)
            for strip in (1, 4, 16):
                assert_same_bits(self.run(x, promotion, columns, strip), first)
            assert_same_bits(self.run(x, promotion, columns, cache=7), first)

    @pytest.mark.parametrize("pair", PAIRS, ids=str)
    @pytest.mark.parametrize("promotion", [0, 512])
    def test_bits_repeat(self, pair, promotion):
        x = operands(1111, 1544, 3088, pair, "cuda")
        first = self.run(x, promotion)
        for _ in range(20):
            assert_same_bits(self.run(x, promotion), first)

    @pytest.mark.parametrize(("promotion", "limit"), [(128, 1.3e-4), (256, 2.1e-4), (512, 3.5e-4)])
    def test_error_of_long_sums(self, promotion, limit):
        x = operands(512, 384, 8192, (E4M3, E4M3), "cuda")
        assert error(self.run(x, promotion), reference(*x)) <= 3 * limit

    def test_one_kernel_and_no_wait(self):
        x = operands(256, 512, 1024, PAIRS[0], "cuda")
        expected = dense_gemm(*x)
        out = torch.zeros_like(expected)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dense_gemm(*x, out=out)
        graph.replay()
        assert_same_bits(out, expected)

    def test_unknown_tile(self):
        with pytest.raises(ValueError, match="columns must be 0, 128, 192 or 256, got 96"):
            self.run(operands(16, 16, 32, PAIRS[0], "cuda"), 0, 96)
