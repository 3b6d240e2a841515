"""MLP and Transformer layer at numbers of tokens that are no multiple of 16.

No product copies its operands to pad them, and the results are those of the tokens followed by
zeros, or of the tokens one by one.
"""

from functools import partial

import pytest
import torch
from checks import assert_same_bits
from module_cases import RECIPES, randomized, sqnr
from schemes import SCHEMES
from torch.utils.checkpoint import checkpoint

from apex_te import fp8_autocast
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.transformer_layer import TransformerLayer
from apex_te.ops import fp8_gemm

TOKENS = [(1, 1), (2, 15), (3, 11), (5, 51)]
CHOSEN = {
    "delayed": SCHEMES["delayed"],
    "delayed, first step": RECIPES["delayed"],
    "tensorwise": RECIPES["tensorwise"],
    "blockwise": RECIPES["blockwise"],
}
recipes = pytest.mark.parametrize("recipe", CHOSEN.values(), ids=CHOSEN)
tokens = pytest.mark.parametrize("tokens", TOKENS, ids=str)


@pytest.fixture(autouse=True)
def lengths(monkeypatch):
    """K of every FP8 product that a test runs; none may be padded in a copy."""
    seen = []

    def watched(multiply):
        def call(a, b, *rest):
            assert a.shape[1] % 16 == b.shape[0] % 16 == 0
            seen.append(a.shape[1])
            return multiply(a, b, *rest)

        return call

    for name in ("multiply_into", "_multiply_blocks"):
        monkeypatch.setattr(fp8_gemm, name, watched(getattr(fp8_gemm, name)))

    def refuse(*args):
        raise AssertionError("an operand was padded in a copy")

    for name in ("_run_padded", "_run_block_padded"):
        monkeypatch.setattr(fp8_gemm, name, refuse)
    return seen


def values(shape, device):
    return torch.randn(shape, device=device)


def gradients(module, x, dy, recipe, run=None):
    """The output of one step and all gradients, by name."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with fp8_autocast(recipe is not None, recipe):
        y = module(x) if run is None else run(x)
    y.backward(dy)
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **found}


def assert_close(actual, expected, tolerance):
    """On a GPU another algorithm of a product may round a value to the next FP8 number."""
    if actual.is_cuda:
        assert sqnr(expected, actual) > 40
    else:
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def make_mlp(device, activation, **options):
    torch.manual_seed(1)
    module = LayerNormMLP(
        64, 96, activation=activation, params_dtype=torch.float32, device="cpu", **options
    )
    return randomized(module).to(device)


def with_zeros(t):
    """The tokens of t [..., cols], and zeros up to a multiple of 16 tokens, as a matrix."""
    rows = t.reshape(-1, t.shape[-1])
    return torch.cat([rows, rows.new_zeros(-rows.shape[0] % 16, rows.shape[1])])


@pytest.mark.cover(2)
@recipes
@tokens
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "srelu", "geglu", "qgelu"])
def test_mlp_is_that_of_zeros_behind(device, poison, lengths, tokens, recipe, activation):
    """Without biases zeros stay zeros, so that scales are equal, too."""
    options = {"normalization": "RMSNorm", "bias": False}
    x, dy = values((*tokens, 64), device), values((*tokens, 64), device)
    count = tokens[0] * tokens[1]
    odd, whole = (make_mlp(device, activation, **options) for _ in range(2))
    for step in range(3):
        x, dy = (1 + step) * x, (1 + step) * dy
        found = gradients(odd, x, dy, recipe)
        wanted = gradients(whole, with_zeros(x), with_zeros(dy), recipe)
        for name in ("y", "x"):
            found[name] = found[name].reshape(count, -1)
            wanted[name] = wanted[name][:count]
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert_close(found[name], value, 2e-5)
    assert lengths


@tokens
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "silu"])
def test_mlp_with_biases_is_that_of_single_tokens(device, poison, lengths, tokens, activation):
    """Rows behind the last do not show, though biases and the norm's shift would make them other
    than zero.
    """
    recipe = CHOSEN["delayed"]  # whose first scales do not depend on the tokens of a call
    together, alone = (make_mlp(device, activation) for _ in range(2))
    x, dy = values((*tokens, 64), device), values((*tokens, 64), device)
    found = gradients(together, x, dy, recipe)
    parts = {name: [] for name in found}
    for token, grad in zip(x.reshape(-1, 1, 64), dy.reshape(-1, 1, 64), strict=True):
        alone.fp8_state.reset()
        for name, value in gradients(alone, token, grad, recipe).items():
            parts[name].append(value)
    for name, each in parts.items():
        wanted = torch.cat(each) if name in ("y", "x") else torch.stack(each).sum(0)
        assert_close(found[name].reshape(wanted.shape), wanted, 1e-4)
    assert lengths


LAYERS = {
    "Llama": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    "GPT": {},
    "parallel": {"parallel_attention_mlp": True},
}


def make_layer(device, **options):
    torch.manual_seed(1)
    return TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float32,
        device=device, **options,
    )  # fmt: skip


@pytest.mark.cover(2)
@recipes
@pytest.mark.parametrize("tokens", TOKENS[1:], ids=str)  # of one the scores have no gradient
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_transformer_layer(device, poison, lengths, tokens, recipe, options):
    x, dy = values((*tokens, 64), device), values((*tokens, 64), device)
    layer = make_layer(device, **options)
    for _ in range(2):  # delayed scaling has scales in the second step
        found = gradients(layer, x, dy, recipe)
    assert lengths
    plain = gradients(layer, x, dy, None)
    for name in ("y", "x", *(name for name in plain if name.endswith("weight"))):
        assert sqnr(plain[name], found[name]) > 15, name


@recipes
@pytest.mark.parametrize("tokens", [(2, 15), (3, 11)], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_bits(device, lengths, tokens, recipe, reentrant):
    x, dy = values((*tokens, 64), device), values((*tokens, 64), device)
    found = []
    for run in (None, reentrant):
        layer = make_layer(device, **LAYERS["Llama"])
        for _ in range(2):
            step = None if run is None else partial(checkpoint, layer, use_reentrant=run)
            seen = gradients(layer, x, dy, recipe, step)
        found.append(seen)
    for name, value in found[0].items():
        assert_same_bits(found[1][name], value)
    assert lengths


@recipes
def test_recomputed_attention_gives_the_same_bits(device, lengths, recipe):
    x, dy = values((2, 15, 64), device), values((2, 15, 64), device)
    layer = make_layer(device, **LAYERS["Llama"])
    plain = gradients(layer, x, dy, recipe)
    again = make_layer(device, **LAYERS["Llama"])
    found = gradients(again, x, dy, recipe, partial(again, checkpoint_core_attention=True))
    for name, value in plain.items():
        assert_same_bits(found[name], value)
    assert lengths
