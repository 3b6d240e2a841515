"""fp8_autocast entered inside of what torch.compile(fullgraph=True) compiles."""

import contextlib
import copy
import dataclasses

import pytest
import torch
from module_cases import RECIPES, SCHEMES, randomized
from torch._dynamo.utils import counters

from apex_te import amp, flush_fp8_state, fp8_autocast, init_fp8_state, is_fp8_enabled
from apex_te.fp8 import autocast
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear
from apex_te.module.transformer_layer import TransformerLayer
from apex_te.recipe import CurrentScaling, DelayedScaling

H = 32
MOVING = DelayedScaling(amax_history_len=3)
REGIONS = {**RECIPES, "delayed": MOVING}
MODULES = {
    "Linear": lambda: Linear(H, H),
    "LayerNormMLP": lambda: LayerNormMLP(H, 48, activation="swiglu", normalization="RMSNorm"),
    "TransformerLayer": lambda: TransformerLayer(
        H, 48, 2, hidden_dropout=0.0, attention_dropout=0.0
    ),
}


@pytest.fixture(autouse=True)
def _no_graphs():
    torch._dynamo.reset()
    counters.clear()
    amax_groups.pending = 0
    yield
    torch._dynamo.reset()


def build(name, device):
    torch.manual_seed(5)
    module = MODULES[name]().to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    return randomized(module) if hasattr(module, "layer_norm_weight") else module


def compiled(function, device, on_cpu="aot_eager"):
    """On a CPU "eager" does for what happens on entering and leaving regions."""
    backend = on_cpu if device.type == "cpu" else "inductor"
    return torch.compile(function, backend=backend, fullgraph=True)


def states(module):
    found = {}
    for path, part in module.named_modules():
        state = getattr(part, "fp8_state", None)
        if state is not None and state.allocated:
            found |= {f"state {path} {n}": getattr(state, n).clone() for n in TENSORS}
    return found


def train(module, run, device, steps=4, between=contextlib.nullcontext):
    """Steps of ``run(x)``; results by name, the state after each step, graphs after each."""
    amax_groups.pending = 0
    found, graphs = {}, []
    generator = torch.Generator().manual_seed(6)
    for step in range(steps):
        x = torch.randn(8, 2, H, generator=generator)
        x = x.to(device, next(module.parameters()).dtype).requires_grad_()
        module.zero_grad()
        out = run(x)
        assert not is_fp8_enabled()
        out.float().square().mean().backward()
        found |= {f"{step} output": out.detach(), f"{step} input": x.grad}
        found |= {f"{step} {n}": p.grad.clone() for n, p in module.named_parameters()}
        found |= {f"{step} {n}": t for n, t in states(module).items()}
        found[f"{step} pending"] = torch.tensor(amax_groups.pending)
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(0.1 * p.grad)
        with between():
            graphs.append(counters["stats"]["unique_graphs"])
    flush_fp8_state()
    return found | states(module), graphs


def check(module, function, device, steps=4, on_cpu="eager"):
    """``function(module, x)`` compiled against itself in eager mode; the graphs of each step."""
    other = copy.deepcopy(module)
    expected, _ = train(module, lambda x: function(module, x), device, steps)
    counters.clear()
    run = compiled(lambda x: function(other, x), device, on_cpu)
    found, graphs = train(other, run, device, steps)
    assert graphs[0] == 1, "nothing was compiled"
    assert graphs[1] == graphs[-1]
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key
    return graphs


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("LayerNormMLP", "delayed"),
        ("Linear", "blockwise"),
        *(
            pytest.param(name, r, marks=pytest.mark.long)
            for name in MODULES
            for r in (SCHEMES if name != "TransformerLayer" else ["delayed"])
            if (name, r) not in (("LayerNormMLP", "delayed"), ("Linear", "blockwise"))
        ),
    ],
)
def test_equals_eager(device, name, recipe):
    """Results and state, from a cold state on."""

    def function(module, x):
        with fp8_autocast(True, REGIONS[recipe]):
            return module(x)

    check(build(name, device), function, device, on_cpu="aot_eager")


def test_a_decorator(device):
    @fp8_autocast(True, MOVING)
    def function(module, x):
        return module(x)

    check(build("Linear", device), function, device, 3)


def test_the_default_recipe_and_nested_regions(device):
    class Four(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = build("Linear", device)
            # Not one module three times: inductor adds up its gradients without rounding between.
            self.plain, self.other, self.last = (build("Linear", device) for _ in range(3))

    def function(module, x):
        with fp8_autocast():
            x = module.first(x)
            with fp8_autocast(False):
                x = torch.relu(module.plain(x))
            with fp8_autocast(True, CurrentScaling()):
                x = module.other(x)
            return module.last(x)

    module = Four()
    init_fp8_state(module)  # in a graph every module gets its state, in eager those that run in FP8
    check(module, function, device)


@pytest.mark.long
@pytest.mark.parametrize("interval", [1, 3])
def test_several_regions_in_one_graph(device, interval):
    """Each counts; scales of the first move on entering the second where one region is enough."""
    recipe = dataclasses.replace(MOVING, interval=interval)

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = build("Linear", device), build("Linear", device)

    def function(module, x):
        with fp8_autocast(True, recipe):
            x = module.a(x)
        with fp8_autocast(True, recipe):
            return module.b(module.a(x))

    check(Two(), function, device, 5)


@pytest.mark.long
def test_first_step_current(device):
    recipe = dataclasses.replace(MOVING, first_step="current")

    def function(module, x):
        with fp8_autocast(True, recipe):
            return module(x)

    check(build("LayerNormMLP", device), function, device)


def test_calibration(device):
    def function(module, x):
        with fp8_autocast(False, MOVING, calibrating=True):
            return module(x)

    check(build("Linear", device), function, device)


def test_regions_inside_and_outside_take_turns(device):
    """Eager and compiled steps, other models in between: what the eager ones alone would do."""
    found = []
    for is_compiled in (False, True):
        module, other = build("LayerNormMLP", device), build("Linear", device)

        def function(x, module=module):
            with fp8_autocast(True, MOVING):
                return module(x)

        steps = [function, compiled(function, device, "eager") if is_compiled else function]

        def run(x, steps=steps, other=other):
            steps.reverse()
            with fp8_autocast(True, MOVING):
                other(x)
            return steps[0](x)

        results, _ = train(module, run, device, 6)
        found.append(results | states(other))
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


@pytest.mark.long
def test_recipes_take_turns(device):
    """One graph for each; scales move with the format, as in eager mode."""
    recipes = [MOVING, dataclasses.replace(RECIPES["delayed-e4m3"], amax_history_len=3)]
    found = []
    for is_compiled in (False, True):
        module = build("Linear", device)

        def function(x, recipe, module=module):
            with fp8_autocast(True, recipe):
                return module(x)

        call = compiled(function, device) if is_compiled else function

        def run(x, call=call):
            recipes.reverse()
            return call(x, recipes[0])

        results, graphs = train(module, run, device, 6)
        found.append(results)
    assert graphs[2] == graphs[-1]
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


@pytest.mark.cover(0)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_moves_nothing(device, mode):
    module = build("LayerNormMLP", device)

    def function(x):
        with fp8_autocast(True, MOVING):
            return module(x)

    train(module, function, device, 2)
    before, pending = states(module), amax_groups.pending
    x = torch.randn(8, 2, H).to(device, next(module.parameters()).dtype)
    with mode():
        assert torch.equal(compiled(function, device)(x), function(x))
    assert amax_groups.pending == pending
    assert all(torch.equal(value, before[key]) for key, value in states(module).items())


@pytest.mark.long
@pytest.mark.parametrize("level", ["O6", "O7"])
def test_amp(device, level):
    """An FP8 level's forward enters the region itself."""

    def make():
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(H, 48), torch.nn.GELU(), torch.nn.LayerNorm(48), torch.nn.Linear(48, H)
        ).to(device)
        return amp.initialize(model, opt_level=level, verbosity=0)

    model, other = make(), make()
    expected, _ = train(model, model, device)
    counters.clear()
    found, graphs = train(other, compiled(other, device), device)
    assert graphs[0] == 1
    assert graphs[1] == graphs[-1]
    assert any("state" in key for key in found) == (level == "O6")
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


def _break_before(layer, x, region):
    torch._dynamo.graph_break()
    with region():
        return layer(x)


def _break_inside(layer, x, region):
    with region():
        y = layer(x)
        torch._dynamo.graph_break()
        return layer(y)


def _break_in_a_decorated_function(layer, x, region):
    @region()
    def run(x):
        torch._dynamo.graph_break()
        return layer(x)

    return run(x)


def _branch_on_values(layer, x, region):
    with region():
        y = layer(x)
        return layer(y if y.sum() > 0 else -y)


BREAKS = [
    _break_inside,
    _break_in_a_decorated_function,
    pytest.param(_break_before, marks=pytest.mark.long),
    pytest.param(_branch_on_values, marks=pytest.mark.long),
]


@pytest.mark.cover(0)
@pytest.mark.parametrize("function", BREAKS)
@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_graphs_that_break_run_in_fp8(device, name, function):
    """Layers on both sides of a graph break give the bits of eager code, and the region ends."""
    recipe = REGIONS[name]
    made = build("Linear", device)
    batches = [torch.randn(16, H, device=device, dtype=made.weight.dtype) * i for i in (1, 2, 3)]
    found = []
    for call in (function, torch.compile(function, backend="eager")):
        layer = copy.deepcopy(made)
        flush_fp8_state()
        tensors = []
        for x in batches:
            out = call(layer, x, lambda: fp8_autocast(fp8_recipe=recipe))
            assert not is_fp8_enabled()
            out.square().sum().backward()
            tensors.append(out)
        found.append([*tensors, layer.weight.grad, *states(layer).values()])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


def test_a_torch_without_the_switch_warns(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    with pytest.warns(RuntimeWarning, match="use regions with fullgraph=True alone"):
        autocast._run_eagerly(autocast.fp8_autocast.__enter__)


@pytest.mark.parametrize(
    ("name", "fullgraph"),
    [
        ("tensorwise", False),
        pytest.param("delayed", True, marks=pytest.mark.long),
        pytest.param("blockwise", True, marks=pytest.mark.long),
    ],
)
def test_dynamic_sizes(device, name, fullgraph):
    """Compiled with dynamic=True, where a recipe's numbers become variables, layers equal eager."""
    layer = build("Linear", device)
    other = copy.deepcopy(layer)

    def forward(layer, x, recipe):
        with fp8_autocast(fp8_recipe=recipe):
            return layer(x)

    recipe = REGIONS[name]
    run = torch.compile(forward, backend="aot_eager", dynamic=True, fullgraph=fullgraph)
    for rows in (16, 48):
        x = torch.randn(rows, H, device=device, dtype=layer.weight.dtype)
        flush_fp8_state()
        expected = forward(layer, x, recipe)
        flush_fp8_state()
        assert torch.equal(run(other, x, recipe), expected)
        assert not is_fp8_enabled()
    if name == "delayed":
        return
    coarse = dataclasses.replace(recipe, eps=1e3)
    result = forward(layer, x, coarse)
    assert not torch.equal(result, expected)
    assert torch.equal(run(other, x, coarse), result)


def test_a_recipe_may_be_named_or_made_in_compiled_code(device):
    module = build("Linear", device)
    x = torch.randn(16, H, device=device, dtype=module.weight.dtype)

    def step(x):
        with fp8_autocast("tensorwise"):
            first = module(x)
        with autocast.autocast(recipe=CurrentScaling(fp8_format="e4m3", pow2=True)):
            return first + module(x)

    expected = step(x)
    torch.testing.assert_close(compiled(step, device, "eager")(x), expected, rtol=0, atol=0)
    assert not torch.equal(expected, 2 * module(x))
