"""BlockScaling(wgrad_input=..): inputs in blocks of 128x128 for weight gradients alone."""

import pytest
import torch
from checks import in_pairs
from layer_kinds import dtype_on
from module_cases import gradients_for, results

from apex_te import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, fp8_autocast
from apex_te.ops.block_quantize import block_dequantize, block_quantize
from apex_te.recipe import BlockScaling

E4M3 = torch.float8_e4m3fn
MODULES = {
    "linear": lambda **options: Linear(256, 192, **options),
    "norm": lambda **options: LayerNormLinear(256, 192, **options),
    "mlp": lambda **options: LayerNormMLP(256, 384, activation="swiglu", **options),
    "gelu": lambda **options: LayerNormMLP(256, 384, activation="gelu", **options),
}


def recipes(scales):
    return BlockScaling(scales=scales, wgrad_input="1x128"), BlockScaling(scales=scales)


@in_pairs(name=MODULES, rows=[256, 130, 48, 7], scales=["pow2", "fp32", "server"])
def test_only_weight_gradients_differ(device, name, rows, scales):
    module = MODULES[name](device=device, params_dtype=dtype_on(device))
    x = torch.randn(rows, 256, device=device, dtype=dtype_on(device))
    grads = gradients_for(module, x)
    usual, found = (results(module, x, None, grads, recipe) for recipe in recipes(scales))
    for key, value in found.items():
        is_weight = key.endswith("weight") and "layer_norm" not in key
        if not is_weight:
            assert torch.equal(value, usual[key]), key
            continue
        other = usual[key].double()
        assert (value.double() - other).norm() / other.norm() < 0.06, key
    if rows == 256 and scales != "pow2":  # with which few codes differ
        assert any(not torch.equal(found[key], usual[key]) for key in found)


@pytest.mark.parametrize("rows", [256, 320, 48])
def test_a_weight_gradient_is_the_product_of_the_blocks(device, rows):
    module = Linear(256, 192, bias=False, device=device)
    x, dy = (torch.randn(rows, size, device=device) for size in (256, 192))
    x *= torch.linspace(0.1, 9, rows, device=device)[:, None]
    with fp8_autocast(fp8_recipe=recipes("fp32")[1]):
        module(x).backward(dy)

    def values(matrix, block_rows):
        options = {"block_rows": block_rows, "scales": "fp32"}
        made = block_quantize(matrix.t(), E4M3, columnwise=False, **options)
        return block_dequantize(*made[:2], block_rows=block_rows, dtype=torch.float32).double()

    exact = values(dy, 1) @ values(x, 128).t()
    magnitude = values(dy, 1).abs() @ values(x, 128).abs().t()
    error = (module.weight.grad.double() - exact).abs()
    assert (error <= 2.0**-11 * magnitude).all()
    other = values(dy, 1) @ values(x, 1).t()
    assert (module.weight.grad.double() - other).norm() > 20 * error.norm()


def test_microbatches_add_to_main_grad(device):
    module, recipe = Linear(256, 192, device=device), recipes("pow2")[1]
    fused = Linear(256, 192, device=device, fuse_wgrad_accumulation=True)
    fused.load_state_dict(module.state_dict())
    fused.weight.main_grad = torch.zeros_like(fused.weight)
    for _ in range(3):
        x = torch.randn(144, 256, device=device)
        for each in (module, fused):
            with fp8_autocast(fp8_recipe=recipe):
                each(x).sum().backward()
    # One fp32 sum each, of the same products.
    torch.testing.assert_close(fused.weight.main_grad, module.weight.grad, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("splits", [[130, 0, 46], [64, 64, 48]])
def test_groups_on_the_device_equal_those_on_the_host(device, splits):
    """A group's columnwise blocks begin with it, in one stack as in separate products."""
    options = {"device": device, "params_dtype": dtype_on(device), "bias": False}
    module = GroupedLinear(3, 256, 192, **options)
    x = torch.randn(sum(splits), 256, device=device, dtype=dtype_on(device))
    dy = torch.randn(sum(splits), 192, device=device, dtype=dtype_on(device))
    made = []
    for given in (splits, torch.tensor(splits, device=device, dtype=torch.int32)):
        module.zero_grad()
        with fp8_autocast(fp8_recipe=recipes("pow2")[1]):
            module(x, given).backward(dy)
        made.append([p.grad.double() for p in module.parameters()])
    for host, on_device in zip(*made, strict=True):
        scale = host.abs().max() if host.numel() else 1
        assert (host - on_device).abs().max() <= 2.0**-8 * scale
