"""fp8_statistics: what is noted, and of which parts of a model."""

import copy
import sys

import pytest
import torch
from checks import needs_cuda
from schemes import FIRST_STEP, SCHEMES, scales_blocks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize, prune

from apex_te import GroupedLinear, Linear, TransformerLayer, flush_fp8_state, fp8_autocast
from apex_te.fp8.statistics import fp8_statistics
from apex_te.module.attention.multihead import MultiheadAttention
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.recipe import DelayedScaling, Format, make_recipe

RECIPES = {**SCHEMES, "first step": FIRST_STEP}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def step(model, x, recipe, **kwargs):
    with fp8_autocast(True, recipe):
        out = model(x, **kwargs)
    out.square().sum().backward()
    return out


def state(model):
    """Parameters, gradients and FP8 state."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.state_dict().values(), *grads]


@each_recipe
def test_results_do_not_change(recipe, device):
    model = torch.nn.Sequential(Linear(48, 64), LayerNormMLP(64, 96, activation="swiglu"))
    model = model.to(device)
    other = copy.deepcopy(model)
    xs = torch.randn(4, 32, 48).to(device)
    for i, x in enumerate(xs):
        plain = step(model, x, recipe)
        if i in (1, 2):
            with fp8_statistics(other) as stats:
                observed = step(other, x, recipe)
            assert len(stats.to_dict()) == 9
        else:
            observed = step(other, x, recipe)
        assert torch.equal(plain, observed)
        flush_fp8_state()
        for a, b in zip(state(model), state(other), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
def test_values_by_hand(fp8_format, device):
    recipe = DelayedScaling(amax_history_len=4, fp8_format=fp8_format)
    model = Linear(4, 4, bias=False, device=device)
    torch.nn.init.constant_(model.weight, 0.5)
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[449.0, 448, 1, 2.0**-10], [2.0**-9, 0, -0.0, -1e-9]])
    bad = torch.tensor([[nan, inf, -inf, 1], [4, 2.0**-20, 0, 1]])
    with fp8_statistics(model) as stats:
        for inp in (x, bad):
            with fp8_autocast(True, recipe):
                out = model(inp.to(device))
            out.backward(torch.tensor([[2.0**-18, 1000, 0, 1], [1, 1, 1, 1]]).to(device))
    noted = stats.to_dict()
    assert list(noted) == ["Linear.input", "Linear.weight", "Linear.grad_output"]
    inp = noted["Linear.input"]
    # 2^-10 is half of the smallest E4M3 number, a tie that goes to zero; 448 does not saturate
    assert inp["step"] == [0, 1]
    assert inp["amax"] == [449, 4]
    assert inp["saturation_rate"][0] == 1 / 8
    assert inp["underflow_rate"][0] == 2 / 6
    assert inp["nonfinite"] == [0, 3]
    # of the second step the scale is 448 / 449, and 2^-20 the only one of four that vanishes
    assert inp["scale_min"] == inp["scale_max"]
    assert inp["scale_max"] == pytest.approx([1, 448 / 449], rel=1e-6)
    assert inp["saturation_rate"][1] == 0
    assert inp["underflow_rate"][1] == 1 / 4
    grad = noted["Linear.grad_output"]
    is_hybrid = fp8_format is Format.HYBRID
    assert grad["amax"] == [1000, 1000]
    assert grad["saturation_rate"][0] == (0 if is_hybrid else 1 / 8)
    assert grad["underflow_rate"][0] == 1 / 7  # 2^-18 is below half of 2^-16 and of 2^-9
    assert grad["scale_max"][1] == pytest.approx((57344 if is_hybrid else 448) / 1000, rel=1e-6)
    assert noted["Linear.weight"]["amax"] == [0.5, 0.5]


def test_current_scaling_brings_the_amax_to_the_largest_value(device):
    model = Linear(64, 64, device=device)
    for seed in range(20):
        torch.manual_seed(seed)
        with fp8_statistics(model) as stats:
            step(model, torch.randn(16, 64).to(device), make_recipe("tensorwise", "e4m3"))
        for series in stats.to_dict().values():
            assert series["saturation_rate"] == [0]  # despite the roundings of its scale
            scale = pytest.approx(448 / series["amax"][0], rel=1e-6)
            assert series["scale_min"] == series["scale_max"] == [scale]


def test_hif8_has_no_negative_zero(device):
    model = Linear(16, 16, device=device)
    x = torch.full((4, 16), -1.0, device=device)
    x[0, 0], x[0, 1] = 2.0**18, float("nan")  # NaN has the code of a negative zero
    with fp8_statistics(model) as stats:
        step(model, x, make_recipe("tensorwise", "hif8"))
    series = stats.to_dict()["Linear.input"]
    assert series["nonfinite"] == [1]
    assert series["underflow_rate"] == [0]
    assert series["saturation_rate"] == [1 / 64]  # a NaN leaves the scale at 1
    x = torch.full((4, 16), 2.0**-10, device=device)
    x[0, 0] = 2.0**18  # the others become 15 * 2^-28, below half of 2^-22
    with fp8_statistics(model) as stats:
        step(model, x, make_recipe("tensorwise", "hif8"))
    series = stats.to_dict()["Linear.input"]
    assert series["underflow_rate"] == [63 / 64]
    assert series["scale_max"] == [pytest.approx(15 * 2.0**-18, rel=1e-6)]


@pytest.mark.parametrize(("name", "block"), [("blockwise", 128), ("mxfp8", 32)])
def test_blocks_have_a_smallest_and_a_largest_scale(name, block, device):
    model = Linear(2 * block + 3, 16, device=device)
    x = torch.zeros(5, 2 * block + 3, device=device)
    x[:, :block] = 448 * 2.0**-6
    x[:, block : 2 * block] = 448 * 2.0**4
    x[1, 2 * block :] = 448 * 2.0**7
    x[2, block + 1] = 2.0**-9  # of 2^-13 in its block: vanishes
    x[3, 2 * block :] = 448
    x[[0, 2, 4], 2 * block :] = 448
    with fp8_statistics(model) as stats:
        step(model, x, make_recipe(name, "e4m3"))
    series = stats.to_dict()["Linear.input"]
    assert series["scale_min"] == [2.0**-7]
    assert series["scale_max"] == [2.0**6]
    assert series["amax"] == [448 * 2.0**7]
    assert series["underflow_rate"] == [1 / x.numel()]
    assert series["saturation_rate"] == [0]


def test_mx_floor_saturates(device):
    model = Linear(64, 16, device=device)
    x = torch.full((4, 64), 1.0, device=device)
    x[0, :32] = 500.0  # above 448, and the scale of its block is 1
    with fp8_statistics(model) as stats:
        step(model, x, make_recipe("mxfp8", "e4m3", rounding="floor"))
    assert stats.to_dict()["Linear.input"]["saturation_rate"] == [32 / 256]


@each_recipe
def test_gradient_that_is_only_quantized_transposed(recipe):
    noted = []
    model, x, dy = Linear(40, 48), torch.randn(16, 40), torch.randn(16, 48) * 1e-5
    for needs_grad in (False, True):
        with fp8_statistics(copy.deepcopy(model)) as stats, fp8_autocast(True, recipe):
            stats.model(x.clone().requires_grad_(needs_grad)).backward(dy)
        noted.append(stats.to_dict()["Linear.grad_output"])
    columnwise, rowwise = noted
    assert columnwise["amax"] == rowwise["amax"]
    if recipe is RECIPES["delayed"]:
        assert columnwise["underflow_rate"][0] > 0
    if not scales_blocks(recipe):  # else the copies differ
        assert columnwise == rowwise


def test_what_an_op_quantizes_itself(device):
    model = LayerNormMLP(64, 96, activation="swiglu").to(device)
    x = torch.randn(32, 64).to(device)
    with fp8_statistics(model) as stats:
        step(model, x, RECIPES["first step"])
    noted = stats.to_dict()
    norm = torch.nn.functional.layer_norm(x, (64,))
    assert noted["LayerNormMLP.fc1.input"]["amax"] == [pytest.approx(float(norm.abs().max()))]
    scales = {"input": 448, "weight": 448, "grad_output": 57344}
    for gemm in ("fc1", "fc2"):
        for role, largest in scales.items():
            series = noted[f"LayerNormMLP.{gemm}.{role}"]
            assert series["scale_max"] == [pytest.approx(largest / series["amax"][0], rel=1e-5)]


def test_every_and_capacity():
    model, recipe = Linear(16, 16), RECIPES["delayed"]
    with fp8_statistics(model, every=2, capacity=3) as stats:
        assert stats.to_dict() == {}
        for i in range(9):
            step(model, torch.full((4, 16), float(i + 1)), recipe)
    for series in stats.to_dict().values():
        assert series["step"] == [4, 6, 8]
    assert stats.to_dict()["Linear.input"]["amax"] == [5, 7, 9]


def test_a_step_is_an_outermost_region_and_uses_add_up():
    model, recipe = Linear(16, 16), RECIPES["tensorwise"]
    small, large = torch.full((4, 16), 1.0), torch.full((4, 16), 2.0)
    large[0, 0] = float("nan")
    with fp8_statistics(model) as stats:
        for _ in range(2):
            with fp8_autocast(False), fp8_autocast(True, recipe):
                with fp8_autocast(True, recipe):
                    out = model(small)
                (out.sum() + model(large).sum()).backward()
    series = stats.to_dict()["Linear.input"]
    assert series["step"] == [0, 1]
    assert series["amax"] == [2, 2]
    assert series["nonfinite"] == [1, 1]
    assert series["scale_min"] == [pytest.approx(1.0, rel=1e-6)] * 2  # the NaN gave scale 1
    assert series["scale_max"] == [pytest.approx(448.0, rel=1e-6)] * 2


def test_calibration_is_noted_and_stays_in_high_precision():
    model, recipe = Linear(16, 16), RECIPES["delayed"]
    other = copy.deepcopy(model)
    x = torch.randn(4, 16)
    x[0, 0] = 500
    with fp8_statistics(model) as stats, fp8_autocast(False, recipe, calibrating=True):
        observed = model(x)
        observed.sum().backward()
    with fp8_autocast(False, recipe, calibrating=True):
        plain = other(x)
        plain.sum().backward()
    assert torch.equal(observed, plain)
    noted = stats.to_dict()
    assert noted["Linear.input"]["saturation_rate"] == [1 / 64]
    assert noted["Linear.grad_output"]["amax"] == [1]
    flush_fp8_state()
    for name in ("amax_history_fwd", "amax_history_bwd"):
        assert torch.equal(getattr(model.fp8_state, name), getattr(other.fp8_state, name))


def test_evaluation_recomputation_and_what_follows_are_not_noted():
    model, recipe = Linear(16, 16), RECIPES["delayed"]
    x = torch.randn(4, 16, requires_grad=True)
    checkpoint = torch.utils.checkpoint.checkpoint
    with fp8_statistics(model) as stats:
        with torch.no_grad(), fp8_autocast(True, recipe):
            model(x)
        with fp8_autocast(True, recipe):
            out = checkpoint(model, x, use_reentrant=False)
        out.sum().backward()
        with fp8_autocast(True, recipe):
            late = model(x)
    before = stats.to_dict()
    assert [series["step"] for series in before.values()] == [[0, 1], [0, 1], [0]]
    late.sum().backward()
    step(model, x, recipe)
    assert stats.to_dict() == before
    assert model._fp8.observer is None


def test_weight_cache_is_kept():
    recipe = DelayedScaling(amax_history_len=2)  # whose scale moves in every region
    model, x = Linear(16, 16), torch.randn(4, 16)
    other = copy.deepcopy(model)
    for m in (model, other):
        step(m, x, recipe, is_first_microbatch=True)
    with fp8_statistics(other) as stats:
        a = step(model, x, recipe, is_first_microbatch=False)
        b = step(other, x, recipe, is_first_microbatch=False)
    assert torch.equal(a, b)
    assert set(stats.to_dict()) == {"Linear.input", "Linear.grad_output"}


def test_names():
    model = torch.nn.Sequential(
        Linear(16, 16, name="head"), Linear(16, 16, name="same"), Linear(16, 16, name="same")
    )
    model.add_module("mlp", LayerNormMLP(16, 32))
    with fp8_statistics(model) as stats:
        step(model, torch.randn(4, 16), RECIPES["tensorwise"])
    owners = {name.rpartition(".")[0] for name in stats.to_dict()}
    assert owners == {"head", "1", "2", "mlp.fc1", "mlp.fc2"}


def test_names_in_a_layer_and_in_a_grouped_one():
    layer = TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0)
    with fp8_statistics(layer) as stats, fp8_autocast(fp8_recipe="tensorwise"):
        layer(torch.randn(8, 2, 32)).sum().backward()
    owners = {name.rpartition(".")[0] for name in stats.to_dict()}
    assert {"layernorm_mlp.fc1", "layernorm_mlp.fc2", "self_attention.proj"} <= owners
    grouped = GroupedLinear(2, 16, 16)
    with fp8_statistics(grouped) as stats, fp8_autocast(fp8_recipe="tensorwise"):
        grouped(torch.randn(8, 16), [4, 4]).sum().backward()
    owners = {name.rpartition(".")[0] for name in stats.to_dict()}
    assert owners == {"GroupedLinear.gemm0", "GroupedLinear.gemm1"}


def test_without_being_entered_it_says_that_it_notes_nothing(tmp_path):
    model = Linear(16, 16)
    stats = fp8_statistics(model)
    step(model, torch.randn(4, 16), RECIPES["delayed"])
    why = "nothing was noted, because it was never entered: train inside of `with fp8_stat"
    with pytest.warns(UserWarning, match=why):
        assert stats.to_dict() == {}
    assert why in stats.table()
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=why):
        stats.plot(tmp_path / "none.png")
    assert repr(stats) == (
        "fp8_statistics(Linear with 1 FP8 module(s), every=1, capacity=1000, steps noted: 0, not "
        "entered: it notes inside of `with` only)"
    )
    with stats:
        assert "none of the modules ran in a region of fp8_autocast" in stats.table()
        step(model, torch.randn(4, 16), RECIPES["delayed"])
        assert repr(stats).endswith("steps noted: 1, noting)")
    assert repr(stats).endswith("steps noted: 1, left)")
    assert len(stats.to_dict()) == 3


def test_copies_are_not_observed():
    model = Linear(16, 16)
    with fp8_statistics(model) as stats:
        step(copy.deepcopy(model), torch.randn(4, 16), RECIPES["delayed"])
    assert stats.to_dict() == {}


def test_under_compile_nothing_is_noted():
    model, recipe = Linear(16, 16), RECIPES["delayed"]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with fp8_statistics(model) as stats:
        step(compiled, torch.randn(4, 16), recipe)
    assert stats.to_dict() == {}


def test_table():
    model = torch.nn.Sequential(Linear(16, 16), Linear(16, 16))
    with fp8_statistics(model) as stats:
        for _ in range(3):
            step(model, torch.full((4, 16), 500.0), RECIPES["delayed"])
    lines = stats.table().splitlines()
    assert len(lines) == 7
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[:4] == ["tensor", "steps", "amax", "scale"]
    # the first of three steps saturates altogether
    assert lines[1].split()[:6] == ["0.input", "3", "500", "0.896", "33.333%", "100.000%"]
    with fp8_statistics(model) as stats:
        step(model, torch.randn(4, 16), RECIPES["mxfp8"])
    assert " .. " in stats.table()


def test_plot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    model = Linear(16, 16)
    with fp8_statistics(model) as stats:
        with pytest.raises(ValueError, match="plot must have a noted step to draw, got none"):
            stats.plot(tmp_path / "empty.png")
        for _ in range(3):
            step(model, torch.randn(4, 16), RECIPES["delayed"])
    stats.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    drawn = []
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path: drawn.append(self))
    stats.plot(tmp_path / "picture.svg")
    panels = [axes for axes in drawn[0].axes if axes.get_title()]
    noted = stats.to_dict()
    labels = panels[0].get_yticklabels()
    assert [label.get_text() for label in labels] == list(noted)
    # A page, which is about 900 pixels wide, shows them legibly.
    assert drawn[0].get_size_inches()[0] * drawn[0].dpi <= 1000
    assert all(label.get_fontsize() >= 9 for label in labels)
    keys = {
        "amax": "amax", "scale": "scale_max", "saturation rate": "saturation_rate",
        "underflow rate": "underflow_rate",
    }  # fmt: skip
    assert [axes.get_title() for axes in panels] == list(keys)
    for axes in panels:  # a row for each tensor, a column for each step
        (image,) = axes.get_images()
        expected = [values[keys[axes.get_title()]] for values in noted.values()]
        assert image.get_array().tolist() == expected
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plot needs matplotlib .*apex_te\[demo\]"):
        stats.plot(tmp_path / "other.png")


def test_errors():
    model = Linear(16, 16)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        fp8_statistics(1)
    with pytest.raises(ValueError, match="model must contain an FP8 module, got Identity"):
        fp8_statistics(torch.nn.Identity())
    for name in ("every", "capacity"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            fp8_statistics(model, **{name: 0})
        with pytest.raises(TypeError, match=f"{name} must be an int, got float"):
            fp8_statistics(model, **{name: 1.0})
    with fp8_statistics(model), pytest.raises(RuntimeError, match="once at a time, got twice"):
        fp8_statistics(model).__enter__()
    with fp8_statistics(model):
        pass


@needs_cuda
@pytest.mark.cuda
@each_recipe
def test_no_synchronisation_in_a_step(recipe):
    model = Linear(256, 256, device="cuda", params_dtype=torch.bfloat16)
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    with fp8_statistics(model) as stats:
        step(model, x, recipe)  # allocates, compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                step(model, x, recipe)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(series["step"] == [0, 1, 2, 3] for series in stats.to_dict().values())


H = 32
PARTS = [
    "self_attention", "self_attention.layernorm_qkv", "self_attention.proj", "inter_attention",
    "inter_attention.layernorm_query", "inter_attention.key_value", "layernorm_mlp",
]  # fmt: skip


def build(**options):
    torch.manual_seed(0)
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerLayer(H, H, 4, layer_type="decoder", **dropouts, **options)


def run(layer, recipe, seed=1):
    """Output and gradients of one step, each a list."""
    generator = torch.Generator().manual_seed(seed)
    x, memory, grad = torch.randn(3, 4, 2, H, generator=generator)
    x.requires_grad_()
    layer.zero_grad()
    with fp8_autocast(recipe is not None, recipe):
        out = layer(x, encoder_output=memory)
    out.backward(grad)
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("recipe", [None, "blockwise"])
@pytest.mark.parametrize("options", [{}, {"apply_residual_connection_post_layernorm": True}])
@pytest.mark.parametrize("part", PARTS)
def test_hooks_see_the_calls_of_each_part(part, options, recipe):
    layer = build(**options)
    expected = run(layer, recipe)
    seen = []
    module = layer.get_submodule(part)
    module.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[-1]))
    module.register_forward_hook(lambda m, args, out: seen.append(m))
    found = run(layer, recipe)
    assert seen == [H, module]
    for a, b in zip(found, expected, strict=True):
        # Gradients of residuals are added in another order.
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 if recipe is None else 0.05)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("self_attention.layernorm_qkv", "weight"),
        ("self_attention.layernorm_qkv", "layer_norm_weight"),
        ("layernorm_mlp", "fc1_weight"),
        ("layernorm_mlp", "layer_norm_bias"),
    ],
)
def test_pruned_parameters_follow_training_and_loading(part, name):
    layer, other, plain = (build(fuse_qkv_params=True) for _ in range(3))
    for each in (layer, other):
        prune.random_unstructured(each.get_submodule(part), name, 0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for seed in range(2):
        run(layer, None, seed)
        optimizer.step()
    state = layer.state_dict()
    key = f"{part}.{name}"
    value = state[f"{key}_orig"] * state[f"{key}_mask"]
    plain.load_state_dict({n: state[n] if n != key else value for n in plain.state_dict()})
    expected = run(plain, None)[:2]
    other.load_state_dict({n: v * 3 for n, v in state.items()})
    with torch.no_grad():
        other(torch.randn(4, 2, H), encoder_output=torch.randn(4, 2, H))
    other.load_state_dict(state)
    for found in (layer, other):
        for a, b in zip(run(found, None)[:2], expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


class Scaled(torch.nn.Module):
    """Parametrization by a factor."""

    def forward(self, value):
        return value * 1.5


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
@pytest.mark.parametrize("name", ["layer_norm_weight", "layer_norm_bias"])
@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_parametrized_norms(kind, name, recipe):
    module = kind(H, H)
    torch.nn.init.normal_(module.layer_norm_bias)
    plain = copy.deepcopy(module)
    with torch.no_grad():
        getattr(plain, name).mul_(1.5)
    parametrize.register_parametrization(module, name, Scaled())
    outs = []
    for m in (module, plain):
        with fp8_autocast(recipe is not None, recipe):
            outs.append(m(torch.linspace(-1, 2, 16 * H).view(16, H)))
        outs[-1].sum().backward()
    assert torch.equal(*outs)
    own = module.parametrizations[name].original.grad
    assert torch.allclose(own, getattr(plain, name).grad * 1.5, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", ["self_attention", "inter_attention", "layernorm_mlp"])
def test_wrapped_parts_recompute(part):
    """A wrapper hands on the part's other methods, which would not recompute."""
    layer = build()
    expected = run(layer, None)
    calls = []
    inner = layer.get_submodule(part)
    inner.register_forward_pre_hook(lambda *args: calls.append(args))
    setattr(layer, part, checkpoint_wrapper(inner))
    for a, b in zip(run(layer, None), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    assert len(calls) == 2


def test_hooks_of_the_norm_and_projection_of_attention():
    options = {"attention_dropout": 0.0, "return_layernorm_output": True}
    module = MultiheadAttention(H, 4, input_layernorm=True, **options)
    x = torch.randn(4, 2, H)
    expected = module(x)
    seen = []
    module.layernorm_qkv.register_forward_hook(lambda m, args, out: seen.append(len(out)))
    for a, b in zip(module(x), expected, strict=True):
        assert torch.equal(a, b)
    assert seen == [2]
