"""Gated activations of inputs in E4M3, against the same ops of the values in bfloat16."""

import pytest
import torch

from apex_te.ops import swiglu, swiglu_block
from apex_te.ops.block_quantize import block_dequantize, block_quantize
from tests.checks import assert_same_bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Rows, outputs of the activation: multiples of 128, of 8, and others.
SHAPES = [
    (130, 128), (1, 8), (1, 1), (0, 128), (7, 24), (33, 75), (64, 72), (261, 384), (300, 200),
]  # fmt: skip
ACTIVATIONS = ["silu", "gelu", "relu", swiglu.ClampedSwiglu(limit=1.0)]


def held(rows, cols, device):
    """Codes, scales, values and an output gradient, with scales from 2^-126 to 2^120."""
    torch.manual_seed(rows + cols)
    exponents = torch.arange(rows, device=device) * 41 % 247 - 126
    x = torch.randn(rows, 2 * cols, device=device)
    x = (x * (2.0**exponents)[:, None]).bfloat16()
    x[rows // 2 :] = torch.randn(x[rows // 2 :].shape, device=device).bfloat16()
    if rows > 4:
        x[2, 0], x[3, -1], x[4] = float("nan"), float("inf"), 0.0
    codes, scale_inv = block_quantize(x, E4M3, columnwise=False)[:2]
    dy = torch.randn(rows, cols, device=device).bfloat16()
    return codes, scale_inv, block_dequantize(codes, scale_inv), dy


def bytes_of(x):
    return x.view(torch.uint8)


def check(found, expected):
    """Compares the tensors of two results bitwise."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same_bits(bytes_of(a), bytes_of(b))


def check_overwritten(codes, rowwise, expected):
    """Checks whether a rowwise copy, if there is one, has the memory of the input."""
    if rowwise is not None and codes.numel():
        assert (rowwise.data_ptr() == codes.data_ptr()) == expected


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_scale(device, poison, shape, activation, fp8):
    codes, scale_inv, values, dy = held(*shape, device)
    scale = torch.full((1,), 3.0, device=device)
    for rowwise, columnwise in ((True, True), (True, False), (False, True), (False, False)):
        copies = {"rowwise": rowwise, "columnwise": columnwise, "pad_columnwise": True}
        amaxes = [torch.full((1,), 0.5, device=device) for _ in range(4)]
        options = {**copies, "activation": activation}
        y = swiglu.swiglu_fwd_fp8(
            codes, None, scale, fp8, input_scale_inv=scale_inv, amax=amaxes[0], **options
        )
        check(y, swiglu.swiglu_fwd_fp8(values, None, scale, fp8, amax=amaxes[1], **options))
        options["with_dbias"] = rowwise
        grads = swiglu.swiglu_bwd_fp8(
            dy, codes, None, scale, fp8, input_scale_inv=scale_inv, amax=amaxes[2], **options
        )
        expected = swiglu.swiglu_bwd_fp8(dy, values, None, scale, fp8, amax=amaxes[3], **options)
        check((*grads.output, grads.dbias), (*expected.output, expected.dbias))
        check(amaxes[::2], amaxes[1::2])
        del options["with_dbias"]
        lost = codes.clone()
        grads = swiglu.swiglu_bwd_fp8(
            dy, lost, None, scale, fp8, input_scale_inv=scale_inv, overwrite_input=True, **options
        )
        check(grads.output, expected.output)
        check_overwritten(lost, grads.output.rowwise, shape[1] % 8 == 0)


@pytest.mark.parametrize("scales", ["pow2", "fp32", "server"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks(device, poison, shape, activation, scales):
    codes, scale_inv, values, dy = held(*shape, device)
    options = {"activation": activation, "scales": scales, "pad_columnwise": True}
    given = {"input_scale_inv": scale_inv, **options}
    for rowwise, columnwise in ((True, True), (True, False), (False, True)):
        copies = {"rowwise": rowwise, "columnwise": columnwise}
        for rows in (1, 128):
            blocks = {"columnwise_block_rows": rows, **copies}
            check(
                swiglu_block.swiglu_fwd_block(codes, None, E4M3, **given, **blocks),
                swiglu_block.swiglu_fwd_block(values, None, E4M3, **options, **blocks),
            )
        check(
            swiglu_block.swiglu_bwd_block(dy, codes, None, E5M2, **given, **copies),
            expected := swiglu_block.swiglu_bwd_block(dy, values, None, E5M2, **options, **copies),
        )
        lost = codes.clone()
        grads = swiglu_block.swiglu_bwd_block(
            dy, lost, None, E5M2, overwrite_input=True, **given, **copies
        )
        check(grads, expected)
        check_overwritten(lost, grads.rowwise, shape[1] % 128 == 0 and scales != "server")


def test_refused():
    codes, scale_inv, values, dy = held(4, 16, "cpu")
    one = torch.ones(1)
    with pytest.raises(ValueError, match="up must be None with input_scale_inv, got a tensor"):
        swiglu.swiglu_fwd_fp8(codes, codes, one, E4M3, input_scale_inv=scale_inv)
    with pytest.raises(ValueError, match="bias must be None with input_scale_inv, got a tensor"):
        swiglu.swiglu_bwd_fp8(dy, codes, None, one, E4M3, input_scale_inv=scale_inv, bias=one)
    with pytest.raises(TypeError, match=r"input must be torch\.float8_e4m3fn"):
        swiglu_block.swiglu_fwd_block(values, None, E4M3, input_scale_inv=scale_inv)
    with pytest.raises(ValueError, match="input_scale_inv must"):
        swiglu.swiglu_fwd_fp8(codes, None, one, E4M3, input_scale_inv=scale_inv[:, :1])
    with pytest.raises(TypeError, match="grad_output must"):
        swiglu.swiglu_bwd_fp8(dy.float(), codes, None, one, E4M3, input_scale_inv=scale_inv)
