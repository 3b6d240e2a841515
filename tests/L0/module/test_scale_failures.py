"""A recipe whose update fails stops no other module, and is heard of once."""

import gc
import warnings

import pytest
import torch

from apex_te import Linear, flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.fp8.delayed.update import _failures
from apex_te.recipe import DelayedScaling

GOOD = DelayedScaling(amax_history_len=3)


class Algorithm:
    """Raises while ``broken``; called with histories, or with amaxes and the rest."""

    def __init__(self, error=None):
        self.broken = True
        self.error = ArithmeticError("no scale today") if error is None else error
        self.calls = 0

    def __call__(self, first, *rest):
        if self.broken:
            self.calls += 1
            raise type(self.error)(*self.error.args)
        return rest[1] / first if rest else first.amax(0)


def broken(name, error=None):
    algorithm = Algorithm(error)
    return algorithm, DelayedScaling(amax_history_len=3, **{name: algorithm})


def step(module, recipe, value):
    x = torch.full((2, 16), float(value))
    with fp8_autocast(True, recipe):
        out = module(x)
    out.sum().backward()


def snapshot(module):
    return {name: getattr(module.fp8_state, name).clone() for name in TENSORS}


def unchanged(module, before):
    return all(torch.equal(value, before[name]) for name, value in snapshot(module).items())


@pytest.fixture(autouse=True)
def _no_failures():
    """A broken model that lives on would be heard of in other tests."""
    yield
    gc.collect()
    _failures.clear()


@pytest.fixture(params=["amax_compute_algo", "scaling_factor_compute_algo"])
def name(request):
    return request.param


def test_the_region_of_the_recipe_raises_once(name):
    algorithm, recipe = broken(name)
    module = Linear(16, 16)
    algorithm.broken = False
    step(module, recipe, 2)
    step(module, recipe, 4)
    algorithm.broken = True
    before = snapshot(module)
    message = (
        r"^fp8_autocast: the scale update of Linear\(in_features=16, out_features=16, bias=True\) "
        r"failed with DelayedScaling\(.*\), which left scales as they were and dropped the amaxes "
        r"staged: no scale today \(.*test_scale_failures\.py:\d+\)$"
    )
    with pytest.raises(RuntimeError, match=message) as caught:
        step(module, recipe, 8)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    for staged in ("amax_history_fwd", "amax_history_bwd"):
        assert before[staged][0].any()
        before[staged][0] = 0
    assert unchanged(module, before)
    assert amax_groups.pending == 0
    flush_fp8_state()  # it was said: nothing more comes
    algorithm.broken = False
    step(module, recipe, 8)
    step(module, recipe, 8)
    assert module.fp8_state.scale_fwd[0] == 56


def test_other_models_go_on_as_if_alone(name):
    _, recipe = broken(name)
    alone, other, bad = Linear(16, 16), Linear(16, 16), Linear(16, 16)
    with torch.no_grad():
        alone.weight.copy_(other.weight)
    for value in (2, 4, 8):
        step(alone, GOOD, value)
    flush_fp8_state()

    step(bad, recipe, 2)
    with pytest.warns(RuntimeWarning, match="the next region with that recipe raises this"):
        step(other, GOOD, 2)
    with pytest.raises(RuntimeError, match="no scale today"):
        step(bad, recipe, 4)
    for value in (4, 8):
        step(other, GOOD, value)
    flush_fp8_state()
    assert unchanged(other, snapshot(alone))


def test_other_models_are_not_stopped_while_the_bad_one_lives(name):
    _, recipe = broken(name)
    bad, other = Linear(16, 16), Linear(16, 16)
    step(bad, recipe, 2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for value in (2, 4, 8):
            step(other, GOOD, value)
    assert len(seen) == 1  # nothing is staged any more, and nothing fails again
    assert other.fp8_state.scale_fwd[0] == 448 / 4
    with pytest.raises(RuntimeError, match="no scale today"):
        step(bad, recipe, 2)
    step(other, GOOD, 2)
    assert other.fp8_state.scale_fwd[0] == 448 / 8


def test_only_the_states_that_fail_stay_behind():
    """A function that fails for one module of those with its recipe: the others move."""

    def picky(history):
        if history.max() > 100:
            raise ArithmeticError("too large")
        return history.amax(0)

    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=picky)
    fine, large = Linear(16, 16), Linear(16, 16)
    with fp8_autocast(True, recipe):
        out = fine(torch.full((2, 16), 4.0)).sum() + large(torch.full((2, 16), 400.0)).sum()
    out.backward()
    with pytest.raises(RuntimeError, match=r"update of Linear\(.*\) failed.*too large \("):
        flush_fp8_state()
    assert fine.fp8_state.scale_fwd[0] == 112
    assert large.fp8_state.scale_fwd.eq(1).all()
    assert large.fp8_state.amax_history_fwd.eq(0).all()


def test_a_flush_updates_all_others_first(name):
    _, recipe = broken(name)
    bad, other = Linear(16, 16), Linear(16, 16)
    step(bad, recipe, 2)
    amax_groups.pending = 0
    step(other, GOOD, 4)
    with pytest.raises(RuntimeError, match="no scale today"):
        flush_fp8_state()
    assert other.fp8_state.scale_fwd[0] == 112
    assert amax_groups.pending == 0
    flush_fp8_state()


def test_another_recipe_ends_it(name):
    _, recipe = broken(name)
    module = Linear(16, 16)
    step(module, recipe, 2)
    with pytest.warns(RuntimeWarning, match="no scale today"):
        step(module, GOOD, 4)
    step(module, GOOD, 4)
    assert module.fp8_state.scale_fwd[0] == 112


@pytest.mark.parametrize("error", [TypeError("t"), ValueError("v"), NotImplementedError("n")])
def test_plain_kinds_of_errors_stay(error, name):
    _, recipe = broken(name, error)
    module = Linear(16, 16)
    step(module, recipe, 2)
    with pytest.raises(type(error), match=f"fp8_autocast: the scale update of Linear.*: {error} "):
        step(module, recipe, 2)


def test_what_a_function_returns_is_checked():
    recipe = DelayedScaling(amax_compute_algo=lambda history: 1.0)
    module = Linear(16, 16)
    step(module, recipe, 2)
    with pytest.raises(TypeError, match=r"Linear\(.*amax_compute_algo must return a tensor"):
        step(module, recipe, 2)


@pytest.mark.parametrize("scale", [1e-40, 0.0, -1.0, float("nan"), float("inf")])
def test_scales_without_a_finite_inverse_are_not_taken(scale):
    recipe = DelayedScaling(
        scaling_factor_compute_algo=lambda amax, *rest: torch.full_like(amax, scale)
    )
    module = Linear(16, 16)
    step(module, recipe, 2)
    flush_fp8_state()
    state = module.fp8_state
    expected = torch.finfo(torch.float32).max if scale == float("inf") else 1
    assert state.scale_fwd[0] == expected
    assert state.scale_inv_fwd[0] == 1 / state.scale_fwd[0]
    assert state.scale_inv_fwd.isfinite().all()


def test_calibration_raises_as_it_is_left(name):
    _, recipe = broken(name)
    module = Linear(16, 16)
    with (
        pytest.raises(RuntimeError, match="no scale today"),
        torch.no_grad(),
        fp8_autocast(False, recipe, calibrating=True),
    ):
        module(torch.ones(2, 16))
    with torch.no_grad(), fp8_autocast(False, GOOD, calibrating=True):
        module(torch.full((2, 16), 4.0))
    assert module.fp8_state.scale_fwd[0] == 112


def test_evaluation_reads_what_there_is(name):
    """The update that fails is none of the evaluation's business."""
    _, recipe = broken(name)
    bad, good = Linear(16, 16), Linear(16, 16)
    step(bad, recipe, 2)
    step_with = torch.full((2, 16), 2.0)
    with torch.no_grad(), fp8_autocast(True, recipe):
        out = bad(step_with)
        good(step_with)
    amax_groups.pending = 0
    with torch.no_grad(), fp8_autocast(True, recipe):
        assert torch.equal(out, bad(step_with))


def test_a_first_step_that_fails_is_still_due(name):
    algorithm = Algorithm()
    recipe = DelayedScaling(first_step="current", **{name: algorithm})
    module = Linear(16, 16)
    with pytest.raises(ArithmeticError, match="no scale today"):
        step(module, recipe, 2)
    assert module.fp8_state.first_steps.due == [True] * 5
    algorithm.broken = False
    amax_groups.pending = 0
    step(module, recipe, 8)
    assert module.fp8_state.scale_fwd[0] == 56


def test_a_poisoned_recipe_of_the_kernel_stops_nobody_else(device):
    """One that got past the checks, of its construction and of a file."""
    recipe = DelayedScaling(amax_history_len=3)
    object.__setattr__(recipe, "margin", 100)
    bad, other = Linear(16, 16, device=device), Linear(16, 16, device=device)
    x = torch.full((2, 16), 4.0, device=device)
    with fp8_autocast(True, recipe):
        bad(x).sum().backward()

    def train():
        for _ in range(3):
            with fp8_autocast(True, GOOD):
                out = other(x).sum()
            out.backward()

    with pytest.warns(RuntimeWarning, match="margin must be from -64 to 64, got 100"):
        train()
    assert other.fp8_state.scale_fwd[0] == 112
    with pytest.raises(ValueError, match="margin must be"):
        flush_fp8_state()
