"""Residuals that the products of a layer add: one rounding instead of two, same gradients."""

import copy
import statistics

import pytest
import torch
from checks import assert_same_bits
from plain_transformer import HIDDEN
from plain_transformer import build_layer as build
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from apex_te import Linear, fp8_autocast
from apex_te.module._core import programs
from apex_te.module.attention.multihead import MultiheadAttention
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.transformer_layer import TransformerLayer
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, MXFP8BlockScaling

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "tensorwise": CurrentScaling(),
    "blockwise": BlockScaling(),
}
LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
KINDS = {
    "GPT": {"hidden_dropout": 0.0},
    "Llama": {"hidden_dropout": 0.0, **LLAMA},
    "decoder": {"hidden_dropout": 0.0, "layer_type": "decoder"},
}


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]


class Seen(TorchDispatchMode):
    """Names of the torch ops that add tensors, and of all ops."""

    def __init__(self):
        super().__init__()
        self.added, self.names = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.names.append(name)
        self.added += name in ("aten::add", "aten::add_", "apex_te::bias_dropout_add_fwd")
        return func(*args, **(kwargs or {}))


def run(layer, recipe, x, dy, **options):
    """The layer's output and gradients."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with fp8_autocast(fp8_recipe=recipe):
        out = layer(x, **options)
    out.backward(dy)
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return out.detach(), x.grad, gradients


def rounding_error(expected, actual):
    return (expected - actual.double()).norm().item()


@pytest.mark.parametrize("bias", [False, True])
def test_linear_adds_with_one_rounding(device, recipe, bias):
    x = torch.randn(4, 40, 64, device=device).bfloat16()
    residual = (torch.randn(4, 40, 48, device=device) * 3).bfloat16().requires_grad_()
    layer = Linear(64, 48, bias=bias, device=device, params_dtype=torch.bfloat16)
    exact = Linear(64, 48, bias=bias, device=device)
    exact.load_state_dict(layer.state_dict(), strict=False)
    with torch.no_grad():
        layer.weight.mul_(50)
        exact.weight.copy_(layer.weight)
    # The operands' FP8 data are the same in float32: only the output is not rounded.
    for module, inp in ((layer, x), (exact, x.float())):  # delayed scaling's first amaxes
        with fp8_autocast(fp8_recipe=recipe):
            module(inp)
    with torch.no_grad(), fp8_autocast(fp8_recipe=recipe):
        expected = exact(x.float()).double() + residual.double()
        apart = layer(x) + residual
    with fp8_autocast(fp8_recipe=recipe):
        out, rest = layer.forward_adding(x, residual)
    assert rest is None
    assert out.dtype is torch.bfloat16
    assert rounding_error(expected, out) < rounding_error(expected, apart)
    assert rounding_error(expected, out) < 2.0**-8 * expected.norm()
    dy = torch.randn_like(out)
    out.backward(dy)
    assert_same_bits(residual.grad, dy)


def test_linear_returns_what_its_product_cannot_add(device):
    layer = Linear(64, 48, device=device)
    x, residual = torch.randn(8, 64, device=device), torch.randn(8, 48, device=device)
    wanted = layer(x)
    out, rest = layer.forward_adding(x, residual)  # no FP8
    assert rest is residual
    assert_same_bits(out, wanted)
    with fp8_autocast(fp8_recipe=MXFP8BlockScaling()):
        assert layer.forward_adding(x, residual)[1] is residual
    with fp8_autocast(fp8_recipe="tensorwise"):
        assert layer.forward_adding(x, residual.double())[1] is not None
        assert layer.forward_adding(x, residual)[1] is None
    with pytest.raises(ValueError, match=r"Linear: residual must have shape \[8, 48\]"):
        layer.forward_adding(x, residual[:4])


@pytest.mark.parametrize("kind", KINDS)
def test_layer_adds_nothing_outside_its_products(device, recipe, kind, monkeypatch):
    layer = build(device=device, **KINDS[kind])
    options = {}
    if kind == "decoder":
        options["encoder_output"] = torch.randn(5, 2, HIDDEN, device=device)
    x, dy = torch.randn(2, 16, 2, HIDDEN, device=device)
    with fp8_autocast(fp8_recipe=recipe), torch.no_grad():
        layer(x, **options)  # first amaxes
    for training in (True, False):
        layer.train(training)
        with torch.no_grad(), fp8_autocast(fp8_recipe=recipe), Seen() as seen:
            layer(x, **options)
        assert seen.added == 0, seen.names
    state = {k: v.clone() for k, v in layer.state_dict().items() if torch.is_tensor(v)}
    out, dx, gradients = run(layer.train(), recipe, x, dy, **options)
    layer.load_state_dict(state, strict=False)
    monkeypatch.setattr(TransformerLayer, "_adds", lambda *_: False)
    apart = run(layer, recipe, x, dy, **options)
    with torch.no_grad(), fp8_autocast(fp8_recipe=recipe), Seen() as seen:
        layer(x, **options)
    assert seen.added  # what the products added before
    # Both are float32, whose roundings FP8 codes seldom see.
    assert (out - apart[0]).norm() < 1e-2 * out.norm()
    assert (dx - apart[1]).norm() < 3e-2 * dx.norm()
    assert gradients.keys() == apart[2].keys()
    for name, grad in gradients.items():
        assert (grad - apart[2][name]).norm() <= 5e-2 * grad.norm() + 1e-6, name


def test_layer_is_no_less_exact(device, recipe, monkeypatch):
    """The error of bf16 layers against the same layers with float32 parameters and sums.

    A rounding moves some FP8 data by a step, or the scale of a tensor, which changes the error of
    one layer by some percent either way: of many layers it is the median.
    """
    ratios = []
    for seed in range(32):
        torch.manual_seed(seed)
        layer = build(device=device, params_dtype=torch.bfloat16, **KINDS["Llama"])
        exact = build(device=device, **KINDS["Llama"])
        exact.load_state_dict(layer.state_dict(), strict=False)
        x = (torch.randn(64, 4, HIDDEN, device=device) * (1, 4)[seed % 2]).bfloat16()

        def error(layer=layer, exact=exact, x=x):
            with torch.no_grad(), fp8_autocast(fp8_recipe=recipe):
                for _ in range(2):  # the first for amaxes
                    expected, actual = exact(x.float()).double(), layer(x)
                return rounding_error(expected, actual)

        together = error()
        with monkeypatch.context() as patch:
            patch.setattr(TransformerLayer, "_adds", lambda *_: False)
            ratios.append(together / error())
    assert statistics.median(ratios) < 1.02, ratios


def test_hooks_of_the_projection_see_the_product_alone(device):
    layer = build(device=device, **KINDS["Llama"]).eval()
    x = torch.randn(16, 2, HIDDEN, device=device)
    seen = []
    hook = layer.self_attention.proj.register_forward_hook(lambda *args: seen.append(args[2]))
    with torch.no_grad(), fp8_autocast(fp8_recipe="tensorwise"):
        hooked = layer(x)
        hook.remove()
        out = layer(x)
        layer.self_attention.proj.weight.zero_()
        hook = layer.self_attention.proj.register_forward_hook(lambda *args: seen.append(args[2]))
        layer(x)
    assert len(seen) == 2
    assert not seen[1].any()
    assert (hooked - out).norm() < 1e-2 * out.norm()


def test_a_replaced_projection_is_called(device):
    class Doubled(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.use_bias, self.tp_group = inner.use_bias, None

        def forward(self, inp, **options):
            return 2 * self.inner(inp, **options)

    layer = build(device=device, **KINDS["Llama"]).eval()
    x = torch.randn(16, 2, HIDDEN, device=device)
    with torch.no_grad(), fp8_autocast(fp8_recipe="tensorwise"):
        attention = layer.self_attention
        single = attention.forward_with_residual(x, add_residual=True)[0] - x
        attention.proj = Doubled(attention.proj)
        out, residual = attention.forward_with_residual(x, add_residual=True)
    torch.testing.assert_close(out, 2 * single, rtol=1e-3, atol=1e-3)
    assert residual is not None


def test_a_pending_bias_is_not_added_early(device):
    """Dropout comes between bias and residual, so nothing is added in the product."""
    layer = build(device=device, hidden_dropout=0.1)
    x = torch.randn(16, 2, HIDDEN, device=device)
    for training in (True, False):
        with torch.no_grad(), fp8_autocast(fp8_recipe="tensorwise"), Seen() as seen:
            layer.train(training)(x)
        assert seen.names.count("apex_te::bias_dropout_add_fwd") == 2


def test_recompute_repeats_the_sum_to_the_bit(device, recipe):
    layer = build(device=device, params_dtype=torch.bfloat16, **KINDS["Llama"])
    x, dy = torch.randn(2, 16, 2, HIDDEN, device=device).bfloat16()
    run(layer, recipe, x, dy)
    state = {k: v.clone() for k, v in layer.state_dict().items() if torch.is_tensor(v)}
    extra = layer.state_dict()
    out, dx, gradients = run(layer, recipe, x, dy)
    layer.load_state_dict({**extra, **state})

    class Recomputed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    again = run(Recomputed(), recipe, x, dy)
    assert_same_bits(again[0], out)
    assert_same_bits(again[1], dx)
    for name, grad in gradients.items():
        assert_same_bits(again[2][f"layer.{name}"], grad)


@pytest.mark.parametrize("kind", ["GPT", "Llama"])
def test_programs_add_to_the_bit(device, recipe, kind):
    """Steps that repeat recorded ops, from the third on, equal steps that call them one by one."""

    def steps(enabled):
        before = programs.set_enabled(enabled)
        try:
            torch.manual_seed(3)
            layer = build(device=device, params_dtype=torch.bfloat16, **KINDS[kind])
            found = []
            for _ in range(5):
                x, dy = torch.randn(2, 16, 2, HIDDEN, device=device).bfloat16()
                found.append(run(layer, recipe, x, dy))
            return found, layer
        finally:
            programs.set_enabled(before)

    (wanted, _), (actual, layer) = steps(False), steps(True)
    for one, other in zip(wanted, actual, strict=True):
        assert_same_bits(one[0], other[0])
        assert_same_bits(one[1], other[1])
        assert one[2].keys() == other[2].keys()
        for name in one[2]:
            assert_same_bits(one[2][name], other[2][name])
    assert repeats(layer.layernorm_mlp)


def repeats(module):
    """Returns True if a program repeats one of the module's forwards."""
    known = [k for made in module._modes.programs.values() for k in made._known.values()]
    return any(k.program is not None for k in known)


def test_a_program_of_linear_adds_this_calls_residual(device, recipe):
    layer = Linear(64, 48, device=device, params_dtype=torch.bfloat16)

    def steps(enabled):
        before = programs.set_enabled(enabled)
        torch.manual_seed(5)
        module, found = copy.deepcopy(layer), []
        for i in range(6):
            x, residual, dy = (
                torch.randn(2, 16, n, device=device).bfloat16().requires_grad_()
                for n in (64, 48, 48)
            )
            with fp8_autocast(fp8_recipe=recipe):
                if i % 3 == 2:  # the same shapes without one
                    out = module(x) + 0 * residual
                else:
                    out, _ = module.forward_adding(x, residual)
            out.backward(dy.detach())
            found += [out.detach(), x.grad, residual.grad, module.weight.grad.clone()]
        programs.set_enabled(before)
        return found, module

    (wanted, _), (actual, module) = steps(False), steps(True)
    for one, other in zip(wanted, actual, strict=True):
        assert_same_bits(one, other)
    assert repeats(module)


def test_modules_add_only_on_request(device):
    """Public results stay: forward never adds."""
    x = torch.randn(16, 2, HIDDEN, device=device)
    mlp = LayerNormMLP(HIDDEN, 64, device=device)
    attention = MultiheadAttention(HIDDEN, 4, input_layernorm=True, device=device).eval()
    with torch.no_grad(), fp8_autocast(fp8_recipe="tensorwise"):
        out, total = mlp.forward_with_residual(x, None)
        added, rest = mlp.forward_with_residual(x, None, add_residual=True)
        assert_same_bits(out, mlp(x))
        assert_same_bits(total, x)
        torch.testing.assert_close(added, out + x)
        assert rest is None
        projected, residual = attention.forward_with_residual(x)
        assert_same_bits(projected, attention(x))
        assert residual is not None
