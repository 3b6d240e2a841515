"""NaN and infinities in a module's input, weight or gradient show in what it gives, or are counted.

A recipe that keeps state counts them, as their FP8 data saturate; others give results that are not
finite, which a loss scaler sees.
"""

import math

import pytest
import torch
from module_cases import RECIPES, randomized, results
from schemes import ADDED
from torch._dynamo.utils import counters

from apex_te import amp, flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed.state import nonfinite_count
from apex_te.fp8.scheme import build_quantizers
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear

STATELESS = [name for name, recipe in RECIPES.items() if not recipe.keeps_state]
# What reads each tensor of a linear layer: the results that it must reach.
READ_BY = {"x": ("output 0", "weight"), "weight": ("output 0", "input"), "dy": ("input", "weight")}


def finite(tensor):
    return torch.isfinite(tensor).all().item()


def planted(shape, value, device, dtype=torch.float32, at=(3, 5)):
    x = torch.randn(shape).to(device, dtype)
    x[at] = value
    return x


@pytest.mark.parametrize("recipe", STATELESS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", READ_BY)
def test_reaches_every_result_that_reads_it(device, recipe, value, where):
    """One element among many blocks, also where the tensor is read transposed."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    module = Linear(160, 144, bias=False, device=device, params_dtype=dtype)
    x, dy = torch.randn(200, 160).to(device, dtype), torch.randn(200, 144).to(device, dtype)
    with torch.no_grad():
        {"x": x, "weight": module.weight, "dy": dy}[where][131, 133] = value
    count = nonfinite_count(device).item()
    found = results(module, x, None, [dy], RECIPES[recipe])
    for name, tensor in found.items():
        assert finite(tensor) == (name not in READ_BY[where]), name
    assert nonfinite_count(device).item() == count


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in STATELESS])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", READ_BY)
def test_a_recipe_with_state_counts_it(device, recipe, value, where):
    module = Linear(32, 48, bias=False, device=device)
    x, dy = torch.randn(64, 32).to(device), torch.randn(64, 48).to(device)
    with torch.no_grad():
        {"x": x, "weight": module.weight, "dy": dy}[where][3, 5] = value
    count = nonfinite_count(device).item()
    found = results(module, x, None, [dy], RECIPES[recipe])
    flush_fp8_state()
    assert nonfinite_count(device).item() == count + 1
    for name in READ_BY[where]:
        assert finite(found[name]) == math.isinf(value), name


# The blocks of an added recipe are for its own test to know.
@pytest.mark.parametrize("name", [name for name in STATELESS if name.split("-")[0] not in ADDED])
@pytest.mark.parametrize("pow2", [False, True])
def test_values_of_what_is_quantized(device, name, pow2):
    """Of an infinity's block or tensor no value is finite, in either layout; all others are."""
    recipe = RECIPES[name]
    if hasattr(recipe, "pow2"):
        recipe = type(recipe)(fp8_format=recipe.fp8_format, pow2=pow2)
    quantizers = build_quantizers(recipe, None, 1, device).recording[0]
    x = planted((256, 256), math.inf, device, at=(130, 3))
    for role, rows, cols in (("input", (1, 128), (128, 1)), ("weight", (128, 128), (128, 128))):
        if name.startswith("mxfp8"):
            rows, cols = (1, 32), (32, 1)
        elif name.startswith("rowwise"):
            rows, cols = (1, 256), (1, 256) if role == "weight" else (256, 1)
        elif not name.startswith("blockwise"):
            rows = cols = (256, 256)
        elif role == "input":
            cols = (128, 128)
        quantizer = getattr(quantizers, role)
        for layout, (height, width) in (("rowwise", rows), ("columnwise", cols)):
            made = quantizer.quantize(x, layout == "rowwise", layout == "columnwise")[0]
            values = quantizer.dequantize(made)
            if layout == "columnwise":
                assert made.rowwise is None
            expected = torch.ones(x.shape, dtype=torch.bool)
            top, left = 130 // height * height, 3 // width * width
            if name.startswith(
                "mxfp8"
            ):  # the elements of the block, whose common scale is 2^127, are zeros
                top, left, height, width = 130, 3, 1, 1
            expected[top : top + height, left : left + width] = False
            assert torch.equal(torch.isfinite(values).cpu(), expected)


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise-pow2", "delayed"])
@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_fused_producers(device, recipe, kind):
    """A norm's or an activation's infinity, of which there is no high-precision tensor."""
    options = {"bias": False, "device": device}
    module = kind(32, 48, **options)
    chosen = RECIPES.get(recipe)
    if chosen is None:
        chosen = type(RECIPES["tensorwise"])(pow2=True)
    x = torch.randn(64, 32).to(device)
    with torch.no_grad():
        module.layer_norm_weight[7] = math.inf
    count = nonfinite_count(device).item()
    with fp8_autocast(True, chosen):
        out = module(x)
    flush_fp8_state()
    assert not finite(out) or nonfinite_count(device).item() > count
    assert finite(out) == chosen.keeps_state


@pytest.mark.parametrize("name", STATELESS)
def test_high_precision_weight_gradients_and_saved_inputs(device, name):
    options = {"override_linear_precision": (False, False, True)}
    recipe = type(RECIPES[name])(fp8_format=RECIPES[name].fp8_format, **options)
    x, dy = planted((64, 32), math.inf, device), torch.randn(64, 48).to(device)
    for chosen, saved in ((recipe, False), (RECIPES[name], True)):
        module = Linear(32, 48, bias=False, device=device, save_original_input=saved)
        found = results(module, x, None, [dy], chosen)
        assert not finite(found["weight"])
        assert not finite(found["output 0"])
        assert finite(found["input"])


@pytest.mark.parametrize("name", STATELESS)
def test_an_expert_does_not_spoil_another(device, name):
    module = GroupedLinear(2, 32, 48, bias=False, device=device)
    x = planted((48, 32), math.inf, device)  # row 3 belongs to the first expert
    with fp8_autocast(True, RECIPES[name]):
        out = module(x, [16, 32])
    assert not finite(out[:16])
    assert finite(out[16:])


def test_the_loss_scaler_skips_the_step(device):
    """An overflow in a gradient that only FP8 products read."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(32, 32, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O7", loss_scale="dynamic", verbosity=0
    )
    before = [p.detach().clone() for p in model.parameters()]
    out = model(torch.randn(16, 32).to(device, next(model.parameters()).dtype))
    out.register_hook(lambda grad: grad.index_fill(0, torch.tensor([2], device=device), math.inf))
    with amp.scale_loss(out.float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.long
@pytest.mark.cover(0)
@pytest.mark.parametrize("name", ["tensorwise", "mxfp8"])
def test_compiled(device, name):
    torch._dynamo.reset()
    counters.clear()
    module = randomized(LayerNormMLP(32, 48, activation="swiglu", device=device))
    with torch.no_grad():
        module.layer_norm_weight[7] = math.inf
    backend = "aot_eager" if device.type == "cpu" else "inductor"
    run = torch.compile(module, backend=backend, fullgraph=True)
    x = torch.randn(64, 32).to(device)
    with fp8_autocast(True, RECIPES[name]):
        out = run(x)
    out.sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not finite(out)
    assert not finite(module.fc1_weight.grad)
    torch._dynamo.reset()


@pytest.mark.cuda
@pytest.mark.cuda
@pytest.mark.parametrize("name", STATELESS)
def test_in_a_graph_without_waiting(name):
    """The host learns nothing of it while it runs, and a replay shows it."""
    module = Linear(64, 48, device="cuda", params_dtype=torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.no_grad(), fp8_autocast(True, RECIPES[name]), torch.cuda.stream(stream):
        module(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = module(x)
    graph.replay()
    assert finite(out)
    x[3, 5] = math.inf
    graph.replay()
    assert not finite(out[3])
