"""swiglu straight to FP8: code by code against the formula in float64."""

import pytest
import torch
from checks import (
    DTYPES,
    FP8,
    assert_adjacent_codes,
    assert_as_good_as_torch,
    assert_close_amax,
    assert_same_bits,
    codes,
    in_pairs,
    needs_cuda,
)
from swiglu_cases import ACTIVATIONS, SHAPES, formula, make, to

from apex_te.ops import swiglu as op


def check_fp8(device, shape, dtype, fp8, activation, **form):
    inputs, grad_output = make(shape, dtype, spread=1, **form)
    dbias, same = (formula(inputs, grad_output, t, activation)[2] for t in (torch.float64, dtype))
    exact = [t if t is None else t.double() for t in inputs]
    out = op.reference(*exact, activation=activation)
    grad = op.reference_bwd(grad_output.double(), *exact, activation=activation)
    on_device, scale = to(device, inputs), torch.tensor([3.7])
    bias = {"bias": on_device[2], "up_bias": on_device[3], "activation": activation}

    def compare(made, values, amax):
        found = torch.zeros(1)
        expected = op.reference_fp8(values, scale, fp8, amax=found)
        assert_adjacent_codes(made.rowwise, expected.rowwise)
        assert torch.equal(codes(made.columnwise), codes(made.rowwise).t())
        assert made.scale_inv.item() == (1 / scale).item()
        assert_close_amax(amax, found)

    amax = torch.zeros(1, device=device)
    fwd = op.swiglu_fwd_fp8(*on_device[:2], scale.to(device), fp8, amax=amax, **bias)
    compare(fwd, out, amax)
    amax.zero_()
    bwd = op.swiglu_bwd_fp8(
        grad_output.to(device), *on_device[:2], scale.to(device), fp8, amax=amax, with_dbias=True,
        **bias,
    )  # fmt: skip
    compare(bwd.output, grad, amax)
    assert_as_good_as_torch(bwd.dbias, dbias, same)
    alone = op.swiglu_bwd_fp8(
        grad_output.to(device), *on_device[:2], scale.to(device), fp8, columnwise=False, **bias
    )
    assert alone.dbias is None
    assert alone.output.columnwise is None
    assert_same_bits(alone.output.rowwise, bwd.output.rowwise)
    alone = op.swiglu_fwd_fp8(*on_device[:2], scale.to(device), fp8, rowwise=False, **bias)
    assert alone.rowwise is None
    assert_same_bits(alone.columnwise, fwd.columnwise)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1072, 528)], ids=str)
def test_fp8(device, poison, shape, dtype):
    check_fp8(device, shape, dtype, FP8[0], "silu")


@pytest.mark.cover(1)
@in_pairs(activation=ACTIVATIONS, dtype=DTYPES, fp8=FP8)
def test_fp8_every_activation_with_bias(device, poison, fp8, dtype, activation):
    two = activation in ("silu", "relu")
    check_fp8(device, (1037, 528), dtype, fp8, activation, two=two, bias=True)


@pytest.mark.parametrize("position", [(0, 0), (63, 127), (64, 128), (127, 255), (200, 303)])
@pytest.mark.parametrize("value", [1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_amax_finds_planted_value(device, position, value, dtype):
    gate, up = torch.randn(201, 304).to(dtype), torch.randn(201, 304).to(dtype)
    gate[position] = up[position] = 1.0
    up[position] = value
    grad_output = torch.ones_like(up)
    gate, up, grad_output = to(device, (gate, up, grad_output))
    one = torch.ones(1, device=device)
    for transposed in (False, True):
        amax = torch.full((1,), 2.0, device=device)
        op.swiglu_fwd_fp8(gate, up, one, FP8[0], columnwise=transposed, amax=amax)
        largest = op.swiglu_fwd(gate.float(), up.float())[position].abs().item()
        grad_amax = torch.full((1,), 2.0, device=device)
        op.swiglu_bwd_fp8(grad_output, gate, up, one, FP8[0], columnwise=transposed, amax=grad_amax)
        if value != value:
            assert torch.isnan(amax).all()
            assert torch.isnan(grad_amax).all()
        else:
            assert_close_amax(amax, torch.tensor([largest]))
            dgate = op.swiglu_bwd(grad_output.float(), gate.float(), up.float()).input[position]
            assert_close_amax(grad_amax, dgate.abs())


def test_repeatable_and_alike_on_devices(device):
    inputs, grad_output = make((1000, 264), torch.bfloat16, bias=True)
    on_device, grad = to(device, inputs), grad_output.to(device)

    def run(grad, inputs):
        scale = torch.ones(1, device=grad.device)
        x, _, bias, _ = inputs
        made = op.swiglu_bwd_fp8(grad, x, None, scale, FP8[1], bias=bias, with_dbias=True)
        plain = op.swiglu_bwd(grad, x, None, bias, with_dbias=True)
        return made.output.rowwise, made.output.columnwise, made.dbias, plain.input, plain.dbias

    first = run(grad, on_device)
    assert_same_bits(run(grad, on_device), first)
    on_cpu = run(grad_output, inputs)
    assert_adjacent_codes(first[0], on_cpu[0])
    torch.testing.assert_close(first[2].cpu(), on_cpu[2])


@needs_cuda
def test_more_row_tiles_than_a_grid_has_rows():
    rows, cols = 64 * 65535 + 80, 8
    x = torch.randn(rows, 2 * cols, device="cuda").bfloat16()
    grad_output = torch.randn(rows, cols, device="cuda").bfloat16()
    one = torch.ones(1, device="cuda")
    fwd = op.swiglu_fwd_fp8(x, None, one, FP8[0])
    bwd = op.swiglu_bwd_fp8(grad_output, x, None, one, FP8[1], with_dbias=True)
    for begin in (0, rows - 160):
        part = slice(begin, begin + 160)
        expected = op.swiglu_fwd_fp8(x[part], None, one, FP8[0])
        expected_bwd = op.swiglu_bwd_fp8(grad_output[part], x[part], None, one, FP8[1])
        for made, wanted in ((fwd, expected), (bwd.output, expected_bwd.output)):
            assert_same_bits(made.rowwise[part], wanted.rowwise)
            assert_same_bits(made.columnwise[:, part].contiguous(), wanted.columnwise)
    dbias = op.swiglu_bwd(grad_output.float(), x.float(), with_dbias=True).dbias
    torch.testing.assert_close(bwd.dbias.float(), dbias, rtol=0.01, atol=1.0)


GOOD = {"input": torch.zeros(2, 8), "up": None, "scale": torch.ones(1), "fp8_dtype": FP8[0]}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"input": torch.zeros(2, 8, dtype=torch.float64)}, TypeError,
            "input must have dtype float32, float16 or bfloat16, got float64",
        ),
        (
            {"input": torch.zeros(2, 7)}, ValueError,
            "input must have an even number of columns without up, got [2, 7]",
        ),
        ({"input": torch.zeros(())}, ValueError, "input must have at least 1 dimension"),
        (
            {"up": torch.zeros(2, 4)}, ValueError,
            "up must have the shape of input, [2, 8], got [2, 4]",
        ),
        ({"up": torch.zeros(2, 8).half()}, TypeError, "up must have dtype float32, got float16"),
        ({"bias": torch.zeros(4)}, ValueError, "bias must have shape [8], got [4]"),
        ({"bias": torch.zeros(8).half()}, TypeError, "bias must have dtype float32, got float16"),
        (
            {"bias": torch.zeros(4), "up_bias": torch.zeros(3)}, ValueError,
            "up_bias must have shape [4], got [3]",
        ),
        ({"up_bias": torch.zeros(4)}, ValueError, "bias must be given with up_bias, got None"),
        ({"scale": torch.zeros(2)}, ValueError, "scale must have one element, got [2]"),
        ({"scale": torch.zeros(1).double()}, TypeError, "scale must have dtype float32"),
        ({"fp8_dtype": torch.uint8}, TypeError, "fp8_dtype must be float8_e4m3fn or float8_e5m2"),
        ({"amax": torch.zeros(3)}, ValueError, "amax must have one element, got [3]"),
        (
            {"activation": "tanh"}, ValueError,
            "activation must be one of silu, gelu, gelu_erf, relu, sigmoid, got 'tanh'",
        ),
    ],
)  # fmt: skip
def test_rejects(change, error, message):
    with pytest.raises(error) as raised:
        op.swiglu_fwd_fp8(**{**GOOD, **change})
    assert f"swiglu_fwd_fp8: {message}" in str(raised.value)
