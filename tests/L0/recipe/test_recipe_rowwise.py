"""RowwiseScaling: products against float64 products of operands that the reference casts."""

import copy
import dataclasses
import io

import pytest
import torch
from checks import assert_same_bits, in_pairs, sqnr

from apex_te import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, fp8_autocast
from apex_te.fp8.model_init import fp8_model_init
from apex_te.fp8.parameter.decode import quantizers_of
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.ops import row_quantize
from apex_te.ops.reference_codec import decode_fp8
from apex_te.recipe import Format, RowwiseScaling, make_recipe

E4M3 = torch.float8_e4m3fn
RECIPES = {
    "server": RowwiseScaling(),
    "pow2": RowwiseScaling(scales="pow2"),
    "hybrid fp32": RowwiseScaling(fp8_format="hybrid", scales="fp32", eps=1e-6),
}
SIZES = [(32, 48, 64), (7, 33, 21), (130, 16, 300), (1, 5, 3)]  # rows, in, out


def cast(x, dtype, recipe, column_scale=None):
    """Codes of the reference and their scales, and their values in float64."""
    out = row_quantize.reference(
        x.cpu(), dtype, scales=recipe.scales, eps=recipe.eps, column_scale=column_scale
    )
    codes, scale_inv = out.rowwise, out.rowwise_scale_inv
    return codes, scale_inv, decode_fp8(codes).double() * scale_inv.double()


def step(layer, x, dy, recipe):
    x = x.detach().requires_grad_()
    with fp8_autocast(True, recipe):
        y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@in_pairs(
    name=RECIPES,
    sizes=SIZES,
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    held=[False, True],
    first=[None, True],
)
def test_products_of_a_layer(device, name, sizes, dtype, held, first):
    recipe, (rows, cols, features) = RECIPES[name], sizes
    formats = recipe.fp8_format.value
    with fp8_model_init(held, recipe):
        layer = Linear(cols, features, params_dtype=dtype, device=device)
    w = torch.randn(features, cols) * 10.0 ** torch.linspace(-2, 0, features)[:, None]
    with torch.no_grad():
        layer.weight.copy_(w.to(device, dtype))
    x, dy = (torch.randn(rows, n).to(device, dtype) for n in (cols, features))
    x = (x * 10.0 ** torch.arange(rows, device=device)[:, None].remainder(3)).to(dtype)
    codes, scale_inv, weight = cast(w.to(dtype), formats.fwd_dtype, recipe)
    if held:
        assert_same_bits(list(layer.weight.codes()), [codes, scale_inv])
    layer_of = layer if first is None else (lambda x: layer(x, is_first_microbatch=True))
    leaf = x.detach().requires_grad_()
    with fp8_autocast(True, recipe):
        y = layer_of(leaf)
    y.backward(dy)
    # The weight's scales go into the cast of dy: its codes are those of forward.
    folded = cast(dy, formats.bwd_dtype, recipe, scale_inv[:, 0])[2]
    dx = folded @ decode_fp8(codes).double()
    of_columns = [
        cast(t.t(), each, recipe)[2]
        for t, each in ((dy, formats.bwd_dtype), (x, formats.fwd_dtype))
    ]
    floor = {torch.float32: 80, torch.bfloat16: 46, torch.float16: 52}[dtype]
    floor = floor if device.type == "cpu" else min(floor, 55)
    for found, wanted in (
        (y, cast(x, formats.fwd_dtype, recipe)[2] @ weight.t() + layer.bias.double().cpu()),
        (leaf.grad, dx), (layer.weight.grad, of_columns[0] @ of_columns[1].t()),
    ):  # fmt: skip
        assert sqnr(wanted, found.detach().cpu()) >= floor
    assert sqnr(dy.double().cpu() @ w.to(dtype).double(), leaf.grad.cpu()) >= 20


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear, LayerNormMLP])
@pytest.mark.parametrize("name", RECIPES)
def test_a_weight_in_fp8_is_an_ordinary_one_of_its_codes(device, name, kind):
    """Bit for bit, frozen or not, after a state dict and pickles, and at a step of lr 0."""
    recipe = RECIPES[name]
    with fp8_model_init(True, recipe):
        layer = kind(40, 56, device=device)
    twin = kind(40, 56, device=device)
    with torch.no_grad():
        for own, other in zip(layer.parameters(), twin.parameters(), strict=True):
            other.copy_(own.dequantize() if type(own) is FP8Parameter else own)
    x = torch.randn(9, 40, device=device)
    dy = torch.randn(9, 40 if kind is LayerNormMLP else 56, device=device)
    found = step(layer, x, dy, recipe)
    if name == "pow2":  # other values do not restore their scales
        assert_same_bits(found, step(twin, x, dy, recipe))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    with fp8_model_init(True, recipe):
        other = kind(40, 56, device=device)
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.optim.AdamW(layer.parameters(), 0.0).step()
    for again in (other, layer, copy.deepcopy(layer)):
        again.zero_grad()
        assert_same_bits(step(again, x, dy, recipe), found)
    for parameter in other.parameters():
        parameter.requires_grad_(type(parameter) is not FP8Parameter)
        parameter.grad = None
    frozen = step(other, x, dy, recipe)
    assert_same_bits(frozen[:2], found[:2])


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_groups_are_a_loop_of_layers(device, single, held):
    recipe, splits = RECIPES["server"], [5, 0, 17, 8]
    with fp8_model_init(held, recipe):
        layer = GroupedLinear(4, 40, 24, single_parameter=single, device=device)
        parts = [Linear(40, 24, device=device) for _ in splits]
    with torch.no_grad():
        for i, part in enumerate(parts):
            part.weight.copy_(layer.weight[i] if single else getattr(layer, f"weight{i}"))
            part.bias.copy_(layer.bias[i] if single else getattr(layer, f"bias{i}"))
    x, dy = torch.randn(30, 40, device=device), torch.randn(30, 24, device=device)
    leaf = x.clone().requires_grad_()
    with fp8_autocast(True, recipe):
        y = layer(leaf, splits)
    y.backward(dy)
    each = [
        step(part, rows, grad, recipe)
        for part, rows, grad in zip(parts, x.split(splits), dy.split(splits), strict=True)
    ]
    assert_same_bits([y.detach(), leaf.grad], [torch.cat([e[i] for e in each]) for i in (0, 1)])
    weights = layer.weight.grad if single else [getattr(layer, f"weight{i}").grad for i in range(4)]
    for own, (*_, wanted, _) in zip(weights, each, strict=True):
        assert_same_bits(own, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bound_of_activations(device, dtype):
    """FBGEMM's: a token's scale is that of min(amax, bound), and larger values saturate."""
    recipe = RowwiseScaling(activation_scale_ub=3.0)
    x = (torch.randn(20, 48, device=device) * 2).to(dtype)
    x[2, 5], x[3] = torch.inf, x[3] * 1e-2
    amax = x.float().abs().amax(1, keepdim=True).clamp(max=3.0)
    scale_inv = amax / torch.full_like(amax, 448.0)
    wanted = (x.float() / scale_inv).clamp(-448, 448).to(E4M3)
    quantizers = quantizers_of(recipe, x.device)
    made = quantizers.input.quantize(x)[0]
    assert_same_bits([made.rowwise, made.rowwise_scale_inv], [wanted, scale_inv])
    assert (amax == 3).any()
    assert (amax < 3).any()
    layer = Linear(48, 32, bias=False, params_dtype=dtype, device=device)
    found = step(layer, x, torch.ones(20, 32, device=device, dtype=dtype), recipe)
    bounded = x.clamp(-3, 3)
    again = step(layer, bounded, torch.ones(20, 32, device=device, dtype=dtype), RECIPES["server"])
    layer.zero_grad()
    assert_same_bits(found[0], again[0])
    plain = quantizers_of(RECIPES["server"], x.device)
    for own, other in (
        (quantizers.weight, plain.weight),
        (quantizers.grad_output, plain.grad_output),
    ):
        assert own.settings() == other.settings()


def test_compiled(device):
    recipe = RECIPES["server"]
    with fp8_model_init(True, recipe):
        layer = torch.nn.Sequential(Linear(48, 40, device=device), Linear(40, 33, device=device))
    twin = copy.deepcopy(layer)
    torch._dynamo.reset()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    x, dy = torch.randn(11, 48, device=device), torch.randn(11, 33, device=device)
    expected, found = step(layer, x, dy, recipe), step(compiled, x, dy, recipe)
    assert_same_bits(found, expected)


def test_is_found_by_name_and_rejects_bad_arguments():
    recipe = make_recipe("rowwise", "hybrid", scales="pow2")
    assert recipe == RowwiseScaling(fp8_format=Format.HYBRID, scales="pow2")
    assert dataclasses.replace(recipe, eps=0.5).eps == 0.5
    with pytest.raises(ValueError, match=r"^RowwiseScaling: scales must be one of .*got 'row'"):
        RowwiseScaling(scales="row")
    with pytest.raises(ValueError, match=r"^RowwiseScaling: eps must be finite"):
        RowwiseScaling(eps=-1.0)
    with pytest.raises(ValueError, match=r"activation_scale_ub must be finite and above 0, got 0"):
        RowwiseScaling(activation_scale_ub=0)
    with pytest.raises(TypeError, match=r"activation_scale_ub must be a float, got str"):
        RowwiseScaling(activation_scale_ub="1200")
    with pytest.raises(ValueError, match=r"scale_inv must have shape \[4, 1\].*got \[4\]"):
        FP8Parameter.from_codes(
            torch.zeros(4, 8).to(E4M3), torch.ones(4), RowwiseScaling(), torch.float32
        )
