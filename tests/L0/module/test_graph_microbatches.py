"""Graphs of several microbatches in flight, as pipeline schedules have them, against eager."""

import copy

import pytest
import torch
from graph_stand_in import graphs_on_cpu  # noqa: F401 (a fixture)
from module_cases import RECIPES

from apex_te import LayerNormLinear, LayerNormMLP, Linear, flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.state import TENSORS
from apex_te.graphs.microbatches import graph_microbatches

WIDTH, ROWS = 32, 16
# Chunks 1 and 2 of interleaved pipeline stages; layers of each.
LAYERS = [2, 1]
ORDERS = {
    "interleaved": [1, 1, 2, -2, 2, -2, -1, -1],
    "three in flight": [1, 1, 1, 2, -2, 2, -2, -1, 2, -2, -1, -1],
}


def build(device):
    torch.manual_seed(5)
    kinds = (Linear, LayerNormLinear)
    layers = [kind(WIDTH, WIDTH, device=device) for kind in kinds]
    return torch.nn.ModuleList([*layers, LayerNormMLP(WIDTH, 2 * WIDTH, device=device)])


def microbatches_of(order):
    return order.count(1)


def graphed(model, order, device, recipe, caching=False, **options):
    count = len(model) * microbatches_of(order)
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    return graph_microbatches(
        tuple(model), [(x,)] * count, order, LAYERS, fp8_enabled=recipe is not None,
        fp8_recipe=recipe, fp8_weight_caching=caching, **options,
    )  # fmt: skip


class Pipeline:
    """Runs a schedule with layers or their graphs, and notes what each microbatch gives."""

    def __init__(self, model, order, graphs=None, recipe=None, caching=False):
        self.model, self.order, self.graphs = model, order, graphs
        self.recipe, self.caching = recipe, caching

    def layers(self, chunk, microbatch):
        start, count = sum(LAYERS[:chunk]), LAYERS[chunk]
        if self.graphs is None:
            return [self.model[i] for i in range(start, start + count)]
        at = start * microbatches_of(self.order) + microbatch * count
        return self.graphs[at : at + count]

    def step(self, number, order=None):
        """Returns outputs and gradients of one step; scales move between its forwards."""
        device = next(self.model.parameters()).device
        done = dict.fromkeys(self.order, 0)
        inputs, outputs, seen = {}, {}, []
        for entry in self.order if order is None else order:
            chunk, microbatch = abs(entry) - 1, done[entry]
            done[entry] += 1
            if entry > 0:
                torch.manual_seed(100 * number + microbatch)
                x = torch.randn(ROWS, WIDTH) * (1 + microbatch + number)
                x = x.to(device) if chunk == 0 else outputs[chunk - 1, microbatch].detach().clone()
                inputs[chunk, microbatch] = x.requires_grad_()
                options = {"is_first_microbatch": microbatch == 0} if self.caching else {}
                with fp8_autocast(self.recipe is not None, self.recipe):
                    for layer in self.layers(chunk, microbatch):
                        x = layer(x, **options)
                outputs[chunk, microbatch] = x
                seen.append(x.detach().clone())
            else:
                following = inputs.get((chunk + 1, microbatch))
                dy = torch.cos(outputs[chunk, microbatch]) if following is None else following.grad
                outputs[chunk, microbatch].backward(dy.detach().clone())
                seen.append(inputs[chunk, microbatch].grad.clone())
        seen += [p.grad.clone() for p in self.model.parameters()]
        with torch.no_grad():
            for p in self.model.parameters():
                p.sub_(p.grad, alpha=0.01)
                p.grad = None
        return seen


def states(model):
    found = [m.fp8_state for m in model if m.fp8_state.allocated]
    return [getattr(state, name).clone() for state in found for name in TENSORS]


@pytest.fixture(autouse=True)
def _graphs(request, device):
    if device.type == "cpu":
        request.getfixturevalue("graphs_on_cpu")


@pytest.mark.cover(2)
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_equals_eager(order, recipe, caching, device):
    recipe = RECIPES.get(recipe)
    caching = caching and recipe is not None
    model = build(device)
    other = copy.deepcopy(model)
    forwards = [layer.forward for layer in other]
    graphs = graphed(other, order, device, recipe, caching)
    assert [layer.forward for layer in other] == forwards
    runs = (
        Pipeline(model, order, None, recipe, caching),
        Pipeline(other, order, graphs, recipe, caching),
    )
    for number in range(4):
        expected, found = (run.step(number) for run in runs)
        flush_fp8_state()
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
        assert all(map(torch.equal, states(other), states(model)))
    # The first step of a recipe that takes first scales from its own tensors is partly eager.
    assert all(graph.capture.run >= 3 for graph in graphs)


def test_another_order_is_refused(device):
    order = ORDERS["interleaved"]
    model = build(device)
    run = Pipeline(model, order, graphed(model, order, device, None))
    run.step(0)
    with pytest.raises(RuntimeError, match="in the order of _order, got a backward"):
        run.step(1, [1, 2, 1, -2, 2])
    with pytest.raises(RuntimeError, match="in the order of _order, got a backward"):
        run.step(2, [1, 1, 2, 2, -2, -2])
    for p in model.parameters():
        p.grad = None
    run.step(3)  # from the beginning


def test_a_reset_graph_runs_eagerly(device):
    order = ORDERS["interleaved"]
    model = build(device)
    graphs = graphed(model, order, device, None)
    expected = Pipeline(model, order, graphs).step(0)
    for graph in graphs:
        graph.reset()
    again = build(device)
    found = Pipeline(again, order, graphed(again, order, device, None)).step(0)
    assert all(map(torch.equal, found, expected))
    Pipeline(model, order, graphs).step(1)
    assert all(not graph.replayed for graph in graphs)


@pytest.mark.parametrize(
    ("order", "layers", "error", "message"),
    [
        ([1, 1, -1], None, ValueError, "_order must have, for each chunk 1 to 1, equally many"),
        ([-1, 1], None, ValueError, "each with a later backward"),
        ([1, 2, -2, -1, 1, -1], None, ValueError, "equally many forwards"),
        ([1, 0, -1], None, ValueError, "_order must have"),
        ([], None, ValueError, "_order must have"),
        ([1, -1, -0.5], None, TypeError, "_order must hold ints, got -0.5"),
        ([1, -1], [2], ValueError, r"_num_layers_per_chunk must give the layers of 1 chunks, 3"),
        ([1, 2, -2, -1], None, ValueError, r"3 together, got \[1, 1\]"),
        ([1, 1, -1, -1], [3], ValueError, "sample_args must be given for each layer and micro"),
    ],
)
def test_schedules_are_checked(order, layers, error, message, device):
    model, x = build(device), torch.randn(ROWS, WIDTH, device=device)
    with pytest.raises(error, match=message):
        graph_microbatches(tuple(model), [(x,)] * 3, order, layers)
