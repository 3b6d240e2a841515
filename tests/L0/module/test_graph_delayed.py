"""make_graphed_callables with delay_wgrad_compute: backward_dw reads what the replay has left."""

import copy

import pytest
import torch
from checks import assert_same_bits
from graph_models import RECIPES, ROWS, WIDTH, count_replays, data, fp8_state, graphed, on_gpu

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear


def build(fuse):
    torch.manual_seed(2)
    options = {
        "device": "cuda", "params_dtype": torch.bfloat16, "delay_wgrad_compute": True,
        "fuse_wgrad_accumulation": fuse,
    }  # fmt: skip
    model = torch.nn.Sequential(
        Linear(WIDTH, WIDTH, **options),
        LayerNormLinear(WIDTH, WIDTH, **options),
        LayerNormMLP(WIDTH, 2 * WIDTH, **options),
    )
    return with_main_grads(model) if fuse else model


def with_main_grads(model):
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    return model


def train(model, recipe):
    seen = []
    for x, dy in data():
        x = x.clone().requires_grad_()
        with fp8_autocast(recipe is not None, recipe):
            out = model(x)
        out.backward(dy)
        weights = [p for p in model.parameters() if p.dim() == 2]
        if not seen:
            assert all(p.grad is None for p in weights)
        for module in model:
            module.backward_dw()
        seen += [out.detach().clone(), x.grad]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen += [p.main_grad.clone() for p in weights if hasattr(p, "main_grad")]
        seen += fp8_state(model)
    flush_fp8_state()
    return seen


@on_gpu
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise"])
def test_equals_eager(recipe, fuse):
    chosen = None if recipe is None else RECIPES[recipe]
    model = build(fuse)
    other = copy.deepcopy(model)
    if fuse:
        with_main_grads(other)
    expected = train(model, chosen)
    graphed(other, chosen)
    assert not any(module._modes.wgrad_store for module in other)
    found = train(other, chosen)
    assert len(found) == len(expected)
    assert_same_bits(found, expected)
    assert count_replays(other) > 0
    if fuse:
        assert all(p.main_grad.ne(0).any() for p in other.parameters() if p.dim() == 2)


@on_gpu
def test_a_gradient_must_be_made_before_the_next_forward():
    model = graphed(build(False))
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    model(x)
    with pytest.raises(RuntimeError, match="backward_dw must come before the next graphed forward"):
        model[0].backward_dw()


@on_gpu
def test_what_waits_already_is_kept():
    model = build(False)
    other = copy.deepcopy(model)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    for m in (model, other):
        m(x).sum().backward()
    graphed(other)
    for m in (model, other):
        for module in m:
            module.backward_dw()
    assert_same_bits([p.grad for p in other.parameters()], [p.grad for p in model.parameters()])
