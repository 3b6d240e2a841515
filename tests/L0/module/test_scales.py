"""When scales move and which amaxes are recorded."""

import math

import pytest
import torch

from apex_te import Linear, flush_fp8_state, fp8_autocast, init_fp8_state
from apex_te.fp8.delayed.ranks import amax_groups, registry
from apex_te.fp8.delayed.state import TENSORS, nonfinite_count
from apex_te.recipe import DelayedScaling, Format


def snapshot(*modules):
    return [getattr(m.fp8_state, name).clone() for m in modules for name in TENSORS]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def step(module, recipe, value, **kwargs):
    """One region whose input amax is ``value``, with its backward."""
    x = torch.full((2, 16), 0.5)
    x[1, 3] = -value
    with fp8_autocast(True, recipe):
        out = module(x, **kwargs)
    out.sum().backward()


def input_scale(module):
    return module.fp8_state.scale_fwd[0].item()


def test_scales_by_hand():
    """numerics.md 5.1: history length 4, amaxes 8, 4, 3, 2: 8 is used four times, then 4."""
    recipe, module = DelayedScaling(amax_history_len=4), Linear(16, 16)
    step(module, recipe, 8.0)
    assert input_scale(module) == 1.0  # nothing moves before the next region
    used = []
    for value in (4.0, 3.0, 2.0, 2.0, 2.0):
        step(module, recipe, value)
        used.append(input_scale(module))
    assert used == [448 / 8] * 4 + [448 / 4]
    assert module.fp8_state.amax_history_fwd[:, 0].tolist() == [2.0, 3.0, 2.0, 2.0]
    assert module.fp8_state.scale_bwd[0].item() == 57344.0  # the gradient of a sum is 1
    flush_fp8_state()
    assert input_scale(module) == pytest.approx(448 / 3)
    before = snapshot(module)
    flush_fp8_state()  # nothing is pending
    assert same(before, snapshot(module))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"margin": 2}, 448 / 8 / 4),
        ({"amax_compute_algo": "most_recent"}, 448 / 4),
        ({"scaling_factor_compute_algo": "pow2"}, 32.0),
        ({"amax_compute_algo": lambda h: h.mean(0)}, 448 / 3),
        ({"fp8_format": Format.E4M3}, 448 / 8),
        ({"scaling_factor_compute_algo": lambda a, s, m, r: m / a / s}, 448 / 8 / 56),
    ],
)
def test_scale_options(options, expected):
    recipe, module = DelayedScaling(amax_history_len=4, **options), Linear(16, 16)
    step(module, recipe, 8.0)
    step(module, recipe, 4.0)
    flush_fp8_state()
    assert input_scale(module) == pytest.approx(expected, rel=1e-6)
    gradient = 448.0 if options.get("fp8_format") else 57344.0
    if set(options) <= {"fp8_format", "amax_compute_algo"} and "amax" not in str(options):
        assert module.fp8_state.scale_bwd[0].item() == gradient


def test_interval_counts_regions():
    recipe, module = DelayedScaling(interval=3), Linear(16, 16)
    used = []
    for value in (8.0, 2.0, 4.0, 16.0, 1.0, 1.0, 1.0):
        step(module, recipe, value)
        used.append(input_scale(module))
    assert used == [1.0] * 3 + [448 / 8] * 3 + [448 / 16]


def test_nested_regions_count_once_and_disabled_ones_record_nothing():
    recipe = DelayedScaling()
    a, b = Linear(16, 16), Linear(16, 16)
    x = torch.ones(2, 16)
    with fp8_autocast(True, recipe):
        a(x)
        with fp8_autocast(True, recipe):
            a(2 * x)
        with fp8_autocast(enabled=False):
            b(x)
    assert amax_groups.pending == 1
    assert a.fp8_state.amax_history_fwd[0, 0] == 2
    assert not b.fp8_state.allocated
    with fp8_autocast(enabled=False):
        a(8 * x)
    assert amax_groups.pending == 1
    assert a.fp8_state.amax_history_fwd[0, 0] == 2


def test_calibrating_records_in_high_precision():
    recipe, module = DelayedScaling(amax_history_len=2), Linear(16, 16)
    x = torch.randn(4, 16)
    with fp8_autocast(False, recipe, calibrating=True):
        out = module(x)
    (out * 3).sum().backward()
    plain = torch.nn.functional.linear(x, module.weight, module.bias)
    assert torch.equal(out, plain)
    state = module.fp8_state
    assert state.amax_history_fwd[0, 0] == x.abs().max()
    assert state.amax_history_fwd[0, 1] == module.weight.abs().max()
    assert state.amax_history_bwd[0, 0] == 3
    flush_fp8_state()
    assert state.scale_fwd[0] == 448 / x.abs().max()


def test_calibrating_without_gradients_updates_on_leaving():
    module = Linear(16, 16)
    with torch.no_grad(), fp8_autocast(False, calibrating=True):
        module(torch.full((1, 16), 4.0))
        assert input_scale(module) == 1
    assert input_scale(module) == 448 / 4


def test_evaluation_first_does_not_spoil_training():
    recipe, module = DelayedScaling(), Linear(16, 16)
    with torch.inference_mode(), fp8_autocast(True, recipe):
        module(torch.ones(2, 16), is_first_microbatch=True)
    step(module, recipe, 8.0, is_first_microbatch=False)
    step(module, recipe, 8.0, is_first_microbatch=False)
    assert input_scale(module) == 56


def test_a_module_used_twice_keeps_the_larger_amax():
    recipe, module = DelayedScaling(), Linear(16, 16)
    with fp8_autocast(True, recipe):
        out = module(torch.full((1, 16), 8.0)).sum() + 5 * module(torch.full((1, 16), 2.0)).sum()
    out.backward()
    assert module.fp8_state.amax_history_fwd[0, 0] == 8
    assert module.fp8_state.amax_history_bwd[0, 0] == 5


def test_a_module_that_did_not_run_keeps_its_scale():
    recipe = DelayedScaling(amax_history_len=2)
    used, idle = Linear(16, 16), Linear(16, 16)
    step(idle, recipe, 4.0)
    flush_fp8_state()
    before = snapshot(idle)
    for _ in range(4):
        step(used, recipe, 2.0)
    assert same(before, snapshot(idle))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_bad_amax_keeps_the_scale(value):
    recipe, module = DelayedScaling(amax_history_len=4), Linear(16, 16)
    step(module, recipe, 8.0)
    flush_fp8_state()
    count = nonfinite_count().item()
    history = module.fp8_state.amax_history_fwd[:, 0].clone()
    x = torch.full((2, 16), value)
    with fp8_autocast(True, recipe):
        out = module(x)
    assert out.isnan().all() == math.isnan(value)
    flush_fp8_state()
    assert input_scale(module) == 56
    assert torch.equal(module.fp8_state.amax_history_fwd[:, 0], history)
    assert nonfinite_count().item() - count == (0 if value == 0 else 1)


@pytest.mark.parametrize("value", [1e-45, 1e-38])
def test_tiny_amax_gives_a_finite_scale(value):
    recipe, module = DelayedScaling(), Linear(16, 16)
    with fp8_autocast(True, recipe):
        module(torch.full((1, 16), value))
    flush_fp8_state()
    assert input_scale(module) == torch.finfo(torch.float32).max


def test_first_step_current_scales_from_the_tensor_itself():
    recipe, module = DelayedScaling(first_step="current", interval=2), Linear(16, 16)
    step(module, recipe, 8.0)
    assert input_scale(module) == 56
    assert module.fp8_state.scale_fwd[1] == 448 / module.weight.abs().max()
    assert module.fp8_state.scale_bwd[0] == 57344
    step(module, recipe, 4.0)
    assert input_scale(module) == 56  # the first recorded cast only
    assert module.fp8_state.first_steps.due == [False, False, True, False, True]
    step(module, recipe, 4.0)
    assert input_scale(module) == 56


def test_first_step_current_keeps_scale_one_for_zeros():
    recipe, module = DelayedScaling(first_step="current"), Linear(16, 16)
    with fp8_autocast(True, recipe):
        module(torch.zeros(2, 16))
    assert input_scale(module) == 1


def test_init_allocates_once():
    model = torch.nn.Sequential(Linear(16, 16), torch.nn.ReLU(), Linear(16, 16))
    init_fp8_state(model, DelayedScaling(amax_history_len=7))
    addresses = [getattr(m.fp8_state, n).data_ptr() for m in model[::2] for n in TENSORS]
    init_fp8_state(model, DelayedScaling(amax_history_len=9))
    assert model[0].fp8_state.history_length == 7
    recipe = DelayedScaling(amax_history_len=7)
    for _ in range(3):
        with fp8_autocast(True, recipe):
            out = model(torch.randn(2, 16))
        out.sum().backward()
    assert addresses == [getattr(m.fp8_state, n).data_ptr() for m in model[::2] for n in TENSORS]
    with pytest.raises(TypeError, match=r"init_fp8_state: recipe must be a recipe .* got int"):
        init_fp8_state(model, 8)


def test_history_length_change_keeps_the_newest_and_warns_once():
    module = Linear(16, 16)
    for value in (8.0, 4.0, 2.0):
        step(module, DelayedScaling(amax_history_len=5), value)
    with pytest.warns(UserWarning, match="trimmed from length 5 to 3"):
        step(module, DelayedScaling(amax_history_len=3), 1.0)
    assert module.fp8_state.amax_history_fwd[:, 0].tolist() == [1.0, 4.0, 2.0]


def test_dead_modules_leave_the_registry():
    alive = len(registry._members)
    module = Linear(16, 16)
    assert len(registry._members) == alive + 1
    del module
    assert len(registry._members) == alive
