"""Padded columnwise copies of the activations' FP8 results: data, then zeros up to 16 rows."""

import pytest
import torch
from checks import DTYPES, FP8, assert_same_bits, codes, in_pairs

from apex_te.ops import activation, bias_gelu, swiglu
from apex_te.ops.fp8_output import columnwise_length

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
        "activation_fwd": lambda **k: activation.activation_fwd_fp8(x, kind, *args, **k),
        "activation_bwd": lambda **k: activation.activation_bwd_fp8(dy, x, kind, *args, **k),
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


@pytest.mark.parametrize("kind", activation.KINDS)
def test_every_activation(device, poison, kind):
    gates = list(swiglu.ACTIVATIONS)
    gate = gates[activation.KINDS.index(kind) % len(gates)]
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
    out = activation.activation_fwd_fp8(x, "silu", scale, FP8[0], pad_columnwise=True)
    wrong = torch.empty(8, length, dtype=FP8[0])
    with pytest.raises(ValueError, match=r"columnwise must have shape \[8, 21\], got \[8, "):
        activation.activation_fwd_fp8(x, "silu", scale, FP8[0], out=out._replace(columnwise=wrong))


def test_no_rows(device):
    form = {"kind": "gelu", "gate": "silu", "fp8": FP8[0]}
    for run in results(0, 8, torch.bfloat16, device, form).values():
        assert run(pad_columnwise=True).columnwise.shape[1] == 0
