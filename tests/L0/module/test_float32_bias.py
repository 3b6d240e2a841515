"""A float32 bias means the same under every recipe, and keeps its dtype in its gradient."""

import pytest
import torch
from checks import assert_same_bits
from module_cases import RECIPES

from apex_te import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, fp8_autocast

MODULES = {
    "Linear": lambda **o: Linear(64, 64, **o),
    "LayerNormLinear": lambda **o: LayerNormLinear(64, 64, **o),
    "LayerNormMLP": lambda **o: LayerNormMLP(64, 64, **o),
    "GroupedLinear": lambda **o: GroupedLinear(2, 64, 64, **o),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_bias_of_float32(device, name, recipe, dtype):
    module = MODULES[name](device=device)
    biases = [p for n, p in module.named_parameters() if "bias" in n and "norm" not in n]
    with torch.no_grad():
        for bias in biases:
            bias.copy_(torch.randn_like(bias) * 30)
    x = torch.randn(32, 64, device=device)
    args = (x, [16, 16]) if name == "GroupedLinear" else (x,)

    def forward():
        with (
            torch.autocast(device.type, dtype, enabled=dtype is not None),
            fp8_autocast(fp8_recipe=RECIPES[recipe]),
        ):
            return module(*args)

    y = forward()
    y.sum().backward()
    assert y.dtype is (dtype or torch.float32)
    assert all(bias.grad.dtype is torch.float32 for bias in biases)
    with torch.no_grad():
        for bias in biases:
            bias.copy_(bias.to(dtype or torch.bfloat16))
        assert_same_bits(y, forward())
