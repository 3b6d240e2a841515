"""Activations in float32 are as accurate as PyTorch's, value and gradient, tails included."""

import pytest
import torch
from checks import assert_error_as_torch
from torch.nn import functional as F

from apex_te.ops import activation, bias_gelu, swiglu

FORMULAS = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
RANGES = {
    "normal": lambda n: torch.randn(n),
    "wide": lambda n: torch.randn(n) * 3,
    "negative tail": lambda n: torch.empty(n).uniform_(-10, -2),
    "far negative tail": lambda n: torch.empty(n).uniform_(-80, -10),
    "positive": lambda n: torch.empty(n).uniform_(2, 20),
}
COUNT = 1 << 17


def value_and_gradient(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def ulps(actual, exact):
    """Mean distance in float32 steps, over values that float32 has with all digits."""
    actual, exact = actual.double().cpu(), exact.cpu()
    kept = exact.abs() > 2.0**-100
    steps = torch.exp2(exact[kept].abs().log2().floor() - 23)
    return ((actual[kept] - exact[kept]).abs() / steps).mean()


@pytest.mark.parametrize("values", RANGES)
@pytest.mark.parametrize("kind", FORMULAS)
def test_error(device, kind, values):
    if values == "far negative tail" and kind in ("gelu", "gelu_erf"):
        pytest.skip("PyTorch's formulas are 0 there, in float64 too")
    x = RANGES[values](COUNT).to(device)
    exact = value_and_gradient(FORMULAS[kind], x.double())
    same = value_and_gradient(FORMULAS[kind], x)
    actual = value_and_gradient(lambda x: activation.activation(x, kind), x)
    for found, *expected in zip(actual, exact, same, strict=True):
        assert_error_as_torch(found, *expected)


@pytest.mark.parametrize("values", RANGES)
def test_silu_is_right_to_the_last_digits(device, values):
    x = RANGES[values](COUNT).to(device)
    exact = value_and_gradient(F.silu, x.double())
    same = value_and_gradient(F.silu, x)
    actual = value_and_gradient(lambda x: activation.activation(x, "silu"), x)
    for found, expected, plain in zip(actual, exact, same, strict=True):
        assert ulps(found, expected) <= 1.1 * ulps(plain, expected)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_erf", "sigmoid"])
def test_gated(device, name):
    function = {**FORMULAS, "sigmoid": torch.sigmoid}[name]

    def plain(x):
        gate, up = x.chunk(2, -1)
        return function(gate) * up

    for values in ("normal", "wide"):
        x = RANGES[values](COUNT).view(-1, 256).to(device)
        exact, same = value_and_gradient(plain, x.double()), value_and_gradient(plain, x)
        actual = value_and_gradient(lambda x: swiglu.swiglu(x, activation=name), x)
        for found, *expected in zip(actual, exact, same, strict=True):
            assert_error_as_torch(found, *expected)


def test_bias_gelu(device):
    x, bias = torch.randn(COUNT).view(-1, 256).to(device), torch.randn(256, device=device)
    exact = value_and_gradient(lambda x: FORMULAS["gelu"](x + bias.double()), x.double())
    same = value_and_gradient(lambda x: FORMULAS["gelu"](x + bias), x)
    actual = value_and_gradient(lambda x: bias_gelu.bias_gelu(x, bias), x)
    for found, *expected in zip(actual, exact, same, strict=True):
        assert_error_as_torch(found, *expected)
