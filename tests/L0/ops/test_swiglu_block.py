"""swiglu_block: bits of swiglu followed by block_quantize, on each device."""

import itertools

import pytest
import torch
from checks import FP8, assert_same_bits

from apex_te.ops import swiglu
from apex_te.ops.block_quantize import block_quantize, scale_shape
from apex_te.ops.swiglu_block import swiglu_bwd_block, swiglu_fwd_block

E4M3, E5M2 = FP8
NARROW = (torch.bfloat16, torch.float16)
# Whole tiles; a short last tile of rows, of columns; rows and columns that no vector fits.
SHAPES = [(256, 256), (130, 384), (128, 200), (77, 131), (3, 128), (1, 1), (0, 128), (4, 0)]


def assert_equal_casts(made, expected):
    for name, value in expected._asdict().items():
        got = getattr(made, name)
        assert (got is None) == (value is None), name
        if value is not None:
            assert got.shape == value.shape, name
            assert_same_bits(got, value)


def check(device, gate, up, bias, up_bias, grad, fp8, activation, **options):
    """Compares both directions; gate and up side by side where up is None."""
    inputs = [t if t is None else t.to(device) for t in (gate, up, bias, up_bias)]
    grad = grad.to(device)
    biases = {"bias": inputs[2], "up_bias": inputs[3], "activation": activation}
    amaxes = [torch.zeros(1, device=device) for _ in range(4)]
    values = swiglu.swiglu_fwd(*inputs, activation=activation)
    made = swiglu_fwd_block(*inputs[:2], fp8, **biases, amax=amaxes[0], **options)
    assert_equal_casts(made, block_quantize(values, fp8, amax=amaxes[1], **options))
    assert_same_bits(amaxes[0], amaxes[1])
    grads = swiglu.swiglu_bwd(grad, *inputs, activation=activation)
    values = grads.input if grads.up is None else torch.cat([grads.input, grads.up], 1)
    made = swiglu_bwd_block(grad, *inputs[:2], fp8, **biases, amax=amaxes[2], **options)
    assert_equal_casts(made, block_quantize(values, fp8, amax=amaxes[3], **options))
    assert_same_bits(amaxes[2], amaxes[3])
    return made


def matrix(rows, cols, dtype, spread=3):
    """Values whose blocks differ widely in their amax."""
    return (torch.randn(rows, cols) * torch.exp(spread * torch.randn(rows, 1))).to(dtype)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits(device, poison, shape, dtype):
    rows, cols = shape
    joined, grad = matrix(rows, 2 * cols, dtype), matrix(rows, cols, dtype)
    for fp8, pow2, padded in itertools.product(FP8, (True, False), (True, False)):
        options = {"pow2": pow2, "pad_columnwise": padded, "eps": 0.0 if pow2 else 1e-3}
        check(device, joined, None, None, None, grad, fp8, "silu", **options)


@pytest.mark.parametrize("activation", swiglu.ACTIVATIONS)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_activations_and_biases(device, poison, dtype, activation):
    """Rows past the last are zeros although a bias makes something of zeros."""
    rows, cols = 141, 256
    gate, up, grad = (matrix(rows, cols, dtype) for _ in range(3))
    bias, up_bias = matrix(1, cols, dtype)[0], matrix(1, cols, dtype)[0]
    made = check(device, gate, up, bias, up_bias, grad, E5M2, activation, pad_columnwise=True)
    padding = made.columnwise.view(torch.uint8)[:, rows:]
    assert padding.shape[1] == 3
    assert not padding.any()
    stored = made.rowwise.untyped_storage()
    behind = torch.tensor([], dtype=torch.uint8, device=device).set_(stored)[rows * 2 * cols :]
    assert behind.numel() == 3 * 2 * cols
    assert not behind.any()
    joined = torch.cat([gate, up], 1)
    both = torch.cat([bias, up_bias])
    check(device, joined, None, both, None, grad, E4M3, activation)


@pytest.mark.parametrize("copies", [(True, False), (False, True)], ids=str)
def test_one_copy(device, poison, copies):
    joined, grad = matrix(136, 512, torch.bfloat16), matrix(136, 256, torch.bfloat16)
    options = {"rowwise": copies[0], "columnwise": copies[1]}
    check(device, joined, None, None, None, grad, E4M3, "silu", **options)


def test_views_at_any_alignment(device, poison):
    """Rows with gaps, and pointers and distances that no vector access fits."""
    for offset, gap in ((8, 16), (1, 3), (0, 1)):
        base = matrix(140, 2 * 256 + gap + offset, torch.bfloat16).to(device)
        gate, up = base[:, offset : offset + 256], base[:, offset + 256 : offset + 512]
        grad = matrix(140, 256, torch.bfloat16)
        bias = matrix(1, 513, torch.bfloat16)[0].to(device)
        check(device, gate, up, bias[1:257], bias[257:], grad, E4M3, "gelu")


def test_nonfinite_values(device):
    joined, grad = matrix(128, 512, torch.bfloat16), matrix(128, 256, torch.bfloat16)
    joined[3, 5], joined[40, 300], joined[77, 256 + 130] = torch.nan, torch.inf, -torch.inf
    grad[100, 7] = torch.inf
    check(device, joined, None, None, None, grad, E4M3, "relu", pow2=False)
    check(device, joined, None, None, None, grad, E5M2, "silu")


def test_more_dimensions(device):
    joined = matrix(12, 512, torch.bfloat16).view(3, 4, 512).to(device)
    made = swiglu_fwd_block(joined, None, E4M3)
    assert made.rowwise.shape == (12, 256)
    assert made.rowwise_scale_inv.shape == scale_shape(12, 256, 1)
    assert_equal_casts(made, block_quantize(swiglu.swiglu_fwd(joined).view(12, 256), E4M3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["swiglu_fwd_block", "swiglu_bwd_block"])
def test_refusals_name_the_op(device, name, dtype):
    """Errors name the op that was called, also for float32, for which two other ops run."""
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    good = {"input": torch.zeros(4, 256, dtype=dtype, device=device), "up": None}
    op = swiglu_fwd_block
    if name == "swiglu_bwd_block":
        op, good["grad_output"] = swiglu_bwd_block, good["input"][:, :128]
    op(**good, fp8_dtype=E4M3)
    wrong = {
        "bias": (TypeError, torch.zeros(256, dtype=other, device=device)),
        "amax": (TypeError, torch.zeros(1, dtype=torch.float64, device=device)),
        "eps": (ValueError, -1.0),
        "input": (TypeError, good["input"].double()),
    }
    for argument, (kind, value) in wrong.items():
        with pytest.raises(kind, match=f"^{name}: {argument} must "):
            op(**{**good, argument: value}, fp8_dtype=E4M3)
    with pytest.raises(ValueError, match=f"^{name}: rowwise, columnwise or amax must be asked for"):
        op(**good, fp8_dtype=E4M3, rowwise=False, columnwise=False)
    with pytest.raises(TypeError, match=f"{name}: bias must be a torch.Tensor, got int"):
        op(**good, fp8_dtype=E4M3, bias=1)
