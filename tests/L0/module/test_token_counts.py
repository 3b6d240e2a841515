"""Numbers of tokens that are no multiple of 16: the results of the tokens followed by zeros."""

import pytest
import torch
from checks import needs_cuda
from module_cases import sqnr
from schemes import SCHEMES, STATELESS

import apex_te
from apex_te.ops import fp8_gemm
from apex_te.recipe import BlockScaling

TOKENS = [1, 15, 17, 33, 129, 254, 255, 257]
LAYERS = {
    "LayerNormLinear": lambda: apex_te.LayerNormLinear(64, 96),
    "gelu": lambda: apex_te.LayerNormMLP(64, 96),
    "swiglu": lambda: apex_te.LayerNormMLP(64, 96, activation="swiglu", bias=False),
}


def whole(x):
    """x [tokens, ..., features] with zeros behind it up to a multiple of 16 tokens."""
    return torch.cat([x, x.new_zeros(-x.shape[0] % 16, *x.shape[1:])])


def step(layer, x, dy, recipe):
    """The output, the input's gradient and those of the parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with apex_te.fp8_autocast(fp8_recipe=recipe):
        y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, *(p.grad for p in layer.parameters())


def whole_numbers(*shape, device):
    return torch.randint(-1, 2, shape, device=device).float()


@pytest.mark.parametrize("shape", [(), (1,)], ids=["matrix", "3 dimensions"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", STATELESS)
def test_linear(device, poison, name, tokens, shape):
    layer = apex_te.Linear(64, 48).to(device)
    with torch.no_grad():  # so that sums are exact
        layer.weight.copy_(whole_numbers(48, 64, device=device))
        layer.bias.copy_(whole_numbers(48, device=device))
    x = whole_numbers(tokens, *shape, 64, device=device)
    dy = whole_numbers(tokens, *shape, 48, device=device)
    y, dx, *grads = step(layer, x, dy, SCHEMES[name])
    whole_y, whole_dx, *expected = step(layer, whole(x), whole(dy), SCHEMES[name])
    assert y.shape == dy.shape
    expected = [whole_y[:tokens], whole_dx[:tokens], *expected]
    for a, b in zip([y, dx, *grads], expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tokens", [1, 33, 254])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", STATELESS)
def test_layers(device, poison, name, kind, tokens):
    layer = LAYERS[kind]().to(device)
    x = torch.randn(tokens, 1, 64, device=device)
    with torch.no_grad():
        dy = torch.randn_like(layer(x))
    actual = step(layer, x, dy, SCHEMES[name])
    expected = step(layer, whole(x), whole(dy), SCHEMES[name])
    for a, b in zip(actual, expected, strict=True):
        assert sqnr(b[: a.shape[0]] if b.shape[0] != a.shape[0] else b, a) >= 40


@pytest.mark.parametrize("name", STATELESS)
def test_output_may_change_in_place(device, name):
    """It has room for more rows, but is no view, which autograd would refuse to change."""
    layer = apex_te.Linear(64, 48).to(device)
    for shape in ((33, 64), (3, 11, 64)):
        x = torch.randn(shape, device=device, requires_grad=True)
        with apex_te.fp8_autocast(fp8_recipe=SCHEMES[name]):
            y = layer(x)
        y.mul_(2)
        assert y._base is None
        y.sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("shape", [(255,), (3, 85), (2, 127)], ids=str)
@pytest.mark.parametrize("kind", ["Linear", *LAYERS, "TransformerLayer"])
def test_block_products_copy_nothing(monkeypatch, kind, shape):
    if kind == "TransformerLayer":
        layer = apex_te.TransformerLayer(256, 512, 4, hidden_dropout=0.0, attention_dropout=0.0)
        shape = shape if len(shape) == 2 else (shape[0], 1)
        features = 256
    else:
        layer = apex_te.Linear(64, 48) if kind == "Linear" else LAYERS[kind]()
        features = 64
    layer = layer.to("cuda", torch.bfloat16)
    in_fours = fp8_gemm._run_block_rows

    def checked(operands, out, *rest):
        a = operands[0]
        assert out.shape[0] % 4 == 0
        assert a.untyped_storage().nbytes() >= a.storage_offset() + out.shape[0] * a.shape[1]
        in_fours(operands, out, *rest)

    monkeypatch.setattr(fp8_gemm, "_run_block_padded", None)
    monkeypatch.setattr(fp8_gemm, "_run_block_rows", checked)
    x = torch.randn(*shape, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with apex_te.fp8_autocast(fp8_recipe=BlockScaling()):
        y = layer(x)
    y.float().square().mean().backward()
    assert x.grad.isfinite().all()
