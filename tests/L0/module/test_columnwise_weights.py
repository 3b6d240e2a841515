"""keep_columnwise_weights: weights cast once, with the results of two casts."""

import copy

import pytest
import torch
from layer_kinds import HEADS, with_repeatable_core
from schemes import SCHEMES
from torch.utils.checkpoint import checkpoint

from apex_te import MoELayer, fp8_autocast, fp8_model_init
from apex_te.fp8.scheme.current import CurrentScalingQuantizer
from apex_te.module._core import gemm
from apex_te.module.grouped import on_device
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear
from apex_te.module.transformer_layer import TransformerLayer

WIDTH = 64
KINDS = {
    "Linear": lambda **more: Linear(WIDTH, WIDTH, **more),
    "LayerNormLinear": lambda **more: LayerNormLinear(WIDTH, WIDTH, **more),
    "LayerNormMLP": lambda **more: LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu", **more),
    "TransformerLayer": lambda **more: TransformerLayer(
        WIDTH, 2 * WIDTH, HEADS, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
        fuse_qkv_params=True, **more,
    ),
}  # fmt: skip
WEIGHTS = {"Linear": 1, "LayerNormLinear": 1, "LayerNormMLP": 2, "TransformerLayer": 4}


def build(kind, device="cpu", **more):
    torch.manual_seed(3)
    return with_repeatable_core(KINDS[kind](device=device, **more), device)


def train(module, recipe, device, keep, call=None, **more):
    """Outputs and gradients of three steps."""
    found = []
    torch.manual_seed(4)
    for step in range(3):
        x = (torch.randn(16, 2, WIDTH, device=device) * (step + 1)).requires_grad_()
        module.zero_grad()
        with fp8_autocast(fp8_recipe=recipe, keep_columnwise_weights=keep):
            out = (call or module)(x, **more)
        out.square().mean().backward()
        found += [out, x.grad, *(p.grad for p in module.parameters())]
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.1 * p.grad
    return [t.detach().clone() for t in found]


@pytest.fixture
def recasts(monkeypatch):
    """Casts of weights to a columnwise copy alone, as backward makes them."""
    calls = []
    original = gemm.quantized_weight

    def counting(quantizers, quantizer, weight, columnwise):
        if columnwise:
            calls.append(weight.shape)
        return original(quantizers, quantizer, weight, columnwise)

    def measured(quantizer, x, amax):
        calls.append(x.shape)
        return again(quantizer, x, amax)

    again = CurrentScalingQuantizer.recast
    monkeypatch.setattr(gemm, "quantized_weight", counting)
    monkeypatch.setattr(CurrentScalingQuantizer, "recast", measured)
    return calls


def assert_equal(found, expected):
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", SCHEMES)
def test_same_results_without_a_second_cast(device, recasts, recipe, kind):
    module = build(kind, device)
    other = copy.deepcopy(module)
    expected = train(module, SCHEMES[recipe], device, False)
    assert len(recasts) >= 2 * WEIGHTS[kind]  # programs repeat those of later steps
    recasts.clear()
    assert_equal(train(other, SCHEMES[recipe], device, True), expected)
    assert not recasts


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_recompute(device, recasts, recipe, reentrant):
    module = build("TransformerLayer", device)
    other = copy.deepcopy(module)
    expected = train(module, SCHEMES[recipe], device, False)
    recasts.clear()

    def call(x):
        return checkpoint(other, x, use_reentrant=reentrant)

    assert_equal(train(other, SCHEMES[recipe], device, True, call), expected)
    assert not recasts


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_twice_in_a_region_and_a_retained_graph(device, recipe):
    module = build("LayerNormMLP", device)

    def run(keep):
        x = torch.ones(8, WIDTH, device=device).requires_grad_()
        with fp8_autocast(fp8_recipe=SCHEMES[recipe], keep_columnwise_weights=keep):
            out = module(module(x))
        first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
        second = torch.autograd.grad(out.sum(), x)[0]
        assert torch.equal(first, second)
        return [out.detach(), first]

    run(False)
    assert_equal(run(True), run(False))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_cached_and_held_weights_are_as_without_it(device, recasts, recipe):
    module = build("TransformerLayer", device)
    other = copy.deepcopy(module)
    more = {"is_first_microbatch": True}
    expected = train(module, SCHEMES[recipe], device, False, **more)
    assert_equal(train(other, SCHEMES[recipe], device, True, **more), expected)
    with fp8_model_init(recipe=SCHEMES[recipe]):
        held = build("Linear", device)
    other = copy.deepcopy(held)
    expected = train(held, SCHEMES[recipe], device, False)
    assert_equal(train(other, SCHEMES[recipe], device, True), expected)


GROUPS = {
    "list": lambda device: GroupedLinear(2, WIDTH, WIDTH, device=device),
    "stack": lambda device: GroupedLinear(2, WIDTH, WIDTH, single_parameter=True, device=device),
    "experts": lambda device: MoELayer(WIDTH, 2 * WIDTH, 4, device=device),
}


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("recipe", SCHEMES)
def test_groups(device, monkeypatch, recipe, kind):
    """A stack of weights is cast once, too, and what was saved is a copy for each weight."""
    torch.manual_seed(3)
    module = GROUPS[kind](device)
    other, casts = copy.deepcopy(module), []
    original = on_device.GroupsCall._recast

    def counting(call, saved, groups):
        casts.append(len(saved) > 2)
        return original(call, saved, groups)

    monkeypatch.setattr(on_device.GroupsCall, "_recast", counting)
    given = () if isinstance(module, MoELayer) else ([9, 7],)

    def results(m, keep):
        found = []
        for step in range(3):
            x = torch.arange(16 * WIDTH, device=device).view(16, WIDTH).sin() * (step + 1)
            x.requires_grad_()
            m.zero_grad()
            with fp8_autocast(fp8_recipe=SCHEMES[recipe], keep_columnwise_weights=keep):
                out = m(x, *given)
            out.square().sum().backward()
            found += [out, x.grad, *(p.grad for p in m.parameters())]
        return [t.detach().clone() for t in found]

    expected = results(module, False)
    count = len(casts)
    assert all(casts)
    casts.clear()
    assert_equal(results(other, True), expected)
    assert len(casts) == count
    assert not any(casts)
    if kind != "list" and recipe in ("delayed", "tensorwise", "blockwise"):
        assert count


def test_only_the_columnwise_copy_is_held(device):
    """A byte for each element of the weight, and nothing where no gradient needs it."""
    module = build("Linear", device, bias=False)
    sizes = {}
    for keep in (False, True):
        saved = []

        def pack(t, saved=saved):
            saved.append((t.dtype, tuple(t.shape)))
            return t

        x = torch.randn(16, WIDTH, device=device).requires_grad_()
        with (
            fp8_autocast(fp8_recipe=SCHEMES["delayed"], keep_columnwise_weights=keep),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            module(x)
            sizes[keep] = saved
    fp8 = torch.float8_e4m3fn
    assert (fp8, (WIDTH, WIDTH)) in sizes[True]
    assert (torch.float32, (WIDTH, WIDTH)) not in sizes[True]
    assert (torch.float32, (WIDTH, WIDTH)) in sizes[False]


def test_evaluation_makes_no_columnwise_copy(device, monkeypatch):
    module, asked = build("Linear", device), []
    original = gemm.GemmCall.cast_weight

    def watched(call, *args):
        asked.append(call.weight_cached)
        return original(call, *args)

    monkeypatch.setattr(gemm.GemmCall, "cast_weight", watched)
    with (
        torch.no_grad(),
        fp8_autocast(fp8_recipe=SCHEMES["tensorwise"], keep_columnwise_weights=True),
    ):
        module(torch.randn(16, WIDTH, device=device))
    assert asked == [False]


@pytest.mark.long
def test_compiled(device):
    module = build("LayerNormMLP", device)
    x = torch.randn(16, WIDTH, device=device).requires_grad_()

    def run(x):
        with fp8_autocast(fp8_recipe=SCHEMES["tensorwise"], keep_columnwise_weights=True):
            return module(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x).sum(), x)[0]
    assert torch.equal(found, torch.autograd.grad(run(x).sum(), x)[0])


def test_argument():
    assert "keep_columnwise_weights" not in repr(fp8_autocast())
    assert repr(fp8_autocast(keep_columnwise_weights=True)).endswith(
        "calibrating=False, keep_columnwise_weights=True)"
    )
    with pytest.raises(TypeError, match="keep_columnwise_weights must be a bool, got int"):
        fp8_autocast(keep_columnwise_weights=1)
