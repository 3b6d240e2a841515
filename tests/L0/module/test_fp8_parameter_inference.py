"""Weights held in FP8 in torch.inference_mode(): every result is that under no_grad."""

import copy
import io

import pytest
import torch
from checks import assert_same_bits
from fp8_weight_cases import RECIPES, build
from layer_kinds import KINDS, dtype_on, repeatable, shape_of
from layer_kinds import build as build_layers

from apex_te import Linear, fp8_autocast, fp8_model_init
from apex_te.fp8.parameter.parameter import FP8Parameter


def saved(value):
    """The value after ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


READS = {
    "float": lambda w: w.float(),
    "bfloat16": lambda w: w.bfloat16(),
    "to its dtype": lambda w: w.to(w.dtype),
    "cpu": lambda w: w.cpu(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "transpose": lambda w: w.transpose(0, 1),
    "clone": lambda w: w.clone(),
    "dequantize": lambda w: w.dequantize(),
    "deepcopy": copy.deepcopy,
    "view": lambda w: w.view(-1),
    "flatten": lambda w: w.flatten(),
    "contiguous": lambda w: w.contiguous(),
    "slice": lambda w: w[:128],
    "chunk": lambda w: w.chunk(2)[1],
    "matmul": lambda w: torch.ones(3, 256, device=w.device) @ w.T,
    "linear": lambda w: torch.nn.functional.linear(torch.ones(3, 256, device=w.device), w),
    "file": saved,
    "write": lambda w: w.mul_(2.0),
    "copy_": lambda w: w.copy_(torch.ones_like(w)),
}


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_ops(name, made_inside, device):
    """Also of a weight that was made in inference mode, there and later under no_grad."""
    weights = []
    for inside in (False, made_inside):
        torch.manual_seed(0)
        with torch.inference_mode(inside):
            weights.append(build(Linear, 256, 256, scheme=RECIPES[name], device=device).weight)
    for read in READS.values():
        found = []
        for weight, mode in zip(weights, (torch.no_grad, torch.inference_mode), strict=True):
            with mode():
                got = read(copy.deepcopy(weight))
                values = got.dequantize() if type(got) is FP8Parameter else got
                found.append((type(got), got.dtype, values.as_subclass(torch.Tensor).clone()))
        assert found[0][:2] == found[1][:2]
        assert_same_bits(found[0][2], found[1][2])
    if made_inside:
        with torch.no_grad():
            assert_same_bits(weights[1].t().clone(), weights[0].t().clone())
            assert_same_bits(weights[1].detach().dequantize(), weights[0].dequantize())


def test_views_share_the_data():
    """A write after inference mode is seen in a view made there, and training goes on."""
    weight = build(Linear, 32, 32).weight
    with torch.inference_mode():
        alias, rows = weight.detach(), weight[:16]
    with torch.no_grad():
        weight.fill_(2.0)
        assert torch.equal(alias.dequantize(), torch.full((32, 32), 2.0))
        assert torch.equal(rows.dequantize(), torch.full((16, 32), 2.0))
    weight.dequantize().sum().backward()
    assert torch.equal(weight.grad, torch.ones(32, 32))


@pytest.mark.cover(2)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("tensor")])
def test_modules(kind, name, device):
    """Forward in and outside a region, under autocast, and with state dicts and copies."""
    with fp8_model_init(True, RECIPES[name]):
        model = build_layers(kind, device)
    x = torch.randn(shape_of(kind, device)).to(device, dtype_on(device))

    def evaluation(model):
        outside = model(x).clone()
        with torch.autocast(device.type, torch.bfloat16):
            outside = [outside, model(x).clone()]
        with fp8_autocast(True, RECIPES[name]):
            inside = model(x).clone()
        state = [v for v in model.state_dict().values() if isinstance(v, torch.Tensor)]
        model.load_state_dict(model.state_dict())
        again = copy.deepcopy(model)(x)
        saved({key: v for key, v in model.state_dict().items() if isinstance(v, torch.Tensor)})
        return [*outside, inside, again.clone(), *[torch.clone(v.float()) for v in state]]

    with repeatable(device, kind):
        with torch.no_grad():
            expected = evaluation(copy.deepcopy(model))
        with torch.inference_mode():
            found = evaluation(model)
        for a, b in zip(found, expected, strict=True):
            a, b = (t.dequantize() if type(t) is FP8Parameter else t for t in (a, b))
            assert_same_bits(a, b)
        model(x.clone().requires_grad_()).sum().backward()
