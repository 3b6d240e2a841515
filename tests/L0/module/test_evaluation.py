"""Which scales evaluation and calibration use, and that evaluation changes no training."""

import copy
import io
import math
import pickle
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from apex_te import (
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    flush_fp8_state,
    fp8_autocast,
)
from apex_te.autocast import local
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling

SMALL = 1e-4  # far below what E4M3 with scale 1 can hold


def build(device):
    torch.manual_seed(3)
    layers = [
        Linear(32, 32, device=device),
        LayerNormMLP(32, 64, device=device),
        LayerNormLinear(32, 32, device=device),
    ]
    return torch.nn.Sequential(*layers)


def data(step, device, size=1.0):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * size
    return x.to(device)


def everything(model):
    states = [getattr(m.fp8_state, n).clone() for m in model for n in TENSORS]
    return [*states, *(p.detach().clone() for p in model.parameters())]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sqnr(out, exact):
    noise = (out.double() - exact.double()).square().mean()
    return 10 * math.log10(exact.double().square().mean() / noise)


@torch.no_grad()
def evaluate(model, recipe, device, step=99, size=1.0, **kwargs):
    with fp8_autocast(True, recipe):
        return model(data(step, device, size), **kwargs)


RECIPES = {
    "delayed": DelayedScaling(amax_history_len=3),
    "interval": DelayedScaling(amax_history_len=3, interval=3),
    "first": DelayedScaling(amax_history_len=3, first_step="current"),
    "functions": DelayedScaling(amax_history_len=3, amax_compute_algo=lambda h: 2 * h.amax(0)),
    "alone": DelayedScaling(amax_history_len=3, reduce_amax=False),
}
RECIPES["functions_pow2"] = DelayedScaling(
    amax_history_len=3,
    amax_compute_algo=RECIPES["functions"].amax_compute_algo,
    scaling_factor_compute_algo="pow2",
)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recompute", [False, True])
def test_training_is_the_same_with_evaluations_in_between(recipe, recompute, device):
    """Also between a forward and its backward, as where a teacher is asked, and with others."""
    chosen = RECIPES[recipe]

    def run(evaluations):
        amax_groups.pending = 0
        model, outputs = build(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(7):
            x = data(step, device)
            with fp8_autocast(True, chosen):
                out = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
            if evaluations:
                evaluate(model, chosen, device)
                evaluate(model, DelayedScaling(margin=2, interval=2), device)
                evaluate(model, CurrentScaling(), device)
            optimizer.zero_grad()
            (out * (step + 1)).square().mean().backward()
            outputs.append(out.detach())
            if evaluations:
                with torch.inference_mode():
                    evaluate(model, chosen, device)
            optimizer.step()
        return outputs + everything(model), amax_groups.pending

    (plain, pending), (evaluated, also) = run(False), run(True)
    assert same(plain, evaluated)
    assert pending == also


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_evaluation_reads_the_scales_of_the_pending_update(recipe, mode, device):
    chosen, model = RECIPES[recipe], build(device)
    for step in range(2):
        with fp8_autocast(True, chosen):
            out = model(data(step, device))
        out.square().mean().backward()
        before = everything(model)
        with mode():
            early = evaluate(model, chosen, device)
        assert same(before, everything(model))
    flush_fp8_state()
    assert torch.equal(early, evaluate(model, chosen, device))
    assert not same(before, everything(model))


@pytest.mark.parametrize("splits", [list, torch.tensor])
def test_grouped_layers_read_them_too(splits, device):
    recipe, layer = RECIPES["delayed"], GroupedLinear(2, 32, 32, device=device)
    x = data(0, device, SMALL)
    m_splits = splits([8, 8]) if splits is list else torch.tensor([8, 8], device=device)
    with fp8_autocast(True, recipe):
        layer(x, m_splits).sum().backward()
    with torch.no_grad():
        with fp8_autocast(True, recipe):
            early = layer(x, m_splits)
        flush_fp8_state()
        with fp8_autocast(True, recipe):
            late = layer(x, m_splits)
        exact = layer(x, m_splits)
    assert torch.equal(early, late)
    assert sqnr(early, exact) > 20


def test_small_tensors_are_no_zeros_after_one_step(device):
    """With scale 1 every code of the input would be zero."""
    recipe, layer = DelayedScaling(), Linear(32, 32, bias=False, device=device)
    with fp8_autocast(True, recipe):
        layer(data(0, device, SMALL)).sum().backward()
    x = data(0, device, SMALL)
    with torch.no_grad():
        exact = layer(x)
        with fp8_autocast(True, recipe):
            assert sqnr(layer(x), exact) > 25
        assert layer.fp8_state.scale_fwd.eq(1).all()


def test_evaluation_costs_nothing_where_no_update_is_pending(device):
    model = build(device)
    with torch.no_grad(), fp8_autocast():
        assert not local.region.previewed
    with fp8_autocast():
        model(data(0, device)).sum().backward()
    with torch.no_grad(), fp8_autocast():
        assert local.region.previewed
        with fp8_autocast(True, RECIPES["interval"]):  # nested: the outermost decides
            assert local.region.previewed
    flush_fp8_state()
    with torch.no_grad(), fp8_autocast():
        assert not local.region.previewed


def test_cached_weights_follow_the_scales(device):
    recipe, layer = DelayedScaling(), Linear(32, 32, bias=False, device=device)
    torch.nn.init.normal_(layer.weight, std=SMALL)
    with fp8_autocast(True, recipe):
        layer(data(0, device), is_first_microbatch=True).sum().backward()
    early = [evaluate(layer, recipe, device, is_first_microbatch=k == 0) for k in range(2)]
    flush_fp8_state()
    late = evaluate(layer, recipe, device)
    assert torch.equal(early[0], late)
    assert torch.equal(early[1], late)


def test_compiled_code_inside_of_a_region_reads_them(device):
    recipe = DelayedScaling(amax_history_len=3)
    eager, compiled = build(device)[:1], build(device)[:1]
    compiled_call = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for call in (eager, compiled_call):
        amax_groups.pending = 0
        with fp8_autocast(True, recipe):
            out = call(data(0, device))
        out.square().mean().backward()
    torch.testing.assert_close(
        evaluate(compiled_call, recipe, device), evaluate(eager, recipe, device)
    )
    before = everything(compiled)
    early = evaluate(compiled_call, recipe, device)
    assert same(before, everything(compiled))
    flush_fp8_state()
    assert torch.equal(early, evaluate(compiled_call, recipe, device))


def test_threads_that_evaluate_do_not_disturb_each_other(device):
    """Each entry makes the same scales again, which others are reading."""
    recipe, model = RECIPES["delayed"], build(device)
    with fp8_autocast(True, recipe):
        out = model(data(0, device, 50.0))
    out.square().mean().backward()
    expected, found = evaluate(model, recipe, device, size=50.0), []

    def serve():
        for _ in range(10):
            found.append(torch.equal(evaluate(model, recipe, device, size=50.0), expected))

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    assert all(found)


@pytest.mark.cuda
def test_a_captured_evaluation_outlives_the_region(device):
    """Its scales are the state's, which later updates move; it never reads stale ones."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    recipe, layer = DelayedScaling(amax_history_len=2), Linear(32, 32, device=device)
    x, graph = data(0, device), torch.cuda.CUDAGraph()
    for _ in range(2):
        with fp8_autocast(True, recipe):
            layer(x).sum().backward()
    evaluate(layer, recipe, device)
    with torch.no_grad(), fp8_autocast(True, recipe), torch.cuda.graph(graph):
        out = layer(x)
    for _ in range(2):
        with fp8_autocast(True, recipe):
            layer(x * 50).sum().backward()
    flush_fp8_state()
    graph.replay()
    with torch.no_grad(), fp8_autocast(True, recipe):
        assert torch.equal(out, layer(x))


def test_other_recipes_leave_the_scales_alone(device):
    layer = Linear(32, 32, device=device)
    with fp8_autocast(True, DelayedScaling()):
        layer(data(0, device)).sum().backward()
    expected = {}
    for _ in range(2):  # with an update pending, and without
        for recipe in (CurrentScaling(), BlockScaling()):
            out = evaluate(layer, recipe, device)
            assert torch.equal(expected.setdefault(recipe, out), out)
        flush_fp8_state()


# Calibration.


def calibrate(model, device, batches=2, size=SMALL, recipe=None, enabled=False, mode=torch.no_grad):
    recipe = RECIPES["delayed"] if recipe is None else recipe
    for step in range(batches):
        with mode(), fp8_autocast(enabled, recipe, calibrating=True):
            model(data(step, device, size))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("interval", [1, 4])
def test_calibration_sets_scales_as_its_regions_are_left(mode, interval, device):
    recipe = DelayedScaling(amax_history_len=3, interval=interval)
    layer = Linear(32, 32, bias=False, device=device)
    calibrate(layer, device, recipe=recipe, mode=mode)
    largest = max(data(step, device, SMALL).abs().max() for step in range(2))
    state = layer.fp8_state
    for slot, amax in enumerate((largest, layer.weight.detach().abs().max())):
        assert state.scale_fwd[slot] == (448 / amax.double()).float()
    assert state.amax_history_fwd[0].eq(0).all()
    assert state.amax_history_fwd[1:, 0].tolist() == [
        data(step, device, SMALL).abs().max().item() for step in range(2)
    ]
    assert amax_groups.pending == 0
    x = data(1, device, SMALL)
    with torch.no_grad():
        exact = layer(x)
        with fp8_autocast(True, recipe):
            assert sqnr(layer(x), exact) > 28
        with torch.inference_mode(), fp8_autocast(True, recipe):
            assert sqnr(layer(x), exact) > 28
    with fp8_autocast(True, recipe):  # and it can be trained
        layer(x).sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_a_state_saved_after_calibration_holds_its_scales(device):
    model, blob = build(device), io.BytesIO()
    calibrate(model, device)
    torch.save(model.state_dict(), blob)
    expected = evaluate(model, RECIPES["delayed"], device, size=SMALL)
    blob.seek(0)
    saved = torch.load(blob, weights_only=True)
    assert not saved["0.fp8_state.scale_fwd"][:2].eq(1).any()
    amax_groups.pending = 0
    other = torch.nn.Sequential(*build(device))
    other.load_state_dict(saved)
    assert torch.equal(evaluate(other, RECIPES["delayed"], device, size=SMALL), expected)


def test_a_state_saved_with_an_update_pending_evaluates_alike(device):
    """Its scales are those before the update, which is saved with it."""
    model, blob = build(device), io.BytesIO()
    with fp8_autocast(True, RECIPES["delayed"]):
        model(data(0, device)).sum().backward()
    expected = evaluate(model, RECIPES["delayed"], device)
    torch.save(model.state_dict(), blob)
    amax_groups.pending = 0
    blob.seek(0)
    other = build(device)
    other.load_state_dict(torch.load(blob, weights_only=True))
    assert torch.equal(evaluate(other, RECIPES["delayed"], device), expected)


@pytest.mark.parametrize("pending", ["own", "another model's"])
def test_copies_made_within_an_evaluation_equal_the_model(pending, device):
    recipe, model, other = RECIPES["delayed"], build(device), build(device)

    def step(trained, number):
        with fp8_autocast(True, recipe):
            out = trained(data(number, device, size=SMALL))
        out.sum().backward()

    for number in range(2):
        step(model, number)
    if pending != "own":
        flush_fp8_state()
        step(other, 2)
    with torch.no_grad(), fp8_autocast(True, recipe):
        assert local.region.previewed
        x = data(99, device, size=SMALL)
        expected = model(x)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        loaded = build(device)
        loaded.load_state_dict(model.state_dict())
        found = [made(x) for made in (*copies, model, model.to(device))]
        assert same(found, [expected] * len(found))
        if pending != "own":  # a load does not compute what its own pending update will give
            assert torch.equal(loaded(x), expected)
    assert torch.equal(evaluate(copies[0], recipe, device, size=SMALL), expected)
    assert torch.equal(evaluate(loaded, recipe, device, size=SMALL), expected)


def test_calibration_leaves_the_scales_of_a_step_in_flight(device):
    """A recomputation in its backward would not find those of its forward."""
    recipe = RECIPES["delayed"]

    def run(calibrated):
        amax_groups.pending = 0
        model, other = build(device), Linear(32, 32, device=device)
        for step in range(3):
            with fp8_autocast(True, recipe):
                out = checkpoint(model, data(step, device), use_reentrant=False)
            if calibrated:
                with torch.no_grad(), fp8_autocast(False, recipe, calibrating=True):
                    other(data(step, device))
                assert other.fp8_state.amax_history_fwd[0, 0] > 0
            out.square().mean().backward()
        return everything(model) + [p.grad.clone() for p in model.parameters()]

    assert same(run(True), run(False))


def test_calibration_with_gradients_waits_for_the_next_region(device):
    recipe, layer = RECIPES["delayed"], Linear(32, 32, device=device)
    with fp8_autocast(False, recipe, calibrating=True):
        out = layer(data(0, device))
    assert layer.fp8_state.scale_fwd.eq(1).all()
    out.sum().backward()
    flush_fp8_state()
    assert layer.fp8_state.scale_bwd[0] == 57344
    # What was trained before is done: calibration now counts by itself.
    calibrate(layer, device, 1)
    assert amax_groups.pending == 0


def test_a_calibrating_region_left_by_an_error_updates_nothing(device):
    recipe, layer = RECIPES["delayed"], Linear(32, 32, device=device)

    @torch.no_grad()
    @fp8_autocast(False, recipe, calibrating=True)
    def interrupted():
        layer(data(0, device))
        raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert layer.fp8_state.scale_fwd.eq(1).all()
    assert amax_groups.pending == 1
    assert local.region is None


def test_nested_calibrating_regions_update_once(device):
    recipe, layer = RECIPES["delayed"], Linear(32, 32, device=device)
    with torch.no_grad(), fp8_autocast(False, recipe, calibrating=True):
        with fp8_autocast(False, recipe, calibrating=True):
            layer(data(0, device))
        assert layer.fp8_state.scale_fwd.eq(1).all()
    assert layer.fp8_state.scale_fwd[0] == 448 / data(0, device).abs().max()
