"""is_first_microbatch in compiled modules: the FP8 weights that eager keeps, and its bits."""

import copy
import dataclasses

import pytest
import torch
from module_cases import SCHEMES
from test_compile_regions import REGIONS, H, build, compiled, counters, states

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.module.linear import Linear
from apex_te.recipe import DelayedScaling

OTHERS = [recipe for recipe in SCHEMES if recipe != "delayed"]
FLAGS = [True, False, False, True, False, False]


@pytest.fixture(autouse=True)
def _no_graphs():
    torch._dynamo.reset()
    counters.clear()
    amax_groups.pending = 0
    yield
    torch._dynamo.reset()


def train(module, run, recipe, device, inside=False):
    """Microbatches of two steps; a weight that changes in between is made again."""
    amax_groups.pending = 0
    found, graphs = {}, []
    generator = torch.Generator().manual_seed(6)
    for i, first in enumerate(FLAGS):
        x = torch.randn(8, 2, H, generator=generator)
        x = x.to(device, next(module.parameters()).dtype).requires_grad_()
        if inside:
            out = run(x, first)
        else:
            with fp8_autocast(True, recipe):
                out = run(x, is_first_microbatch=first)
        out.float().square().mean().backward()
        found |= {f"{i} output": out.detach(), f"{i} input": x.grad}
        found |= {f"{i} {n}": t for n, t in states(module).items()}
        if i in (2, 4):
            with torch.no_grad():
                for n, p in module.named_parameters():
                    found[f"{i} {n}"] = p.grad.clone()
                    p.sub_(0.1 * p.grad)
        graphs.append(counters["stats"]["unique_graphs"])
    flush_fp8_state()
    return found | states(module), graphs


def compare(found, expected):
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize(
    ("name", "recipe", "interval"),
    [
        ("Linear", "delayed", 1),
        pytest.param("Linear", "delayed", 3, marks=pytest.mark.long),
        pytest.param("LayerNormMLP", "delayed", 1, marks=pytest.mark.long),
        *(pytest.param("Linear", r, 1, marks=pytest.mark.long) for r in OTHERS),
    ],
)
def test_equals_eager(device, name, recipe, interval):
    """With an interval of 1 the live scale moves while the kept weight's does not."""
    chosen = dataclasses.replace(REGIONS[recipe], interval=interval)
    module = build(name, device)
    other = copy.deepcopy(module)
    expected, _ = train(module, module, chosen, device)
    counters.clear()
    found, graphs = train(other, compiled(other, device), chosen, device)
    assert graphs[0] >= 1
    assert graphs[2] == graphs[-1]
    compare(found, expected)


@pytest.mark.long
@pytest.mark.cover(0)
@pytest.mark.parametrize("inside", [True, False])
def test_regions_inside_and_first_steps(device, inside):
    recipe = dataclasses.replace(REGIONS["delayed"], first_step="current")
    module = build("LayerNormMLP", device)
    other = copy.deepcopy(module)

    def entering(module):
        def run(x, first):
            with fp8_autocast(True, recipe):
                return module(x, is_first_microbatch=first)

        return run if inside else module

    expected, _ = train(module, entering(module), recipe, device, inside)
    found, _ = train(other, compiled(entering(other), device), recipe, device, inside)
    compare(found, expected)


@pytest.mark.long
def test_split_parameters(device):
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    options = {"parameters_split": ("a", "b"), "device": device, "params_dtype": dtype}
    module = Linear(H, H, **options)
    other = copy.deepcopy(module)
    expected, _ = train(module, module, REGIONS["delayed"], device)
    compare(train(other, compiled(other, device), REGIONS["delayed"], device)[0], expected)


@pytest.mark.cover(0)
@pytest.mark.parametrize("first", [True, False])
def test_an_evaluation(device, first):
    module = build("LayerNormMLP", device)
    train(module, module, REGIONS["delayed"], device)
    run = compiled(module, device, "eager")
    x = torch.randn(8, 2, H).to(device, next(module.parameters()).dtype)
    with torch.no_grad(), fp8_autocast(True, REGIONS["delayed"]):
        found = [run(x, is_first_microbatch=first) for _ in range(2)]
        expected = module(x)
    assert all(torch.equal(out, expected) for out in found)


def test_a_delayed_weight_gradient_is_refused(device):
    """Dynamo: 'HOP: Unsafe side effect', the list that backward_dw reads."""
    module = Linear(H, H, delay_wgrad_compute=True, device=device)
    x = torch.randn(8, H, device=device, requires_grad=True)
    with (
        fp8_autocast(True, REGIONS["tensorwise"]),
        pytest.raises(Exception, match="delay_wgrad_compute must be False inside of a graph"),
    ):
        compiled(module, device)(x)
    torch._dynamo.reset()
    with fp8_autocast(True, REGIONS["tensorwise"]):
        torch.compile(module, backend="eager")(x).sum().backward()  # breaks the graph
    assert module.weight.grad is None
    module.backward_dw()
    assert module.weight.grad is not None


def test_another_weight_at_the_same_address_is_cast_again():
    numpy = pytest.importorskip("numpy")
    module, x = Linear(H, H, bias=False), torch.randn(8, H)
    run = torch.compile(
        lambda w, first: module(x, weight=w, is_first_microbatch=first), backend="eager"
    )
    memory = numpy.empty((H, H), numpy.float32)
    for i, first in enumerate([True, False, False]):
        memory[...] = 2.0**i
        weight = torch.from_numpy(memory)  # of version 0, as a weight that was made anew
        with fp8_autocast(True, DelayedScaling(interval=100)):
            assert torch.equal(run(weight, first), module(x, weight=weight)), i
