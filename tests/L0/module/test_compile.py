"""torch.compile(fullgraph=True) of every module and recipe: eager's bits, without recompilation.

On the CPU, some pairs of a module and a recipe are in tests/L1/compile.
"""

import copy
import dataclasses

import pytest
import torch
from checks import needs_cuda
from module_cases import RECIPES, SCHEMES, randomized
from torch._dynamo.utils import counters

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.state import TENSORS
from apex_te.module.attention.dot_product import DotProductAttention
from apex_te.module.attention.multihead import MultiheadAttention
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.module.layer_norm import LayerNorm
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear
from apex_te.module.rms_norm import RMSNorm
from apex_te.module.transformer_layer import TransformerLayer
from apex_te.recipe import CurrentScaling, DelayedScaling

H = 32
GEMM_MODULES = {
    "Linear": lambda: Linear(H, 48),
    "LayerNormLinear": lambda: LayerNormLinear(H, 48, normalization="RMSNorm"),
    "gelu": lambda: LayerNormMLP(H, 48),
    "swiglu": lambda: LayerNormMLP(H, 48, activation="swiglu", normalization="RMSNorm"),
    "GroupedLinear": lambda: GroupedLinear(2, H, 48),
}
BLOCKS = {
    "MultiheadAttention": lambda: MultiheadAttention(H, 2, attention_dropout=0.0),
    "TransformerLayer": lambda: TransformerLayer(
        H, 48, 2, hidden_dropout=0.0, attention_dropout=0.0
    ),
}
PLAIN_MODULES = {
    "LayerNorm": lambda: LayerNorm(H),
    "RMSNorm": lambda: RMSNorm(H),
    "DotProductAttention": lambda: DotProductAttention(2, 16, attention_dropout=0.0),
}
MODULES = GEMM_MODULES | BLOCKS | PLAIN_MODULES
# Delayed scaling whose scales move; a step without scales that fit comes first.
MOVING = {**RECIPES, "delayed": DelayedScaling(amax_history_len=3)}
# Every module, every recipe. Tracing costs a second for each; the layer of a Transformer has others
# in it, and test_compile_regions has every recipe.
SHORT = [("TransformerLayer", "delayed")]  # GroupedLinear: test_grouped_single
PAIRS = [(name, "delayed") for name in (*GEMM_MODULES, *BLOCKS)]
PAIRS += [("gelu", recipe) for recipe in SCHEMES if recipe != "delayed"]
OTHER_PAIRS = [
    (name, recipe)
    for name in (*GEMM_MODULES, *BLOCKS)
    for recipe in SCHEMES
    if (name, recipe) not in PAIRS
]


@pytest.fixture(autouse=True)
def _no_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def call(name):
    """How to run the module on an input [8, 2, H]."""
    if name == "GroupedLinear":
        return lambda module, x: module(x.reshape(16, H), [10, 6])
    if name == "DotProductAttention":
        return lambda module, x: module(*(x.view(8, 2, 2, 16) * f for f in (1.0, 2.0, 3.0)))
    return lambda module, x: module(x)


def build(name, device):
    torch.manual_seed(5)
    module = MODULES[name]().to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    if hasattr(module, "layer_norm_weight"):
        randomized(module)
    return module


def compiled(module, device, on_cpu="aot_eager"):
    """On a CPU "eager" does for tests of guards: it makes the graphs, and nothing of them."""
    backend = on_cpu if device.type == "cpu" else "inductor"
    return torch.compile(module, backend=backend, fullgraph=True)


def train(name, module, run, regions, device, dtype=None):
    """One step in each of ``regions`` (enabled, recipe); results by name, graphs after each."""
    found, graphs = {}, []
    generator = torch.Generator().manual_seed(6)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for step, (enabled, recipe) in enumerate(regions):
        x = torch.randn(8, 2, H, generator=generator).to(device, dtype).requires_grad_()
        module.zero_grad()
        with fp8_autocast(enabled, recipe):
            out = call(name)(run, x)
        out.square().mean().backward()
        found |= {f"{step} output": out.detach(), f"{step} input": x.grad}
        found |= {f"{step} {n}": p.grad.clone() for n, p in module.named_parameters()}
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(0.1 * p.grad)
        graphs.append(counters["stats"]["unique_graphs"])
    flush_fp8_state()
    for path, part in module.named_modules():
        state = getattr(part, "fp8_state", None)
        if state is not None and state.allocated:
            found |= {f"state {path} {n}": getattr(state, n).clone() for n in TENSORS}
    return found, graphs


def check(name, device, regions, on_cpu="eager"):
    """The compiled module against its eager twin; the number of graphs after each step."""
    eager = build(name, device)
    other = copy.deepcopy(eager)
    expected, _ = train(name, eager, eager, regions, device)
    counters.clear()
    found, graphs = train(name, other, compiled(other, device, on_cpu), regions, device)
    assert graphs[0] == 1, "nothing was compiled"
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key
    return graphs


def check_steps(name, recipe, device):
    """From a cold state: the first forward is a compiled one."""
    graphs = check(name, device, [(True, MOVING[recipe])] * 4, "aot_eager")
    assert len(set(graphs[1:])) == 1


@pytest.mark.parametrize(
    ("name", "recipe"),
    [pytest.param(*p, marks=() if p in SHORT else pytest.mark.long) for p in PAIRS],
)
def test_equals_eager(device, name, recipe):
    check_steps(name, recipe, device)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize(("name", "recipe"), OTHER_PAIRS)
def test_other_pairs_equal_eager(name, recipe):
    check_steps(name, recipe, torch.device("cuda"))


@pytest.mark.cover(0)
@pytest.mark.parametrize("name", MODULES)
def test_equals_eager_without_fp8(device, name):
    assert check(name, device, [(False, None)] * 3, "aot_eager") == [1, 1, 1]


@pytest.mark.cover(0)
@pytest.mark.parametrize("name", PLAIN_MODULES)
def test_modules_without_products_ignore_fp8(device, name):
    graphs = check(name, device, [(True, DelayedScaling())] * 3)
    assert len(set(graphs[1:])) == 1


def test_first_steps_of_models_that_begin_one_after_the_other(device):
    """A first step has a graph of its own, also of a model that waits while others have theirs."""
    recipe = DelayedScaling(amax_history_len=3, first_step="current")
    results = []
    for is_compiled in (False, True):
        counters.clear()
        for module in [build("Linear", device) for _ in range(2)]:  # both exist from the start
            run = compiled(module, device) if is_compiled else module
            found, graphs = train("Linear", module, run, [(True, recipe)] * 3, device)
            assert (graphs[0] > 0) == is_compiled
            assert graphs[1] == graphs[2]
            results.append(found)
    for eager, found in zip(results[:2], results[2:], strict=True):
        for key, value in eager.items():
            assert torch.equal(found[key], value), key


@pytest.mark.long
def test_a_warm_state(device):
    """Eager steps first, compiled ones then."""
    recipe, name = MOVING["delayed"], "swiglu"
    eager = build(name, device)
    train(name, eager, eager, [(True, recipe)] * 2, device)
    other = copy.deepcopy(eager)
    found = [
        train(name, m, run, [(True, recipe)] * 2, device)[0]
        for m, run in ((eager, eager), (other, compiled(other, device)))
    ]
    for key, value in found[0].items():
        assert torch.equal(found[1][key], value), key


@pytest.mark.long  # in short: test_a_changed_recipe_is_followed, which returns to equal ones
@pytest.mark.parametrize("recipe", SCHEMES)
def test_equal_recipes_share_a_graph(device, recipe):
    regions = [(True, dataclasses.replace(MOVING[recipe])) for _ in range(4)]
    assert len({id(r) for _, r in regions}) == 4
    graphs = check("Linear", device, regions)
    assert len(set(graphs[1:])) == 1


def test_a_changed_recipe_is_followed(device):
    a, b = MOVING["delayed"], MOVING["delayed-e4m3"]
    b = dataclasses.replace(b, amax_history_len=3, first_step="scale_one")
    regions = [(True, r) for r in (a, b, CurrentScaling(), a, b, CurrentScaling(), a, b)]
    graphs = check("Linear", device, regions)
    assert graphs[3] == graphs[-1] <= 3


def test_enabled_and_disabled_regions(device):
    regions = [(enabled, MOVING["blockwise"]) for enabled in (True, False, True, False, True)]
    graphs = check("Linear", device, regions)
    assert graphs[2] == graphs[-1] == 2


@pytest.mark.cover(0)
@pytest.mark.parametrize("recipe", SCHEMES)
def test_without_gradients(device, recipe):
    module = build("swiglu", device)
    x = torch.randn(8, 2, H).to(device, next(module.parameters()).dtype)
    run = compiled(module, device)
    with torch.no_grad(), fp8_autocast(True, RECIPES[recipe]):
        expected, found = module(x), run(x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Linear, {"parameters_split": ("a", "b")}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (Linear, {"fuse_wgrad_accumulation": True}),
                (LayerNormLinear, {"return_bias": True, "return_layernorm_output": True}),
                (Linear, {"save_original_input": True}),
                (Linear, {"return_bias": True}),
                (LayerNormMLP, {"return_bias": True, "return_layernorm_output": True}),
            )
        ),
    ],
)
def test_options(device, kind, options):
    """A matrix as input, whose further outputs are no views of their own."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    module, found = kind(H, H, device=device, params_dtype=dtype, **options), []
    x = torch.randn(16, H).to(device, dtype)
    for run in (module, compiled(module, device)):
        inp = x.clone().requires_grad_()
        for p in module.parameters():
            p.grad, p.main_grad = None, torch.zeros_like(p)
        with fp8_autocast(True, RECIPES["tensorwise"]):
            out = run(inp)
        out = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(out, [torch.ones_like(t) for t in out])
        grads = [g for p in module.parameters() for g in (p.grad, p.main_grad) if g is not None]
        found.append([*out, inp.grad, *grads])
    assert counters["stats"]["unique_graphs"] == 1
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(b, a) for a, b in zip(*found, strict=True))


def test_another_number_of_rows(device):
    """At most one graph more serves all sizes."""
    module = build("LayerNormLinear", device)
    run = compiled(module, device, "eager")
    graphs = []
    for rows in (8, 12, 20):
        x = torch.randn(rows, H).to(device, next(module.parameters()).dtype)
        with fp8_autocast(True, RECIPES["tensorwise"]):
            found, expected = run(x), module(x)
        torch.testing.assert_close(found, expected)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[-1] <= 2
