"""Programs cast two matrices in one call where neither waits for the other."""

import pytest
import torch
from schemes import SCHEMES

from apex_te import LayerNormMLP, Linear, fp8_autocast, runtime
from apex_te.module._core import programs as program
from apex_te.module._core.programs import with_paired_casts
from apex_te.module._core.recorder import Made, Part, PythonStep, Slot, Step

casts = runtime.ops("cast_transpose")
other = runtime.function("rms_norm", "rms_norm_fwd")


def cast(x, out, dbias=None, noop=None):
    return Step(casts.cast_transpose, (x, "scale", out, None, None, None, dbias, None, noop), 0)


def paired(*steps):
    """The functions of the steps, and the arguments of the first."""
    found = with_paired_casts(steps)
    return [step.function.__name__ for step in found], found[0].args


def test_two_inputs_share_a_call():
    names, args = paired(cast(Slot(0), Made(0), dbias=Made(5)), cast(Slot(1), Made(1)))
    assert names == ["cast_transpose_pair"]
    assert args == (
        Slot(0), "scale", Made(0), None, None, None, Made(5), None,
        Slot(1), "scale", Made(1), None, None, None,
    )  # fmt: skip


def test_a_cast_moves_over_steps_that_do_not_use_its_input():
    between = Step(other, (Slot(0), Made(0), Made(3)), 0)
    assert paired(cast(Made(4), Made(0)), between, cast(Slot(1), Made(1)))[0] == [
        "cast_transpose_pair", other.__name__,
    ]  # fmt: skip
    three = [cast(Slot(i), Made(i)) for i in range(3)]
    assert paired(*three)[0] == ["cast_transpose_pair", "cast_transpose"]


PART = Part(Slot(1), 0, (4,), (1,), torch.float32)
STAY = {
    "a result": (cast(Slot(0), Made(0)), cast(Made(3), Made(1))),
    "column sums": (cast(Slot(0), Made(0)), cast(Slot(1), Made(1), dbias=Made(2))),
    "a flag": (cast(Slot(0), Made(0)), cast(Slot(1), Made(1), noop=Slot(2))),
    "a flag of the first": (cast(Slot(0), Made(0), noop=Slot(2)), cast(Slot(1), Made(1))),
    "used between": (
        cast(Slot(0), Made(0)), Step(other, (PART, Made(0)), 0), cast(Slot(1), Made(1)),
    ),
    "written in Python": (
        cast(Slot(0), Made(0)), PythonStep(torch.relu_, (Slot(1),), {}, None),
        cast(Slot(1), Made(1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("steps", STAY.values(), ids=STAY)
def test_casts_that_stay(steps):
    assert with_paired_casts(steps) == list(steps)


KINDS = {"Linear": Linear, "MLP": LayerNormMLP}


@pytest.mark.parametrize("kind", KINDS)
def test_modules_have_pairs(device, monkeypatch, kind):
    seen = []

    def noted(steps):
        found = with_paired_casts(steps)
        seen.append([step.function.__name__ for step in found].count("cast_transpose_pair"))
        return found

    monkeypatch.setattr(program, "with_paired_casts", noted)
    module = KINDS[kind](32, 48, device=device, params_dtype=torch.bfloat16)
    x = torch.randn(16, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(4):
        with fp8_autocast(fp8_recipe=SCHEMES["delayed"]):
            y = module(x)
        y.sum().backward()
    # A CPU's products are Python steps, over which the second weight's cast does not move.
    assert seen == [int(device.type == "cuda" or kind == "Linear"), 1]
