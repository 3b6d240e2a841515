"""JitRecipeScaling: scales, layers, training and weights held in FP8."""

import math

import pytest
import torch
from module_cases import gradients_for, plain_results, randomized, results, sqnr

from apex_te import Linear, fp8_autocast, make_recipe
from apex_te.fp8.model_init import fp8_model_init
from apex_te.fp8.scheme import build_quantizers

RECIPE = make_recipe("jit_recipe")


def quantizer(device, recipe=RECIPE):
    return build_quantizers(recipe, None, 1, device).recording[0].input


def test_is_found_by_name():
    assert type(RECIPE).__name__ == "JitRecipeScaling"
    assert make_recipe("jit_recipe", "e4m3").fp8_format.name == "E4M3"
    with fp8_autocast(True, "jit_recipe"):
        Linear(16, 16)(torch.randn(4, 16))


def test_each_row_has_a_power_of_two(device):
    x = torch.tensor([[3.0, -1.0], [0.0, 0.0], [448.0, 2.0], [-500.0, 1e-3]], device=device)
    made = quantizer(device).quantize(x)[0]
    # 448 / amax, rounded down: 149.3, none, 1 and 0.896.
    assert (1 / made.rowwise_scale_inv[:, 0]).tolist() == [128.0, 1.0, 1.0, 0.5]
    # 448 / 500 and 448 / 2: of the columns.
    assert (1 / made.columnwise_scale_inv[:, 0]).tolist() == [0.5, 128.0]
    assert made.rowwise.float()[0].tolist() == [384.0, -128.0]
    values = quantizer(device).dequantize(made)
    assert torch.equal(values[:3], x[:3])


def test_rejects_a_negative_eps():
    with pytest.raises(ValueError, match=r"^JitRecipeScaling: eps must be finite"):
        make_recipe("jit_recipe", eps=-1.0)


def test_layer_is_close(device):
    """The three products of a layer whose inputs' rows differ by powers of ten."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    module = randomized(Linear(256, 128, device=device, params_dtype=dtype))
    x = (
        torch.randn(64, 256, device=device)
        * 10 ** torch.arange(-4.0, 4.0, 0.125).to(device)[:, None]
    )
    x = x.to(dtype)
    gradients = gradients_for(module, x)
    found = results(module, x, None, gradients, RECIPE)
    exact = plain_results(module, x, None, gradients, torch.float64)
    for name, value in exact.items():
        assert sqnr(value, found[name]) >= 23.5, name


def test_trains(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear(32, 64), torch.nn.GELU(), Linear(64, 32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x = torch.randn(256, 32, device=device)
    target = torch.sin(2 * x)
    losses = []
    for _ in range(100):
        with fp8_autocast(True, RECIPE):
            out = model(x)
        loss = torch.nn.functional.mse_loss(out, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert math.isfinite(losses[-1])
    assert losses[-1] < 0.4 * losses[0]


def test_weight_held_in_fp8_survives_its_values(device):
    with fp8_model_init(True, RECIPE):
        module = Linear(48, 32, device=device)
    weight = module.weight
    values = weight.dequantize()
    with torch.no_grad():
        weight.copy_(values)
    assert torch.equal(weight.dequantize(), values)
    with fp8_autocast(True, RECIPE):
        module(torch.randn(8, 48, device=device)).sum().backward()
    assert torch.isfinite(weight.grad).all()
