"""How much noise FP8 adds: one product, and whole layers against their emulation in plain PyTorch.

The emulation quantizes at the same points with the ops' plain-PyTorch references, multiplies in
float64, and leaves everything else in float32.
"""

import pytest
import torch
from module_cases import RECIPES, gradients_for, plain_results, randomized, results, sqnr

from apex_te.fp8.scheme import build_quantizers
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear
from apex_te.ops import block_quantize, current_scale, hif8, mx_quantize, row_quantize
from apex_te.ops.reference_codec import decode_fp8

LAYERS = {
    "Linear": lambda h, **options: Linear(h, h, **options),
    "LayerNormLinear": lambda h, **options: LayerNormLinear(h, 2 * h, **options),
    "gelu": lambda h, **options: LayerNormMLP(h, 4 * h, **options),
    "swiglu": lambda h, **options: LayerNormMLP(
        h, 2 * h, activation="swiglu", normalization="RMSNorm", bias=False, **options
    ),
}
# relu's and reglu's zeroed units pass on less of a gradient and all of its noise.
GATES = {
    name: lambda h, name=name, **options: LayerNormMLP(h, 4 * h, activation=name, **options)
    for name in ("relu", "srelu", "reglu", "geglu")
}


def quantized(x, recipe, role, transposed):
    """Values of x [rows, cols] after quantization for a product along cols, or along rows."""
    formats, is_gradient = recipe.fp8_format.value, role == "grad"
    dtype = formats.bwd_dtype if is_gradient else formats.fwd_dtype
    if recipe.quantizer == "hif8":
        target = formats.max_bwd if is_gradient else formats.max_fwd
        out = hif8.reference_quantize_current(x, target)
        return hif8.reference_decode(out.rowwise) * out.scale_inv
    if recipe.quantizer in ("delayed", "current"):
        out = current_scale.reference(x, dtype)
        return decode_fp8(out.rowwise) * out.scale_inv
    if recipe.quantizer == "block":
        rows = 128 if role == "weight" else 1
        out = block_quantize.reference(x, dtype, block_rows=rows)
        codes, scale = out[2:] if transposed else out[:2]
        values = block_quantize.reference_dequantize(codes, scale, block_rows=rows)
    elif recipe.quantizer == "rowwise":
        return rowwise_quantized(x, dtype, recipe.scales, transposed and role != "weight")
    elif recipe.quantizer != "mx":  # an added scheme, which tests its own numbers
        quantizers = build_quantizers(recipe, None, 1, x.device).frozen[0]
        quantizer = quantizers.grad_output if is_gradient else getattr(quantizers, role)
        return quantizer.dequantize(quantizer.quantize(x, not transposed, transposed)[0])
    else:
        out = mx_quantize.reference(x, dtype, rounding=recipe.rounding)
        codes, scale = out[2:] if transposed else out[:2]
        values = mx_quantize.reference_dequantize(codes, scale)
    return values.t() if transposed else values


def rowwise_quantized(x, dtype, scales, transposed=False, column_scale=None):
    """Values of x with a scale for each row, or for each column; `column_scale` is for the cast."""
    out = row_quantize.reference(x, dtype, scales=scales, column_scale=column_scale)
    codes, scale = out[2:] if transposed else out[:2]
    values = decode_fp8(codes) * scale
    values = values if column_scale is None else values / column_scale
    return values.t() if transposed else values


def gradient_of_output(dy, recipe, weight):
    """Values of dy [rows, out] for dgrad; with rowwise scaling it is cast times weight's scales."""
    if recipe.quantizer != "rowwise":
        return quantized(dy, recipe, "grad", False)
    formats, scales = recipe.fp8_format.value, recipe.scales
    scale_inv = row_quantize.reference(weight, formats.fwd_dtype, scales=scales).rowwise_scale_inv
    return rowwise_quantized(dy, formats.bwd_dtype, scales, column_scale=scale_inv[:, 0])


def product(a, b):
    return (a.double() @ b.double()).float()


class EmulatedLinear(torch.autograd.Function):
    """x @ weight.T + bias [rows, out] with each operand of the three products quantized."""

    @staticmethod
    def forward(ctx, x, weight, bias, recipe):
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.has_bias = recipe, bias is not None
        y = product(
            quantized(x, recipe, "input", False), quantized(weight, recipe, "weight", False).t()
        )
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        recipe = ctx.recipe
        dx = product(
            gradient_of_output(dy, recipe, weight), quantized(weight, recipe, "weight", True)
        )
        dw = product(quantized(dy, recipe, "grad", True).t(), quantized(x, recipe, "input", True))
        return dx, dw, dy.double().sum(0).float() if ctx.has_bias else None, None


def check_layer(layer, recipe, x, grads, limit):
    """Every output and gradient within ``limit`` dB of the emulated layer, and at least 14 dB."""
    actual = results(layer, x, None, grads, recipe)
    exact = plain_results(layer, x, None, grads, torch.float64)

    def linear(x, weight, bias):
        return EmulatedLinear.apply(x, weight, bias, recipe)

    emulated = plain_results(layer, x, None, grads, torch.float32, linear)
    assert actual.keys() == exact.keys() == emulated.keys()
    for name, value in actual.items():
        found, expected = sqnr(exact[name], value), sqnr(exact[name], emulated[name])
        # A bias gradient behind no product is exact but for the rounding of its dtype.
        assert found >= min(expected - limit, 45.0), f"{name}: {found:.2f} and {expected:.2f} dB"
        assert found >= 14.0, f"{name}: {found:.2f} dB"


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_product(device, recipe):
    """Operands of N(0, 1): the three products of a linear layer, each by itself."""
    chosen, size = RECIPES[recipe], 512
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    module = Linear(size, size, bias=False, device=device, params_dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(torch.randn(size, size))
    x, dy = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    actual = results(module, x, None, [dy], chosen)
    exact = plain_results(module, x, None, [dy], torch.float64)
    fp8 = chosen.fp8_format.value
    backward = 27.0 if fp8.fwd_dtype is fp8.bwd_dtype and fp8.max_fwd == fp8.max_bwd else 23.5
    for name, floor in (("output 0", 27.0), ("input", backward), ("weight", backward)):
        assert sqnr(exact[name], actual[name]) >= floor, name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_small_layer(recipe, layer):
    module = randomized(LAYERS[layer](64))
    x = torch.randn(160, 64)
    check_layer(module, RECIPES[recipe], x, gradients_for(module, x), 0.5)


@pytest.mark.cuda
@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", LAYERS | GATES)
def test_layer(recipe, layer):
    module = (LAYERS | GATES)[layer](2048, device="cuda", params_dtype=torch.bfloat16)
    x = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)
    # Only the forward product of these recipes accumulates fast.
    fast = not RECIPES[recipe].use_split_accumulator[0]
    check_layer(module, RECIPES[recipe], x, [torch.randn_like(gradients_for(module, x)[0])],
                1.0 if fast else 0.5)  # fmt: skip
