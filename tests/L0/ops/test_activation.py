"""activation against PyTorch's formulas in float64, on each device."""

import pytest
import torch
from activation_cases import SHAPES, check_fp8
from checks import (
    DIMS,
    DTYPES,
    FP8,
    assert_adjacent_codes,
    assert_as_good_as_torch,
    assert_same_bits,
    in_pairs,
    needs_cuda,
    needs_memory,
    one,
)

from apex_te.ops import activation as op
from apex_te.ops.activation import (
    KINDS,
    activation,
    activation_bwd,
    activation_bwd_fp8,
    activation_fwd,
    activation_fwd_fp8,
)

INFINITE = [-torch.inf, torch.inf]


def gradient(x, kind, grad):
    """Value and gradient of the reference in x's dtype."""
    x = x.detach().requires_grad_()
    y = op.reference(x, kind)
    (dx,) = torch.autograd.grad(y, x, grad)
    return y.detach(), dx


def assert_forward_and_gradient(x, kind, grad):
    """The op on x's device against both precisions of the reference.

    The bound is that of x and 2048 more values, which the op is not given: PyTorch's largest error
    in a few elements may be none.
    """
    leaf = x.detach().requires_grad_()
    y = activation(leaf, kind)
    y.backward(grad)
    more = [torch.randn(2048, device=x.device).to(x.dtype) for _ in range(2)]
    x, grad = torch.cat([x.reshape(-1), 3 * more[0]]), torch.cat([grad.reshape(-1), more[1]])
    exact = gradient(x.double(), kind, grad.double())
    same_dtype = gradient(x, kind, grad)
    for actual, wanted, plain in zip((y, leaf.grad), exact, same_dtype, strict=True):
        padded = torch.cat([actual.detach().reshape(-1), plain[-2048:]])
        assert_as_good_as_torch(padded, wanted, plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fwd_bwd(device, poison, dtype, kind):
    for shape in SHAPES:
        x = (torch.randn(shape) * 3).to(dtype).to(device)
        assert_forward_and_gradient(x, kind, torch.randn(shape).to(dtype).to(device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fwd_bwd_sizes(device, poison, dtype):
    for size in DIMS:
        x = torch.randn(size, device=device).to(dtype)
        assert_forward_and_gradient(x, "gelu", torch.randn_like(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fwd_bwd_all_16_bit_values(device, dtype, kind):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    if kind == "relu":  # PyTorch's gradient is 1 at NaN; see test_nan_stays
        x = x[~torch.isnan(x)]
    y, dx = activation_fwd(x, kind), activation_bwd(torch.ones_like(x), x, kind)
    exact = gradient(x.double(), kind, torch.ones_like(x, dtype=torch.float64))
    same_dtype = gradient(x, kind, torch.ones_like(x))
    assert_as_good_as_torch(y, exact[0], same_dtype[0])
    assert_as_good_as_torch(dx, exact[1], same_dtype[1])


@pytest.mark.parametrize("kind", KINDS)
def test_float32_range(device, kind):
    """Every exponent: nothing finite turns NaN; the negative tail keeps its digits."""
    x = torch.exp2(torch.arange(-149, 128, dtype=torch.float64)).float()
    x = torch.cat([x, -x, torch.linspace(-6, 6, 1001)]).to(device)
    y, dx = activation_fwd(x, kind), activation_bwd(torch.ones_like(x), x, kind)
    exact_y, exact_dx = gradient(x.double(), kind, torch.ones_like(x, dtype=torch.float64))
    for actual, exact in ((y, exact_y), (dx, exact_dx)):
        actual, exact = actual.cpu().double(), exact.cpu()
        overflow = exact.abs() > torch.finfo(torch.float32).max
        assert torch.equal(torch.isinf(actual), overflow)
        error = (actual - exact)[~overflow].abs()
        assert (error <= 1e-6 * exact[~overflow].abs().clamp(min=1)).all()
    tail = (x < 0) & (x >= -6)
    error = (y.double() - exact_y)[tail].abs()
    assert (error <= 2e-5 * exact_y[tail].abs() + 1e-37).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_and_infinities(device, kind):
    x = torch.tensor([torch.nan, *INFINITE], device=device)
    y = activation_fwd(x, kind).cpu()
    dx = activation_bwd(torch.ones_like(x), x, kind).cpu()
    assert torch.isnan(y[0])
    assert torch.isnan(dx[0])
    assert y[2] == torch.inf
    if kind in ("relu", "squared_relu"):
        assert y[1] == 0
        assert dx[1] == 0
        assert dx[2] == (1 if kind == "relu" else torch.inf)
    else:
        assert torch.isnan(y[1])
        assert torch.isnan(dx[1:]).all()


@in_pairs(fp8=FP8, dtype=DTYPES, layout=["both", "rowwise", "columnwise"])
def test_fp8(device, poison, dtype, fp8, layout):
    wanted = {"rowwise": layout != "columnwise", "columnwise": layout != "rowwise"}
    scale = 7.3
    for index, shape in enumerate(SHAPES):
        kind = KINDS[index % len(KINDS)]
        x, grad = (torch.randn(shape) * 3).to(dtype), torch.randn(shape).to(dtype)
        x[0, 0], grad[0, 0] = 6, 9  # the largest result: not one in which digits cancel
        y, dx = gradient(x.double(), kind, grad.double())
        x, grad = x.to(device), grad.to(device)
        amax = one(0, device)
        out = activation_fwd_fp8(x, kind, one(scale, device), fp8, amax=amax, **wanted)
        assert [t is None for t in out[:2]] == [layout == "columnwise", layout == "rowwise"]
        check_fp8(out, amax, y, scale, fp8)
        amax = one(0, device)
        out = activation_bwd_fp8(grad, x, kind, one(scale, device), fp8, amax=amax, **wanted)
        check_fp8(out, amax, dx, scale, fp8)


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_rate_of_differing_codes(device, kind):
    x = (torch.randn(256, 1024) * 2).bfloat16()
    grad = torch.randn(256, 1024).bfloat16()
    y, dx = gradient(x.double(), kind, grad.double())
    for fp8 in FP8:
        scale = torch.finfo(fp8).max / 16
        amax = one(0, device)
        args = (kind, one(scale, device), fp8)
        out = activation_fwd_fp8(x.to(device), *args, amax=amax)
        check_fp8(out, amax, y, scale, fp8)
        amax = one(0, device)
        out = activation_bwd_fp8(grad.to(device), x.to(device), *args, amax=amax)
        check_fp8(out, amax, dx, scale, fp8)


@pytest.mark.parametrize("position", [(0, 0), (127, 127), (128, 0), (200, 256), (299, 319)])
@pytest.mark.parametrize("value", [1e6, torch.inf, torch.nan])
@pytest.mark.parametrize("rows", [300, 304])
def test_fp8_amax_finds_planted_value(device, position, value, rows):
    x = torch.randn(rows, 320, device=device).bfloat16()
    x[position] = value
    for layout in ({}, {"columnwise": False}, {"rowwise": False, "columnwise": False}):
        amax = one(2, device)
        activation_fwd_fp8(x, "silu", one(1, device), FP8[0], amax=amax, **layout)
        expected = x[position].float().item()
        assert torch.isnan(amax).all() if value != value else amax.item() == expected


def test_fp8_amax_accumulates(device):
    x = torch.randn(64, 48, device=device)
    amax = one(100, device)
    activation_fwd_fp8(x, "relu", one(1, device), FP8[0], amax=amax)
    assert amax.item() == 100


def test_scalar(device):
    x = torch.tensor(1.5, device=device)
    assert torch.allclose(activation_fwd(x, "silu"), op.reference(x, "silu"))


@needs_cuda
def test_more_than_2_to_31_elements():
    needs_memory(30)
    rows, cols = 65552, 32784  # 2.149e9 elements
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    y = activation_fwd(x, "gelu")
    amax = one(0, "cuda")
    out = activation_bwd_fp8(y, x, "gelu", one(2, "cuda"), FP8[0], amax=amax)
    largest = 0.0
    for begin in (0, rows // 2, rows - 16):
        part = slice(begin, begin + 16)
        exact_y, _ = gradient(x[part].double(), "gelu", y[part].double())
        assert_as_good_as_torch(y[part], exact_y, op.reference(x[part], "gelu"))
        _, exact_dx = gradient(x[part].double(), "gelu", y[part].double())
        expected, found = op.reference_fp8(exact_dx.cpu(), one(2), FP8[0])
        largest = max(largest, found.item())
        assert_adjacent_codes(out.rowwise[part], expected.rowwise)
        assert_adjacent_codes(out.columnwise[:, part].contiguous(), expected.columnwise)
    assert largest <= amax.item() < 1e3


@needs_cuda
def test_more_row_tiles_than_a_grid_has_rows():
    x, grad = (torch.randn(65536 * 128 + 208, 8, device="cuda").bfloat16() for _ in range(2))
    last, args = slice(65536 * 128, None), ("silu", one(2, "cuda"), FP8[0])
    for call, inputs in ((activation_fwd_fp8, (x,)), (activation_bwd_fp8, (grad, x))):
        out = call(*inputs, *args)
        of_last = call(*(t[last] for t in inputs), *args)
        assert_same_bits(out.rowwise[last], of_last.rowwise)
        assert_same_bits(out.columnwise.t(), out.rowwise)
