"""Cached FP8 weights carry their own scales: modules x recipes x held weights x recompute."""

import contextlib
import copy

import pytest
import torch
from checks import assert_same_bits
from graph_models import fp8_state
from layer_kinds import KINDS, build, draw, repeatable, shape_of
from schemes import chosen, groups_on_device
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.distributed import checkpoint
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.model_init import fp8_model_init
from apex_te.module.grouped import on_device as _grouped_on_device
from apex_te.recipe import DelayedScaling

RECIPES = chosen("delayed", "tensorwise", "blockwise")
each_recipe = pytest.mark.parametrize("name", RECIPES)
each_kind = pytest.mark.parametrize("kind", KINDS)
held = pytest.mark.parametrize("held", [False, True], ids=["plain", "held in FP8"])
RECOMPUTES = {
    "reentrant": lambda f, x: torch_checkpoint(f, x, use_reentrant=True),
    "not reentrant": lambda f, x: torch_checkpoint(f, x, use_reentrant=False),
    "ours": lambda f, x: checkpoint(f, x),
}

pytestmark = pytest.mark.filterwarnings("ignore:apex_te. FP8 matrix products of groups")


def made(kind, held, recipe, device, monkeypatch):
    if kind.endswith("tensor"):
        if held or not groups_on_device(recipe):
            pytest.skip("groups whose sizes are on the device have neither")
        monkeypatch.setattr(_grouped_on_device, "stays_on_device", lambda device: True)
    with fp8_model_init(True, recipe) if held else contextlib.nullcontext():
        return build(kind, device)


@pytest.fixture(autouse=True)
def _repeatable(request, device):
    with repeatable(device, request.node.callspec.params["kind"]):
        yield


def run(model, batches, recipe, promises, again=lambda f, x: f(x), with_state=True):
    """Outputs, gradients and FP8 state; all microbatches of a step are in flight at once."""
    amax_groups.pending = 0
    seen = []
    for step in batches:
        waiting = []
        for (x, dy), first in zip(step, promises, strict=True):
            x = x.clone().requires_grad_()
            with fp8_autocast(True, recipe):
                out = again(lambda y, f=first: model(y, is_first_microbatch=f), x)
            waiting.append((out, dy, x))
            seen += [out.detach().clone(), *(fp8_state(model) if with_state else [])]
        for out, dy, x in waiting:
            out.backward(dy)
            seen.append(x.grad)
        for p in model.parameters():
            seen.append(p.grad.clone())
            with torch.no_grad():
                values = p.dequantize() if hasattr(p, "recipe") else p
                p.copy_(values - 0.01 * p.grad)
            p.grad = None
    flush_fp8_state()
    return seen + (fp8_state(model) if with_state else [])


@held
@each_recipe
@each_kind
def test_equals_quantizing_again_while_scales_stay(kind, name, held, device, monkeypatch):
    recipe = RECIPES[name]
    if recipe.keeps_state:
        recipe = DelayedScaling(amax_history_len=4, interval=2)
    model = made(kind, held, recipe, device, monkeypatch)
    other = copy.deepcopy(model)
    batches = draw(shape_of(kind, device), device, 3, 2)
    # A promise stages the amax of a group without rows, too.
    options = {"with_state": "Grouped" not in kind}
    expected = run(model, batches, recipe, (None, None), **options)
    assert_same_bits(run(other, batches, recipe, (True, False), **options), expected)


@held
@each_recipe
@each_kind
@pytest.mark.parametrize("again", RECOMPUTES)
def test_recompute_reads_what_the_forward_read(again, kind, name, held, device, monkeypatch):
    """While scales move from microbatch to microbatch."""
    recipe = RECIPES[name]
    model = made(kind, held, recipe, device, monkeypatch)
    other = copy.deepcopy(model)
    promises = (True, False, False)
    batches = draw(shape_of(kind, device), device, 3, len(promises))
    if again != "ours":  # with which several microbatches may be in flight
        batches, promises = batches[:, :1], (True,)
    expected = run(model, batches, recipe, promises)
    assert_same_bits(run(other, batches, recipe, promises, RECOMPUTES[again]), expected)


@held
@each_recipe
@each_kind
@pytest.mark.parametrize("first", [True, False])
def test_training_goes_on_after_an_evaluation_in_inference_mode(
    first, kind, name, held, device, monkeypatch
):
    """Before and between steps, and with the results of an evaluation under no_grad."""
    recipe = RECIPES[name]
    model = made(kind, held, recipe, device, monkeypatch)
    other = copy.deepcopy(model)
    batches = draw(shape_of(kind, device), device, 2, 2)
    found = {}
    for mode, one in ((torch.no_grad, model), (torch.inference_mode, other)):
        found[mode] = seen = []
        for step in batches:
            with mode(), fp8_autocast(True, recipe):
                seen.append(one(step[0, 0].clone(), is_first_microbatch=first).clone())
            seen += run(one, step[None], recipe, (True, False))
    assert_same_bits(*found.values())
