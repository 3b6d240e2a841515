"""Activations against formulas in float64, to the last digits, and in FP8 with padding."""

import pytest
import torch
from activation_cases import SHAPES, check_fp8
from checks import (
    DIMS,
    DTYPES,
    FP8,
    assert_adjacent_codes,
    assert_as_good_as_torch,
    assert_error_as_torch,
    assert_same_bits,
    codes,
    in_pairs,
    needs_cuda,
    needs_memory,
    one,
)
from torch.nn import functional as F

from apex_te.ops import activation as op
from apex_te.ops import bias_gelu, swiglu
from apex_te.ops.activation import (
    KINDS,
    activation,
    activation_bwd,
    activation_bwd_fp8,
    activation_fwd,
    activation_fwd_fp8,
)
from apex_te.ops.fp8_output import columnwise_length

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


FORMULAS = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
RANGES = {
    "normal": lambda n: torch.randn(n),
    "wide": lambda n: torch.randn(n) * 3,
    "negative tail": lambda n: torch.empty(n).uniform_(-10, -2),
    "far negative tail": lambda n: torch.empty(n).uniform_(-80, -10),
    "positive": lambda n: torch.empty(n).uniform_(2, 20),
}
COUNT = 1 << 17


def value_and_gradient(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def ulps(actual, exact):
    """Mean distance in float32 steps, over values that float32 has with all digits."""
    actual, exact = actual.double().cpu(), exact.cpu()
    kept = exact.abs() > 2.0**-100
    steps = torch.exp2(exact[kept].abs().log2().floor() - 23)
    return ((actual[kept] - exact[kept]).abs() / steps).mean()


@pytest.mark.parametrize("values", RANGES)
@pytest.mark.parametrize("kind", FORMULAS)
def test_error(device, kind, values):
    if values == "far negative tail" and kind in ("gelu", "gelu_erf"):
        pytest.skip("PyTorch's formulas are 0 there, in float64 too")
    x = RANGES[values](COUNT).to(device)
    exact = value_and_gradient(FORMULAS[kind], x.double())
    same = value_and_gradient(FORMULAS[kind], x)
    actual = value_and_gradient(lambda x: op.activation(x, kind), x)
    for found, *expected in zip(actual, exact, same, strict=True):
        assert_error_as_torch(found, *expected)


@pytest.mark.parametrize("values", RANGES)
def test_silu_is_right_to_the_last_digits(device, values):
    x = RANGES[values](COUNT).to(device)
    exact = value_and_gradient(F.silu, x.double())
    same = value_and_gradient(F.silu, x)
    actual = value_and_gradient(lambda x: op.activation(x, "silu"), x)
    for found, expected, plain in zip(actual, exact, same, strict=True):
        assert ulps(found, expected) <= 1.1 * ulps(plain, expected)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_erf", "sigmoid"])
def test_gated(device, name):
    function = {**FORMULAS, "sigmoid": torch.sigmoid}[name]

    def plain(x):
        gate, up = x.chunk(2, -1)
        return function(gate) * up

    for values in ("normal", "wide"):
        x = RANGES[values](COUNT).view(-1, 256).to(device)
        exact, same = value_and_gradient(plain, x.double()), value_and_gradient(plain, x)
        actual = value_and_gradient(lambda x: swiglu.swiglu(x, activation=name), x)
        for found, *expected in zip(actual, exact, same, strict=True):
            assert_error_as_torch(found, *expected)


def test_bias_gelu(device):
    x, bias = torch.randn(COUNT).view(-1, 256).to(device), torch.randn(256, device=device)
    exact = value_and_gradient(lambda x: FORMULAS["gelu"](x + bias.double()), x.double())
    same = value_and_gradient(lambda x: FORMULAS["gelu"](x + bias), x)
    actual = value_and_gradient(lambda x: bias_gelu.bias_gelu(x, bias), x)
    for found, *expected in zip(actual, exact, same, strict=True):
        assert_error_as_torch(found, *expected)


ROWS = [1, 15, 16, 17, 33, 255]


def results(rows, cols, dtype, device, form):
    """Runs of the FP8 ops by their names: each takes options and returns an FP8Output."""
    x, dy, up = ((2 * torch.randn(rows, cols)).to(dtype).to(device) for _ in range(3))
    both = torch.cat([x, up], 1)
    bias, two_biases = (torch.randn(n).to(dtype).to(device) for n in (cols, 2 * cols))
    kind, gate = form["kind"], form["gate"]
    scale = torch.full((1,), form.get("scale", 3.7), device=device)
    args = (scale, form["fp8"])
    gelu = {"form": "erf" if kind == "gelu_erf" else "tanh"}
    gated = {"activation": gate, "bias": two_biases}
    return {
        "activation_fwd": lambda **k: op.activation_fwd_fp8(x, kind, *args, **k),
        "activation_bwd": lambda **k: op.activation_bwd_fp8(dy, x, kind, *args, **k),
        "bias_gelu_fwd": lambda **k: bias_gelu.bias_gelu_fwd_fp8(x, bias, *args, **gelu, **k),
        "bias_gelu_bwd": lambda **k: (
            bias_gelu.bias_gelu_bwd_fp8(dy, x, bias, *args, **gelu, with_dbias=True, **k).output
        ),
        "swiglu_fwd": lambda **k: swiglu.swiglu_fwd_fp8(both, None, *args, **gated, **k),
        "swiglu_bwd": lambda **k: (
            swiglu.swiglu_bwd_fp8(dy, both, None, *args, with_dbias=True, **gated, **k).output
        ),
    }


OPS = list(results(1, 8, torch.float32, "cpu", {"kind": "gelu", "gate": "silu", "fp8": FP8[0]}))


def check(run, rows):
    """Compares a padded copy with the one that is not padded; returns the padded output."""
    plain, padded = run(), run(pad_columnwise=True)
    length = columnwise_length(rows, True)
    assert plain.columnwise.shape[1] == rows
    assert padded.columnwise.shape == (plain.columnwise.shape[0], length)
    assert padded.columnwise.is_contiguous()
    assert torch.equal(codes(padded.columnwise)[:, :rows], codes(plain.columnwise))
    assert not codes(padded.columnwise)[:, rows:].any()
    assert_same_bits(padded.rowwise, plain.rowwise)
    assert torch.equal(codes(padded.rowwise).t(), codes(plain.columnwise))
    alone = run(pad_columnwise=True, rowwise=False)
    assert alone.rowwise is None
    assert_same_bits(alone.columnwise, padded.columnwise)
    return padded


@in_pairs(name=OPS, rows=ROWS, cols=[1, 37, 128, 520, 1040])
def test_data_then_zeros(device, poison, name, rows, cols):
    for index, dtype in enumerate(DTYPES):
        form = {"kind": "gelu", "gate": "silu", "fp8": FP8[index % 2]}
        check(results(rows, cols, dtype, device, form)[name], rows)


@pytest.mark.parametrize("kind", op.KINDS)
def test_every_activation(device, poison, kind):
    gates = list(swiglu.ACTIVATIONS)
    gate = gates[op.KINDS.index(kind) % len(gates)]
    for name, run in results(
        65, 264, torch.bfloat16, device, {"kind": kind, "gate": gate, "fp8": FP8[0]}
    ).items():
        if not name.startswith("bias_gelu") or kind.startswith("gelu"):
            check(run, 65)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_whatever_the_scale(device, poison, dtype, scale):
    form = {"kind": "gelu", "gate": "silu", "fp8": FP8[0], "scale": scale}
    for run in results(19, 136, dtype, device, form).values():
        check(run, 19)


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_aligned_output(device, poison, dtype):
    """A padded copy that 16-byte stores do not fit is written by element."""
    rows, cols = 21, 136
    form = {"kind": "silu", "gate": "silu", "fp8": FP8[0]}
    memory = torch.empty(cols * 32 + 1, dtype=torch.uint8, device=device)
    given = memory[1:].view(FP8[0]).view(cols, 32)
    for name in ("activation_fwd", "activation_bwd"):
        run = results(rows, cols, dtype, device, form)[name]
        padded = run(pad_columnwise=True)
        given.view(torch.uint8).fill_(0x7F)
        out = run(out=padded._replace(columnwise=given))
        assert out.columnwise.data_ptr() == given.data_ptr()
        assert not codes(given)[:, rows:].any()
        assert torch.equal(codes(given)[:, :rows], codes(padded.rowwise).t())


@pytest.mark.parametrize("length", [17, 24, 48])
def test_other_lengths_are_refused(length):
    x, scale = torch.randn(21, 8), torch.ones(1)
    out = op.activation_fwd_fp8(x, "silu", scale, FP8[0], pad_columnwise=True)
    wrong = torch.empty(8, length, dtype=FP8[0])
    with pytest.raises(ValueError, match=r"columnwise must have shape \[8, 21\], got \[8, "):
        op.activation_fwd_fp8(x, "silu", scale, FP8[0], out=out._replace(columnwise=wrong))


def test_no_rows(device):
    form = {"kind": "gelu", "gate": "silu", "fp8": FP8[0]}
    for run in results(0, 8, torch.bfloat16, device, form).values():
        assert run(pad_columnwise=True).columnwise.shape[1] == 0
