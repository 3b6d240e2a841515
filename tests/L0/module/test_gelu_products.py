"""LayerNormMLP with GELU fused into its products: bits as with products and GELU apart.

A GPU adds up FC1's bias gradient in another order than the op: there that bias is frozen, but for
tests of its gradient. What only a GPU shows is in ``test_swiglu_products.py``.
"""

import copy

import pytest
import test_swiglu_products as swiglu
import torch
from schemes import FIRST_STEP
from test_swiglu_products import DELAYED, GELU, RECIPES, STEPS, USES, assert_equal, compare, train
from torch.utils.checkpoint import checkpoint

from apex_te import fp8_autocast
from apex_te.module._core import programs
from apex_te.ops import dense_gemm_swiglu as op
from apex_te.recipe import CurrentScaling, DelayedScaling

fused = swiglu.fused
every = pytest.mark.parametrize("recipe", ["delayed", "first step", "E4M3"])


def build(device, **options):
    module = swiglu.build(device, **{**GELU, **options})
    if module.fc1_bias is not None:
        with torch.no_grad():
            module.fc1_bias.copy_(torch.linspace(-1, 1, len(module.fc1_bias)))
        module.fc1_bias.requires_grad_(device.type == "cpu")
    return module


@every
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [32, 37])
def test_bits_equal_ops_apart(device, fused, monkeypatch, recipe, bias, tokens):
    module = build(device, bias=bias)
    counts = compare(module, RECIPES[recipe], monkeypatch, fused, tokens)
    assert counts[0] > 1
    assert counts[1] >= 1


def test_bits_equal_without_programs(device, fused, monkeypatch):
    monkeypatch.setattr(programs, "_enabled", False)
    assert compare(build(device), DELAYED, monkeypatch, fused) == (STEPS + 1, STEPS)


NORM = ["layer_norm_weight", "layer_norm_bias"]
FROZEN = {
    "all but FC2": ([*NORM, "fc1_weight", "fc1_bias"], (1, 0)),
    "all but FC1's bias": ([*NORM, "fc1_weight", "fc2_weight", "fc2_bias"], (STEPS + 1, 0)),
    "all but the first biases": (["layer_norm_weight", "fc1_weight"], (STEPS + 1, STEPS)),
    "FC2": (["fc2_weight"], (STEPS + 1, STEPS)),
    "FC1": (["fc1_weight"], (STEPS + 1, STEPS)),
    "norm": (NORM, (STEPS + 1, STEPS)),
}


@pytest.mark.parametrize("which", FROZEN)
def test_frozen_weights(device, fused, monkeypatch, which):
    names, expected = FROZEN[which]
    if device.type == "cuda" and which == "all but FC1's bias":
        pytest.skip("its gradient's bits differ")
    module = build(device)
    for weight in names:
        getattr(module, weight).requires_grad_(False)
    monkeypatch.setattr(programs, "_enabled", False)
    assert compare(module, DELAYED, monkeypatch, fused) == expected


@pytest.mark.parametrize("use", USES)
def test_uses(device, fused, monkeypatch, use):
    assert min(compare(build(device), DELAYED, monkeypatch, fused, **USES[use])) > 0


@pytest.mark.parametrize("own", [True, False])
def test_recompute_is_equal(device, fused, own):
    def repeated(module, x):
        return checkpoint(module, x, use_reentrant=False)

    module = build(device)
    expected = train(module, DELAYED)
    module.checkpoint = own
    assert_equal(expected, train(module, DELAYED, call=None if own else repeated))
    assert fused.backward > 0


def bias_gradient(module, recipe, active, monkeypatch):
    """Returns the gradient of FC1's bias in a second step."""
    monkeypatch.setattr(op, "is_active", active)
    module = copy.deepcopy(module).requires_grad_()
    x = torch.linspace(-2, 2, 300 * 64, device=module.fc1_weight.device).view(300, 64).bfloat16()
    for _ in range(2):
        module.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16), fp8_autocast(fp8_recipe=recipe):
            y = module(x)
        y.backward(torch.linspace(0, 1, 64, device=x.device).bfloat16().expand(300, 64))
    return module.fc1_bias.grad


@pytest.mark.parametrize("recipe", [DELAYED, FIRST_STEP], ids=["delayed", "first step"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bias_gradient(device, fused, monkeypatch, recipe, dtype):
    """Under autocast the bias, and its gradient, may be float32."""
    module = build(device)
    if dtype is torch.float32:
        module.fc1_bias = torch.nn.Parameter(module.fc1_bias.float())
    own, other = (bias_gradient(module, recipe, each, monkeypatch) for each in (True, False))
    assert fused.backward > 0
    assert own.dtype is other.dtype is dtype
    assert (own - other).norm() <= 0.01 * other.norm()
    assert other.norm() > 0


def test_saves_no_activation(device, fused, monkeypatch):
    """Backward makes the activation's columnwise copy: forward saves one byte an element less."""
    module, sizes = build(device), []
    x = torch.randn(64, swiglu.HIDDEN, device=device).bfloat16().requires_grad_()
    for active in (True, False):
        monkeypatch.setattr(op, "is_active", active)
        saved = {}

        def keep(t, saved=saved):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with (
            fp8_autocast(fp8_recipe=DELAYED),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        ):
            module(x)
        sizes.append(sum(saved.values()))
    assert sizes[1] - sizes[0] > 0.9 * 64 * swiglu.FFN


OTHERS = {
    "quick GELU": ({"activation": "qgelu"}, DELAYED),
    "gated": ({"activation": "geglu"}, DELAYED),
    "float32": ({"params_dtype": torch.float32}, DELAYED),
    "tensorwise": ({}, CurrentScaling()),
    "fast dgrad": ({}, DelayedScaling(use_split_accumulator=(False, False, True))),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_calls_keep_their_products(fused, other):
    options, recipe = OTHERS[other]
    module = build(torch.device("cpu"), **options)
    x = torch.randn(32, swiglu.HIDDEN, dtype=module.fc1_weight.dtype, requires_grad=True)
    with fp8_autocast(fp8_recipe=recipe):
        module(x).sum().backward()
    assert (fused.forward, fused.backward) == (0, 0)


@pytest.mark.long
def test_compiled_is_equal(fused, monkeypatch):
    monkeypatch.setattr(programs, "_enabled", False)
    module = build(torch.device("cpu"))
    expected = train(module, DELAYED)
    before = fused.forward

    def compiled(module, x):
        return torch.compile(module, fullgraph=True, backend="aot_eager")(x)

    assert_equal(expected, train(module, DELAYED, call=compiled))
    assert fused.forward > before
