"""FP8 products of an MLP with GELU in their kernel, against both ops in turn."""

import pytest
import torch
from test_dense_gemm_swiglu import E4M3, E5M2, SHAPES, bytes_of, normal, scalar

from apex_te.ops import activation, bias_gelu, dense_gemm_swiglu
from apex_te.ops import dense_gemm_gelu as op
from apex_te.ops.dense_gemm import dense_gemm
from apex_te.ops.dense_gemm_gelu import dense_gemm_gelu, dense_gemm_gelu_bwd
from tests.checks import assert_same_bits, needs_cuda

NAN, INF = float("nan"), float("inf")


def forward_operands(m, f, k, device):
    torch.manual_seed(0)
    inv = scalar(1 / 8, device), scalar(1 / k**0.5, device)
    return normal(m, k, E4M3, device, 8), normal(f, k, E4M3, device), *inv


def check_forward(x, bias=None, scale=3.0, start=0.0):
    device = x[0].device
    scale = scalar(scale, device)
    amax, expected_amax = scalar(start, device), scalar(start, device)
    hidden, act = dense_gemm_gelu(*x, scale, bias=bias, amax=amax)
    expected = dense_gemm(*x, bias=bias)
    assert_same_bits(hidden, expected)
    y = activation.activation_fwd_fp8(
        expected, "gelu", scale, E4M3, columnwise=False, amax=expected_amax
    )
    assert_same_bits(bytes_of(act.rowwise), bytes_of(y.rowwise))
    assert act.columnwise is None
    assert_same_bits(amax, expected_amax)
    assert_same_bits(act.scale_inv, y.scale_inv)
    return hidden, act


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_equals_product_and_gelu(device, poison, shape):
    x = forward_operands(*shape, device)
    check_forward(x)
    check_forward(x, bias=torch.randn(shape[1], device=device).bfloat16() * 3, start=0.5)
    check_forward(x, bias=torch.randn(shape[1], device=device), scale=1e4)


def test_forward_against_float64(device):
    torch.manual_seed(0)
    x, weight = normal(64, 48, E4M3, device), normal(96, 48, E4M3, device)
    one, bias = scalar(1.0, device), torch.randn(96, device=device).bfloat16()
    hidden, act = dense_gemm_gelu(x, weight, one, one, one, bias=bias)
    exact = x.double() @ weight.double().t() + bias.double()
    assert (hidden.double() - exact).norm() <= 0.004 * exact.norm()
    expected = torch.nn.functional.gelu(exact, approximate="tanh").clamp(-448, 448)
    assert (act.rowwise.double() - expected).norm() <= 0.04 * expected.norm()


def test_forward_of_nan_and_infinity(device):
    x = forward_operands(40, 48, 64, device)
    x[0].view(torch.uint8)[33, 5] = 0x7F
    _, act = check_forward(x, start=7.0)
    assert act.rowwise[33].isnan().all()
    assert not act.rowwise[:33].isnan().any()
    x = forward_operands(40, 48, 64, device)
    bias = torch.zeros(48, device=device)
    bias[3], bias[17], bias[30], bias[-1] = NAN, INF, -INF, -1e38
    check_forward(x, bias=bias)
    check_forward(x, scale=NAN)
    for factor in (INF, NAN):
        check_forward((*x[:2], scalar(factor, device), x[3]))


def backward_operands(m, f, k, fp8, device):
    torch.manual_seed(1)
    inv = scalar(1 / 8, device), scalar(1 / k**0.5, device)
    hidden = (torch.randn(m, f, device=device) * 2).bfloat16()
    return normal(m, k, fp8, device, 8), normal(f, k, E4M3, device), *inv, hidden


def check_dbias(actual, grad, hidden, expected):
    """Checks column sums against float64, with room for a bfloat16 result and float32 terms."""
    if not dense_gemm_swiglu.fuses(*backward_operands(16, 16, 16, E4M3, grad.device)[:2]):
        assert_same_bits(actual, expected)  # the same op
    x = hidden.double().requires_grad_()
    (dx,) = torch.autograd.grad(bias_gelu.reference(x), x, grad.double())
    is_finite = expected.isfinite()
    assert_same_bits(actual.isfinite(), is_finite)
    error = (actual.double() - dx.sum(0)).abs()
    bound = 2.0**-8 * dx.sum(0).abs() + 1e-5 * grad.double().abs().sum(0) + 1e-30
    assert (error <= bound)[is_finite].all()


def check_backward(x, fp8, *, act=True, columnwise=True, dbias=True, start=0.0, scale=5.0):
    device, hidden = x[0].device, x[4]
    amax, expected_amax = scalar(start, device), scalar(start, device)
    scale, act_scale = scalar(scale, device), scalar(2.5, device)
    found = dense_gemm_gelu_bwd(
        *x, scale, fp8, columnwise=columnwise, amax=amax, act_scale=act_scale if act else None,
        with_dbias=dbias,
    )  # fmt: skip
    product = dense_gemm(*x[:4], use_split_accumulator=True)
    expected, sums = bias_gelu.bias_gelu_bwd_fp8(
        product, hidden, None, scale, fp8, pad_columnwise=True, amax=expected_amax, with_dbias=True
    )
    assert_same_bits(bytes_of(found.output.rowwise), bytes_of(expected.rowwise))
    assert_same_bits(amax, expected_amax)
    assert_same_bits(found.output.scale_inv, expected.scale_inv)
    assert (found.output.columnwise is not None) == columnwise
    assert (found.act_columnwise is not None) == act
    assert (found.dbias is not None) == dbias
    if columnwise:
        assert_same_bits(bytes_of(found.output.columnwise), bytes_of(expected.columnwise))
    if act:
        y = activation.activation_fwd_fp8(
            hidden, "gelu", act_scale, E4M3, rowwise=False, pad_columnwise=True
        )
        assert_same_bits(bytes_of(found.act_columnwise), bytes_of(y.columnwise))
    if dbias:
        check_dbias(found.dbias, product, hidden, sums)
    return found


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_equals_product_and_gelu(device, poison, shape, fp8):
    x = backward_operands(*shape, fp8, device)
    check_backward(x, fp8)
    check_backward(x, fp8, act=False, start=1.5)
    check_backward(x, fp8, columnwise=False)
    check_backward(x, fp8, columnwise=False, act=False)
    check_backward(x, fp8, dbias=False)
    check_backward(x, fp8, columnwise=False, act=False, dbias=False)


def test_backward_of_nan_and_infinity(device):
    x = backward_operands(40, 48, 64, E5M2, device)
    x[0].view(torch.uint8)[33, 5] = 0x7F
    found = check_backward(x, E5M2, start=7.0)
    assert found.dbias.isnan().all()  # a row of NaN is in every sum
    x = backward_operands(40, 48, 64, E5M2, device)
    for row, (column, value) in enumerate({3: INF, 17: -INF, 31: NAN, 47: 3e38}.items()):
        x[4][11 * row + 6, column] = value
    found = check_backward(x, E5M2, start=7.0)
    assert found.dbias.isfinite().sum() == 45
    check_backward(x, E5M2, scale=NAN)
    check_backward((*x[:2], scalar(NAN, device), *x[3:]), E5M2)


def test_backward_of_large_and_small_inputs(device):
    """Inputs where GELU saturates, and around the minimum of its derivative."""
    x = backward_operands(96, 64, 48, E5M2, device)
    values = torch.linspace(-12, 12, 96, device=device)
    values[::9] *= 2.0 ** torch.arange(-60, 50, 10, device=device)
    hidden = values[:, None].expand(96, 64).bfloat16().contiguous()
    for fp8 in (E4M3, E5M2):
        check_backward((x[0].float().to(fp8), *x[1:4], hidden), fp8)


def test_rejects():
    one = scalar(1.0, "cpu")
    x = forward_operands(16, 24, 32, "cpu")
    with pytest.raises(ValueError, match="dense_gemm_gelu: rows of b must be a multiple of 16"):
        dense_gemm_gelu(*x, one)
    x = backward_operands(16, 16, 32, E5M2, "cpu")
    with pytest.raises(ValueError, match=r"hidden must have shape \[16, 16\], got \[15, 16\]"):
        dense_gemm_gelu_bwd(*x[:4], x[4][:15], one, E5M2)
    with pytest.raises(ValueError, match=r"a and b must be \[M, K\] and \[N, K\]"):
        dense_gemm_gelu_bwd(x[0], x[1][:, :16], *x[2:], one, E5M2)
    with pytest.raises(ValueError, match="rows of b must be a multiple of 16, got 8"):
        dense_gemm_gelu_bwd(x[0], x[1][:8], *x[2:], one, E5M2)
    with pytest.raises(TypeError, match="fp8_dtype must be float8_e4m3fn or float8_e5m2"):
        dense_gemm_gelu_bwd(*x, one, torch.float16)


@needs_cuda
class TestKernels:
    """Tests of the kernels for sm_90 alone, which no other device runs."""

    @pytest.fixture(autouse=True)
    def _has_kernels(self):
        if not dense_gemm_swiglu.fuses(*forward_operands(16, 16, 16, "cuda")[:2]):
            pytest.skip("no kernels for this GPU")

    def test_large(self, poison):
        bias = torch.randn(2608, device="cuda").bfloat16()
        check_forward(forward_operands(1111, 2608, 4112, "cuda"), bias=bias)
        for fp8 in (E4M3, E5M2):
            check_backward(backward_operands(1111, 2608, 4112, fp8, "cuda"), fp8)

    def test_kernels_run(self, monkeypatch):
        """And not both ops, which would give the same."""
        monkeypatch.setattr(op.dense_gemm, "multiply_into", None)
        x = forward_operands(64, 48, 64, "cuda")
        dense_gemm_gelu(*x, scalar(1.0, "cuda"), bias=torch.zeros(48, device="cuda"))
        x = backward_operands(64, 48, 64, E5M2, "cuda")
        dense_gemm_gelu_bwd(*x, scalar(1.0, "cuda"), E5M2, with_dbias=True)

    def test_takes_no_bias_that_lies_between_pairs(self):
        x, one = forward_operands(40, 48, 64, "cuda"), scalar(1.0, "cuda")
        hidden, biases = torch.zeros(40, 48, device="cuda").bfloat16(), one.new_zeros(64).bfloat16()
        for first, is_taken in ((0, True), (1, False), (2, True)):
            rest = biases[first : first + 48], one, hidden.to(E4M3), None, None
            assert (op._launch_fwd(*x, hidden, *rest) is not None) == is_taken

    @pytest.mark.parametrize("cache", [0, 1, 6])
    def test_cache_and_strip_make_no_difference(self, cache):
        x, one = forward_operands(900, 1040, 2048, "cuda"), scalar(1.0, "cuda")
        expected = dense_gemm_gelu(*x, one)
        hidden, act = torch.zeros_like(expected.hidden), torch.zeros_like(expected.act.rowwise)
        dy = backward_operands(900, 1040, 2048, E5M2, "cuda")
        rowwise, dbias = torch.zeros(900, 1040, device="cuda").to(E5M2), hidden.new_zeros(1040)
        lines = torch.zeros(29, 1040, device="cuda")
        wanted = dense_gemm_gelu_bwd(*dy, one, E5M2, with_dbias=True)
        for strip in (0, 1, 3):
            op._lib.dense_gemm_gelu(*x, hidden, None, one, act, None, None, strip, cache)
            assert_same_bits(hidden, expected.hidden)
            assert_same_bits(bytes_of(act), bytes_of(expected.act.rowwise))
            op._lib.dense_gemm_gelu_bwd(
                *dy, one, rowwise, None, None, None, None, None, dbias, lines, 512, strip, cache
            )
            assert_same_bits(bytes_of(rowwise), bytes_of(wanted.output.rowwise))
            assert_same_bits(dbias, wanted.dbias)

    def test_bits_repeat(self):
        x, one = backward_operands(1000, 1552, 2064, E5M2, "cuda"), scalar(1.0, "cuda")
        call = {"act_scale": one, "with_dbias": True}
        first = dense_gemm_gelu_bwd(*x, one, E5M2, **call)
        for _ in range(20):
            again = dense_gemm_gelu_bwd(*x, one, E5M2, **call)
            assert_same_bits(bytes_of(again.output.rowwise), bytes_of(first.output.rowwise))
            assert_same_bits(bytes_of(again.output.columnwise), bytes_of(first.output.columnwise))
            assert_same_bits(bytes_of(again.act_columnwise), bytes_of(first.act_columnwise))
            assert_same_bits(again.dbias, first.dbias)
