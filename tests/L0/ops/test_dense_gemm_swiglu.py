"""FP8 products of a gated MLP with the activation in their kernel, against both ops in turn."""

import pytest
import torch

from apex_te.ops import dense_gemm_swiglu as op
from apex_te.ops import swiglu
from apex_te.ops.block_quantize import block_dequantize, block_quantize
from apex_te.ops.dense_gemm import dense_gemm
from apex_te.ops.dense_gemm_swiglu import (
    dense_gemm_swiglu,
    dense_gemm_swiglu_bwd,
    dense_gemm_swiglu_held,
)
from tests.checks import assert_same_bits, needs_cuda, on_gpus

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Rows, outputs of the activation, inner dimension.
SHAPES = [
    (1, 16, 16), (16, 32, 32), (33, 48, 64), (127, 96, 48), (128, 192, 128), (129, 208, 144),
    (257, 400, 640), *on_gpus((300, 528, 1040), (640, 768, 512), (1023, 1072, 656)),
]  # fmt: skip


def normal(rows, cols, dtype, device, scale=1.0):
    return (torch.randn(rows, cols, device=device) * scale).to(dtype)


def scalar(value, device):
    return torch.full((1,), value, device=device)


def bytes_of(x):
    return None if x is None else x.view(torch.uint8)


def forward_operands(m, f, k, device):
    torch.manual_seed(0)
    inv = scalar(1 / 8, device), scalar(1 / k**0.5, device)
    return normal(m, k, E4M3, device, 8), normal(2 * f, k, E4M3, device), *inv


def check_forward(x, bias=None, scale=3.0, start=0.0):
    device = x[0].device
    amax, expected_amax = scalar(start, device), scalar(start, device)
    hidden, act = dense_gemm_swiglu(*x, scalar(scale, device), bias=bias, amax=amax)
    expected = dense_gemm(*x, bias=bias)
    assert_same_bits(hidden, expected)
    y = swiglu.swiglu_fwd_fp8(
        expected, None, scalar(scale, device), E4M3, columnwise=False, amax=expected_amax
    )
    assert_same_bits(bytes_of(act.rowwise), bytes_of(y.rowwise))
    assert_same_bits(amax, expected_amax)
    assert_same_bits(act.scale_inv, y.scale_inv)
    measured = scalar(start, device)
    plain = dense_gemm_swiglu(*x, None, bias=bias, amax=measured)
    assert_same_bits(plain.hidden, expected)
    assert_same_bits(measured, expected_amax)
    assert plain.act is None
    return hidden, act


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_equals_product_and_swiglu(device, poison, shape):
    x = forward_operands(*shape, device)
    check_forward(x)
    check_forward(x, bias=torch.randn(2 * shape[1], device=device).bfloat16() * 3, start=0.5)


@pytest.mark.parametrize(
    "shape", [*SHAPES, (5, 128, 32), (129, 256, 144), (300, 640, 272)], ids=str
)
def test_forward_with_held_hidden(device, poison, shape):
    """With scales from 2^-126 to 2^126, and blocks of NaN, infinity and zeros."""
    m, f, k = shape
    x = forward_operands(m, f, k, device)
    weights = torch.zeros(2 * f, device=device)
    weights[f // 3], weights[f // 2], weights[-1] = float("nan"), float("inf"), -1e38
    biases = [None, torch.randn(2 * f, device=device), weights]
    factors = 1.0, 2.0**-149, 2.0**-133, 2.0**120
    for bias, factor in [(bias, 1.0) for bias in biases] + [(None, factor) for factor in factors]:
        operands = (*x[:3], x[3] * factor)
        scale, amaxes = scalar(3.0, device), [scalar(0.5, device) for _ in range(2)]
        hidden, scale_inv, act = dense_gemm_swiglu_held(*operands, scale, bias=bias, amax=amaxes[0])
        expected = dense_gemm_swiglu(*operands, scale, bias=bias, amax=amaxes[1])
        held = block_quantize(expected.hidden, E4M3, columnwise=False)
        assert_same_bits(bytes_of(hidden), bytes_of(held.rowwise))
        assert_same_bits(scale_inv, held.rowwise_scale_inv)
        assert_same_bits(bytes_of(act.rowwise), bytes_of(expected.act.rowwise))
        assert_same_bits(act.scale_inv, expected.act.scale_inv)
        assert_same_bits(*amaxes)


def test_forward_against_float64(device):
    torch.manual_seed(0)
    x, weight = normal(64, 48, E4M3, device), normal(96, 48, E4M3, device)
    one = scalar(1.0, device)
    _, act = dense_gemm_swiglu(x, weight, one, one, one)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    error = act.rowwise.double() - expected.clamp(-448, 448)
    assert error.norm() <= 0.04 * expected.norm()


def test_forward_amax_of_nan_and_infinity(device):
    x = forward_operands(40, 48, 64, device)
    x[0].view(torch.uint8)[33, 5] = 0x7F
    _, act = check_forward(x, start=7.0)
    assert act.rowwise[33].isnan().all()
    assert not act.rowwise[:33].isnan().any()
    x = forward_operands(40, 48, 64, device)
    check_forward((*x[:2], scalar(float("inf"), device), x[3]))
    check_forward((*x[:2], scalar(float("nan"), device), x[3]))


def backward_operands(m, f, k, fp8, device):
    torch.manual_seed(1)
    inv = scalar(1 / 8, device), scalar(1 / k**0.5, device)
    hidden = (torch.randn(m, 2 * f, device=device) * 2).bfloat16()
    return normal(m, k, fp8, device, 8), normal(f, k, E4M3, device), *inv, hidden


def check_backward(x, fp8, *, act=True, columnwise=True, held=False, start=0.0, scale=5.0):
    device, hidden, hidden_scale_inv = x[0].device, x[4], None
    if held:
        codes, hidden_scale_inv = block_quantize(hidden, E4M3, columnwise=False)[:2]
        x = *x[:4], codes
        hidden = block_dequantize(codes, hidden_scale_inv)
    amax, expected_amax = scalar(start, device), scalar(start, device)
    act_scale = scalar(2.5, device)
    grad, act_columns = dense_gemm_swiglu_bwd(
        *x, scalar(scale, device), fp8, hidden_scale_inv=hidden_scale_inv, columnwise=columnwise,
        amax=amax, act_scale=act_scale if act else None,
    )  # fmt: skip
    product = dense_gemm(*x[:4], use_split_accumulator=True)
    expected = swiglu.swiglu_bwd_fp8(
        product, hidden, None, scalar(scale, device), fp8, pad_columnwise=True,
        amax=expected_amax,
    ).output  # fmt: skip
    assert_same_bits(bytes_of(grad.rowwise), bytes_of(expected.rowwise))
    assert_same_bits(amax, expected_amax)
    assert_same_bits(grad.scale_inv, expected.scale_inv)
    assert (grad.columnwise is not None) == columnwise
    assert (act_columns is not None) == act
    if columnwise:
        assert_same_bits(bytes_of(grad.columnwise), bytes_of(expected.columnwise))
    measured, plain_grad = scalar(start, device), torch.empty_like(product)
    plain = dense_gemm_swiglu_bwd(
        *x, None, fp8, hidden_scale_inv=hidden_scale_inv, columnwise=columnwise, amax=measured,
        act_scale=act_scale if act else None, grad=plain_grad,
    )  # fmt: skip
    assert plain.output is None
    assert (plain.act_columnwise is not None) == act
    assert_same_bits(plain_grad, product)
    assert_same_bits(measured, expected_amax)
    if act:
        y = swiglu.swiglu_fwd_fp8(hidden, None, act_scale, E4M3, rowwise=False, pad_columnwise=True)
        for columns in (act_columns, plain.act_columnwise):
            assert_same_bits(bytes_of(columns), bytes_of(y.columnwise))


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_equals_product_and_swiglu(device, poison, shape, fp8):
    x = backward_operands(*shape, fp8, device)
    check_backward(x, fp8)
    check_backward(x, fp8, act=False, start=1.5)
    check_backward(x, fp8, columnwise=False)
    check_backward(x, fp8, columnwise=False, act=False)


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_of_held_hidden(device, poison, shape, fp8):
    """With scales from 2^-126 to 2^120, and blocks of NaN, infinity and zeros."""
    x = backward_operands(*shape, fp8, device)
    hidden = x[4]
    exponents = torch.arange(shape[0], device=device) * 41 % 247 - 126
    scaled = hidden * (2.0**exponents)[:, None]
    for values in (hidden, scaled.bfloat16()):
        values[-1, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
        values[0, -1] = 0.0
        check_backward((*x[:4], values), fp8, held=True)
        check_backward((*x[:4], values), fp8, held=True, act=False, start=1.5)
        check_backward((*x[:4], values), fp8, held=True, columnwise=False)
        check_backward((*x[:4], values), fp8, held=True, columnwise=False, act=False)


def test_backward_of_nan_and_infinity(device):
    x = backward_operands(40, 48, 64, E5M2, device)
    x[0].view(torch.uint8)[33, 5] = 0x7F
    x[4][7, 3] = float("inf")
    check_backward(x, E5M2, start=7.0)
    check_backward(x, E5M2, scale=float("nan"))
    x = backward_operands(40, 48, 64, E5M2, device)
    check_backward((*x[:2], scalar(float("nan"), device), *x[3:]), E5M2)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations(device, activation):
    x = forward_operands(32, 48, 64, device)
    one = scalar(1.0, device)
    hidden, act = dense_gemm_swiglu(*x, one, activation=activation)
    y = swiglu.swiglu_fwd_fp8(hidden, None, one, E4M3, activation=activation)
    assert_same_bits(bytes_of(act.rowwise), bytes_of(y.rowwise))


def test_rejects():
    x = forward_operands(16, 24, 32, "cpu")
    one = scalar(1.0, "cpu")
    with pytest.raises(ValueError, match="rows of b must be a multiple of 32, got 48"):
        dense_gemm_swiglu(*x, one)
    with pytest.raises(ValueError, match=r"activation must be one of silu.* got 'tanh'"):
        dense_gemm_swiglu(*x, one, activation="tanh")
    x = backward_operands(16, 16, 32, E5M2, "cpu")
    with pytest.raises(ValueError, match=r"hidden must have shape \[16, 32\], got \[15, 32\]"):
        dense_gemm_swiglu_bwd(*x[:4], x[4][:15], one, E5M2)
    with pytest.raises(TypeError, match="fp8_dtype must be float8_e4m3fn or float8_e5m2"):
        dense_gemm_swiglu_bwd(*x, one, torch.float16)
    grad = torch.empty(16, 16).bfloat16()
    with pytest.raises(ValueError, match="grad must be given without a scale, got None"):
        dense_gemm_swiglu_bwd(*x, None, E5M2)
    with pytest.raises(ValueError, match="grad must be None with a scale, got a tensor"):
        dense_gemm_swiglu_bwd(*x, one, E5M2, grad=grad)
    with pytest.raises(TypeError, match=r"grad must have dtype torch\.bfloat16"):
        dense_gemm_swiglu_bwd(*x, None, E5M2, grad=grad.float())
    with pytest.raises(ValueError, match=r"grad must be contiguous with shape \[16, 16\], got \[8"):
        dense_gemm_swiglu_bwd(*x, None, E5M2, grad=grad[:8])


@needs_cuda
class TestKernels:
    """Tests of the kernels for sm_90 alone, which no other device runs."""

    @pytest.fixture(autouse=True)
    def _has_kernels(self):
        if not op.fuses(*forward_operands(16, 16, 16, "cuda")[:2]):
            pytest.skip("no kernels for this GPU")

    def test_large(self):
        check_forward(forward_operands(1111, 2608, 4112, "cuda"))
        for fp8 in (E4M3, E5M2):
            check_backward(backward_operands(1111, 2608, 4112, fp8, "cuda"), fp8)

    @pytest.mark.parametrize("cache", [0, 1, 6])
    def test_cache_and_strip_make_no_difference(self, cache):
        x = forward_operands(900, 1040, 2048, "cuda")
        one = scalar(1.0, "cuda")
        expected = dense_gemm_swiglu(*x, one)
        hidden, act = torch.zeros_like(expected.hidden), torch.zeros_like(expected.act.rowwise)
        for strip in (0, 1, 3):
            op._lib.dense_gemm_swiglu(*x, hidden, None, one, act, None, None, 5, strip, cache)
            assert_same_bits(hidden, expected.hidden)
            assert_same_bits(bytes_of(act), bytes_of(expected.act.rowwise))

    def test_bits_repeat(self):
        x = backward_operands(1000, 1552, 2064, E5M2, "cuda")
        one = scalar(1.0, "cuda")
        first = dense_gemm_swiglu_bwd(*x, one, E5M2, act_scale=one)
        for _ in range(20):
            again = dense_gemm_swiglu_bwd(*x, one, E5M2, act_scale=one)
            assert_same_bits(bytes_of(again.output.rowwise), bytes_of(first.output.rowwise))
            assert_same_bits(bytes_of(again.output.columnwise), bytes_of(first.output.columnwise))
            assert_same_bits(bytes_of(again.act_columnwise), bytes_of(first.act_columnwise))
