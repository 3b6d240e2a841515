"""Recipes whose gradients are not quantized: products of the operands that ``backward`` names."""

import dataclasses

import pytest
import torch
from checks import in_pairs
from module_cases import gradients_for, leaf, plain_results, results, same_bits
from torch.nn import functional

import apex_te
from apex_te import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, fp8_autocast
from apex_te.fp8.scheme import build_quantizers
from apex_te.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    MXFP8Scaling,
    make_recipe,
)

RECIPES = {
    "blockwise": BlockScaling(),
    "server": BlockScaling(scales="server"),
    "tensorwise": CurrentScaling(),
    "hif8": CurrentScaling(fp8_format=Format.HIF8),
    "mxfp8": MXFP8Scaling(),
}
BACKWARDS = ["dequantized", "high_precision"]
MODULES = {
    "linear": lambda **options: Linear(160, 96, **options),
    "no bias": lambda **options: Linear(160, 96, bias=False, **options),
    "norm": lambda **options: LayerNormLinear(160, 96, return_layernorm_output=True, **options),
    "mlp": lambda **options: LayerNormMLP(160, 144, activation="swiglu", **options),
    "gelu": lambda **options: LayerNormMLP(160, 144, activation="gelu", **options),
}


def of(name, backward):
    return dataclasses.replace(RECIPES[name], backward=backward)


class Product(torch.autograd.Function):
    """``x @ w.T + b`` of the values of FP8 operands, with gradients of those that a recipe names.

    On CUDA the sum is the layer's own: FP8 tensor cores keep fewer bits of it than float32 has,
    so that codes of what follows would flip.
    """

    @staticmethod
    def forward(ctx, x, w, bias, recipe, dtype):
        quantizers = build_quantizers(recipe, None, 1, x.device).recording[0]

        def cast(quantizer, matrix):
            made = quantizer.quantize(matrix.float().contiguous(), True, False)[0]
            return quantizer.dequantize(made).double()

        matrix = x.reshape(-1, x.shape[-1])
        cast_x, cast_w = cast(quantizers.input, matrix), cast(quantizers.weight, w)
        kept = (cast_x, cast_w) if recipe.backward == "dequantized" else (matrix, w)
        ctx.save_for_backward(*kept)
        if not x.is_cuda:
            out = (cast_x @ cast_w.t()).view(*x.shape[:-1], w.shape[0])
            return out if bias is None else out + bias
        features = {"in_features": w.shape[1], "out_features": w.shape[0], "bias": bias is not None}
        layer = Linear(**features, device="cuda", params_dtype=dtype)
        for own, given in zip(layer.parameters(), (w, bias), strict=False):
            own.copy_(given)
        with fp8_autocast(True, recipe):
            return layer(x.to(dtype)).double()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dbias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return (rows @ w).view(*dy.shape[:-1], w.shape[1]), rows.t() @ x, dbias, None, None


def exact_results(module, x, grads, recipe):
    """``results`` in float64 by ``Product``."""
    dtype = next(module.parameters()).dtype

    def linear(x, w, bias):
        return Product.apply(x, w, bias, recipe, dtype)

    return plain_results(module, x, None, grads, torch.float64, linear)


def assert_near(found, exact, bound):
    assert found.keys() == exact.keys()
    for name, value in found.items():
        error = (value.double() - exact[name]).norm() / exact[name].norm()
        assert error <= bound, f"{name}: {error}"


@in_pairs(recipe=RECIPES, backward=BACKWARDS, name=MODULES, shape=[(48,), (2, 3, 7)])
def test_gradients_are_those_of_the_operands(device, recipe, backward, name, shape):
    module = MODULES[name](device=device)
    x = torch.randn(*shape, 160, device=device)
    grads, chosen = gradients_for(module, x), of(recipe, backward)
    found = results(module, x, None, grads, chosen)
    # In float32 sums of at most 160 products; the FP8 gradients are off by 2% and more.
    assert_near(found, exact_results(module, x, grads, chosen), 1e-5)
    usual = results(module, x, None, grads, RECIPES[recipe])
    for key in found:
        if key.startswith("output"):
            assert torch.equal(found[key], usual[key])
    with pytest.raises(AssertionError):
        assert_near(usual, exact_results(module, x, grads, chosen), 1e-3)


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("name", MODULES)
def test_in_bfloat16(device, backward, name):
    """Sums are rounded to bfloat16, and so are decoded values."""
    if torch.device(device).type == "cpu" and name in ("mlp", "gelu"):
        pytest.skip("products in bfloat16 are slow on a CPU")
    module = MODULES[name](device=device, params_dtype=torch.bfloat16)
    x = torch.randn(32, 160, device=device, dtype=torch.bfloat16)
    grads, chosen = gradients_for(module, x), of("server", backward)
    found = results(module, x, None, grads, chosen)
    assert_near(found, exact_results(module, x, grads, chosen), 2e-2)


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_groups_are_a_loop_of_layers(device, recipe, backward):
    splits, chosen = [32, 0, 5, 59], of(recipe, backward)
    grouped = GroupedLinear(4, 160, 96, device=device)
    x = torch.randn(96, 160, device=device)
    dy = torch.randn(96, 96, device=device)
    own = leaf(x)
    with fp8_autocast(True, chosen):
        out = grouped(own, splits)
    out.backward(dy)
    parts = zip(*(t.split(splits) for t in (x, dy, out, own.grad)), strict=True)
    for i, (rows, given, got, grad) in enumerate(parts):
        one = Linear(160, 96, device=device)
        weight, bias = (getattr(grouped, f"{kind}{i}") for kind in ("weight", "bias"))
        if not len(rows):
            assert not weight.grad.any()
            continue
        with torch.no_grad():
            one.weight.copy_(weight)
            one.bias.copy_(bias)
        alone = results(one, rows, None, [given], chosen)
        assert same_bits(
            alone,
            {"output 0": got, "input": grad, "weight": weight.grad, "bias": bias.grad},
        )


def main_grads(module, x, dy, chosen):
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    found = results(module, x, None, [dy], chosen)
    return found | {"weight": module.weight.main_grad}


OPTIONS = {
    "main_grad": {"fuse_wgrad_accumulation": True},
    "original": {"save_original_input": True},
    "delayed": {"delay_wgrad_compute": True},
}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("option", [*OPTIONS, "cached", "held", "compiled", "checkpoint"])
def test_options_change_no_bit(device, backward, option):
    chosen = of("blockwise", backward)
    x, dy = torch.randn(32, 160, device=device), torch.randn(32, 96, device=device)
    module = Linear(160, 96, device=device)
    expected = results(module, x, None, [dy], chosen)
    if option == "held":  # the values of a weight that FP8 data hold
        with apex_te.fp8_model_init(True, BlockScaling()):
            other = Linear(160, 96, device=device)
        with torch.no_grad():
            module.weight.copy_(other.weight.dequantize())
            other.bias.copy_(module.bias)
        expected = results(module, x, None, [dy], chosen)
        assert same_bits(results(other, x, None, [dy], chosen), expected)
        return
    other = Linear(160, 96, device=device, **OPTIONS.get(option, {}))
    other.load_state_dict(module.state_dict())
    if option == "main_grad":
        found = main_grads(other, x, dy, chosen)
    elif option == "cached":
        results(other, x, None, [dy], chosen, is_first_microbatch=True)
        found = results(other, x, None, [dy], chosen, is_first_microbatch=False)
    elif option in ("compiled", "checkpoint"):
        own = leaf(x)

        def call(x):
            with fp8_autocast(True, chosen):
                return other(x)

        if option == "compiled":
            call = torch.compile(call, backend="aot_eager", fullgraph=True)
            out = call(own)
        else:
            out = torch.utils.checkpoint.checkpoint(call, own, use_reentrant=False)
        out.backward(dy)
        grads = {name: parameter.grad for name, parameter in other.named_parameters()}
        found = {"output 0": out.detach(), "input": own.grad} | grads
    else:
        found = results(other, x, None, [dy], chosen)
        if option == "delayed":
            other.backward_dw()
            found |= {name: parameter.grad for name, parameter in other.named_parameters()}
    assert same_bits(found, expected)


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_low_rank_adapter_gets_the_same_gradient(device, backward):
    chosen, module = of("blockwise", backward), Linear(160, 96, device=device)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    down, up = torch.randn(8, 160, device=device), torch.randn(96, 8, device=device)
    dy, found = torch.randn(32, 96, device=device), []
    x = torch.randn(32, 160, device=device)
    for fused in (True, False):
        leaves = [leaf(x), leaf(down), leaf(up)]
        own, a, b = leaves
        with fp8_autocast(True, chosen):
            if fused:
                out = module.forward_low_rank(own, a, b, 0.5)
            else:
                out = module(own) + 0.5 * functional.linear(functional.linear(own, a), b)
        out.backward(dy)
        found.append([out.detach(), *(t.grad for t in leaves)])
    for fused, apart in zip(*found, strict=True):
        torch.testing.assert_close(fused, apart, rtol=1e-4, atol=1e-4)


def test_values_that_are_refused():
    for kind in (BlockScaling, CurrentScaling, MXFP8Scaling):
        with pytest.raises(ValueError, match="backward must be None or one of dequantized, high"):
            kind(backward="fp8")
        with pytest.raises(TypeError, match="backward must be a str, got bool"):
            kind(backward=True)
    with pytest.raises(TypeError, match="unexpected argument 'backward'"):
        DelayedScaling(backward="dequantized")
    assert make_recipe("blockwise", backward="dequantized").backward == "dequantized"


def test_what_cannot_be_served_is_refused(device):
    chosen = of("blockwise", "dequantized")
    hidden, weight = torch.randn(8, 32, device=device), torch.randn(48, 32, device=device)
    target = torch.zeros(8, dtype=torch.int64, device=device)
    with pytest.raises(NotImplementedError, match="fp8_recipe must have backward=None, got"):
        apex_te.linear_cross_entropy(hidden, weight, target, fp8_recipe=chosen)
    if torch.device(device).type == "cuda":
        layer = GroupedLinear(2, 32, 48, device=device)
        splits = torch.tensor([3, 5], device=device)
        with fp8_autocast(True, chosen), pytest.raises(NotImplementedError, match="backward='deq"):
            layer(hidden, splits)
