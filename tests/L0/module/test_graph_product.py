"""make_graphed_callables against eager, bitwise: modules x recipes x caching x microbatches.

On the CPU a stand-in replaces CUDA graphs (graph_stand_in.py).
"""

import copy

import pytest
import torch
from checks import assert_same_bits
from graph_models import RECIPES, count_replays, fp8_state
from graph_stand_in import graphs_on_cpu  # noqa: F401
from layer_kinds import (
    BATCH,
    HEADS,
    KINDS,
    TOKENS,
    build,
    draw,
    repeatable,
    sample,
    shape_of,
    width_on,
)

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.graphs.graphed_callables import make_graphed_callables
from apex_te.module.attention.dot_product import DotProductAttention
from apex_te.module.grouped import on_device as _grouped_on_device
from apex_te.module.linear import Linear

STEPS = 5
DELAYED = RECIPES["delayed"]
each_recipe = pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])

pytestmark = pytest.mark.filterwarnings("ignore:apex_te. FP8 matrix products of groups")


def train(model, batches, recipe, promises):
    """What each microbatch gives, and parameters and FP8 state: one optimizer step a row.

    ``promises``: the is_first_microbatch of each microbatch of a step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    seen = []
    for row in batches:
        for (x, dy), first in zip(row, promises, strict=True):
            x = x.clone().requires_grad_()
            with fp8_autocast(True, recipe):
                out = model(x, is_first_microbatch=first)
            out.backward(dy)
            seen += [out.detach().clone(), x.grad, *fp8_state(model)]
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen += [p.detach().clone() for p in model.parameters()]
    flush_fp8_state()
    return seen + fp8_state(model)


@pytest.fixture(autouse=True)
def _graphs(request, device, monkeypatch):
    """CUDA graphs or their stand-in, and attention whose gradients can be repeated."""
    if device.type == "cpu":
        request.getfixturevalue("graphs_on_cpu")
        # As on a GPU: nothing reads the splits.
        monkeypatch.setattr(_grouped_on_device, "stays_on_device", lambda device: True)
    with repeatable(device, request.node.callspec.params.get("kind", "attention")):
        yield


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
@pytest.mark.parametrize("caching", [True, False])
@each_recipe
@pytest.mark.parametrize("kind", KINDS)
def test_equals_eager(kind, name, caching, microbatches, device):
    if kind.endswith("tensor") and name == "blockwise":
        pytest.skip("groups whose sizes are on the device have no block scales")
    recipe = RECIPES[name]
    model = build(kind, device)
    other = copy.deepcopy(model)
    shape = shape_of(kind, device)
    batches = draw(shape, device, STEPS, microbatches)
    promises = [k == 0 if caching else None for k in range(microbatches)]
    expected = train(model, batches, recipe, promises)
    make_graphed_callables(
        other, (sample(shape, device),), fp8_enabled=True, fp8_recipe=recipe,
        fp8_weight_caching=caching,
    )  # fmt: skip
    assert_same_bits(train(other, batches, recipe, promises), expected)
    assert all(torch.isfinite(x.float()).all() for x in expected)
    assert count_replays(other) == STEPS * microbatches


def run_both(model, other, calls, recipe=DELAYED):
    """Outputs, input gradients and FP8 state of both after each of ``calls``, which are compared.

    A call: what to do to the model before, its input, the output's gradient and its promise.
    """
    for change, x, dy, first in calls:
        seen = []
        for m in (model, other):
            change(m)
            inp = x.clone().requires_grad_()
            with fp8_autocast(True, recipe):
                out = m(inp, is_first_microbatch=first)
            out.backward(dy)
            seen.append([out.detach().clone(), inp.grad, *fp8_state(m)])
        assert_same_bits(*seen)


def nothing(model):
    pass


def change_weight(model):
    with torch.no_grad():
        model.layers[1].weight.mul_(-2)


def change_biases(model):
    with torch.no_grad():
        for layer in model.layers:
            layer.bias.add_(1)


@pytest.mark.parametrize(
    "calls",
    [
        [(nothing, None), (nothing, False), (nothing, False)],
        [(nothing, True), (nothing, False), (change_weight, False), (nothing, False)],
        [(nothing, True), (change_biases, False), (change_weight, False), (change_biases, False)],
        [(nothing, True), (nothing, True), (nothing, None), (nothing, True), (nothing, False)],
    ],
)
def test_what_changed_is_made_again(calls, device):
    model = build("Linear", device)
    other = copy.deepcopy(model)
    shape = shape_of("Linear", device)
    make_graphed_callables(
        other, (sample(shape, device),), fp8_enabled=True, fp8_recipe=DELAYED,
        fp8_weight_caching=True,
    )  # fmt: skip
    batches = draw(shape, device, 1, len(calls))[0]
    calls = [
        (change, x, dy, first) for (change, first), (x, dy) in zip(calls, batches, strict=True)
    ]
    run_both(model, other, calls)
    assert count_replays(other) == len(calls)


@each_recipe
def test_a_weight_that_is_an_argument(name, device):
    """Eager's one cache serves both weights, which it casts in each call, the graph in the first.

    A weight's largest element is that of its codes, so that delayed scaling's factor stays 1.
    """
    recipe, width = RECIPES[name], width_on(device)

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = Linear(width, width, False, skip_weight_param_allocation=True)

        def forward(self, x, first, second, is_first_microbatch=None):
            x = self.linear(x, first, is_first_microbatch=is_first_microbatch)
            return self.linear(x, second, is_first_microbatch=is_first_microbatch)

    model, other = Tied(), Tied()
    weights = [sample((width, width), device) for _ in range(2)]
    for weight in weights:
        weight.data.mul_(16)
        weight.data[0, 0] = 448
    shape = (TOKENS, width)
    make_graphed_callables(
        other, (sample(shape, device), *map(torch.clone, weights)), fp8_enabled=True,
        fp8_recipe=recipe, fp8_weight_caching=True,
    )  # fmt: skip
    for i, (x, dy) in enumerate(draw(shape, device, 1, 6)[0]):
        if i == 4:
            with torch.no_grad():
                weights[1].neg_()
        seen = []
        for m in (model, other):
            with fp8_autocast(True, recipe):
                out = m(x, *weights, is_first_microbatch=i == 0)
            seen.append([out.detach().clone(), *torch.autograd.grad(out, weights, dy)])
        assert_same_bits(*seen)
        assert all(t.float().isfinite().all() for t in seen[0])
    assert count_replays(other) == 6


def test_a_module_without_parameters(device):
    width = width_on(device)
    shape = (TOKENS, BATCH, HEADS, width // HEADS)
    model = DotProductAttention(HEADS, width // HEADS)
    other = copy.deepcopy(model)
    make_graphed_callables(other, tuple(sample(shape, device) for _ in range(3)))
    for _ in range(2):
        given = [sample(shape, device) for _ in range(3)]
        seen = []
        for m in (model, other):
            out = m(*given)
            seen.append([out.detach().clone(), *torch.autograd.grad(out.sum(), given)])
        assert_same_bits(*seen)
    assert count_replays(other) == 2
