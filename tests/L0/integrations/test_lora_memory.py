"""LoRA over a frozen base that is held in FP8: its bytes, what backward keeps, and training."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import apex_te
from apex_te import recipe
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.integrations import from_torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import lora_stack

RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "tensorwise": recipe.CurrentScaling(),
    "blockwise": recipe.BlockScaling(),
    "mxfp8": recipe.MXFP8Scaling(),
}
SHAPE = lora_stack.Shape(128, 384, 4, 2)


def stack(scaling):
    kind = "torch" if scaling is None else "apex_te"
    return lora_stack.make_stack(SHAPE, 2, kind, scaling, 4, "cpu", torch.bfloat16)


def weight_bytes(model, frozen):
    found = [p for p in model.parameters() if p.requires_grad is not frozen and p.dim() == 2]
    return sum(map(lora_stack.tensor_bytes, found))


def alive():
    """Bytes of the storages of all tensors that exist."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    storages = {}
    for tensor in tensors:
        if type(tensor) is FP8Parameter or tensor.device.type != "cpu":
            continue
        try:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        except (
            RuntimeError
        ):  # other tests in the process leave sparse and fake ones, without memory
            continue
    return sum(storages.values())


def step(model, scaling, x):
    with apex_te.fp8_autocast(fp8_recipe=scaling):
        loss = model(x).float().square().mean()
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


@pytest.mark.parametrize("name", RECIPES)
def test_base_has_one_byte_an_element(name):
    """A frozen weight is one byte an element and its scales, at most a byte for 32 elements."""
    plain, held = stack(None), stack(RECIPES[name])
    elements = sum(p.numel() for p in plain.parameters() if not p.requires_grad and p.dim() == 2)
    assert weight_bytes(plain, True) == 2 * elements
    assert elements < weight_bytes(held, True) <= elements + elements // 32
    assert weight_bytes(held, False) == weight_bytes(plain, False)
    base = [p for p in held.parameters() if p.dim() == 2 and not p.requires_grad]
    assert all(type(p) is FP8Parameter for p in base)


@pytest.mark.parametrize("name", ["delayed", "blockwise"])
def test_steps_leave_no_copy_of_the_base(name):
    model = stack(RECIPES[name])
    x = torch.randn(8, 16, SHAPE.hidden, dtype=torch.bfloat16)
    step(model, RECIPES[name], x)  # allocates FP8 state and workspaces
    step(model, RECIPES[name], x)
    before = alive()
    step(model, RECIPES[name], x)
    smallest = min(p.numel() for p in model.parameters() if type(p) is FP8Parameter)
    assert alive() - before < smallest


@pytest.mark.parametrize("name", RECIPES)
def test_frozen_layer_keeps_nothing_for_backward(name):
    """Neither its input, whose gradient alone is wanted, nor a second copy of its weight."""
    with apex_te.fp8_model_init(recipe=RECIPES[name]):
        layer = apex_te.Linear(256, 128, bias=False, params_dtype=torch.bfloat16)
    layer.requires_grad_(False)
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    kept: list[torch.Tensor] = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    for _ in range(3):  # the second one may record a program, which the third runs
        kept.clear()
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            apex_te.fp8_autocast(fp8_recipe=RECIPES[name]),
        ):
            out = layer(x)
        weight = layer.weight
        others = [t for t in kept if type(t) is not FP8Parameter or t is not weight]
        others = [t for t in others if t.numel() > 1]
        assert sum(map(lora_stack.tensor_bytes, others)) < weight.numel() // 64, [
            (tuple(t.shape), t.dtype) for t in others
        ]
        (dx,) = torch.autograd.grad(out.sum(), x)
        expected = torch.ones(64, 128) @ weight.detach().dequantize().float()
        torch.testing.assert_close(dx.float(), expected, rtol=0.1, atol=0.1 * expected.std().item())


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_of_adapters(name):
    """Within FP8's error of the same adapters over the base in high precision."""
    plain, held = stack(None), stack(RECIPES[name])
    for model in (plain, held):
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.05)
    torch.manual_seed(4)
    x = torch.randn(4, 32, SHAPE.hidden, dtype=torch.bfloat16)
    loss = plain(x).float().square().mean()
    expected = torch.autograd.grad(loss, [p for p in plain.parameters() if p.requires_grad])
    for _ in range(2):  # the first step of delayed scaling has scales of 1
        actual = step(held, RECIPES[name], x)
    for found, wanted in zip(actual, expected, strict=True):
        error = (found.float() - wanted.float()).norm() / wanted.float().norm()
        assert 0 < error < 0.15


@pytest.fixture
def peft_model():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    with apex_te.fp8_model_init(recipe=RECIPES["tensorwise"]):
        from_torch(model, include="*")
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def test_peft_trains_over_held_weights(peft_model):
    base = {n: p for n, p in peft_model.named_parameters() if type(p) is FP8Parameter}
    assert len(base) == 2
    assert not any(p.requires_grad for p in base.values())
    data = {name: p.detach().dequantize() for name, p in base.items()}
    optimizer = torch.optim.AdamW([p for p in peft_model.parameters() if p.requires_grad], lr=1e-2)
    x, target = torch.randn(64, 128), torch.randn(64, 128)
    losses = []
    for _ in range(40):
        with apex_te.fp8_autocast(fp8_recipe=RECIPES["tensorwise"]):
            loss = nn.functional.mse_loss(peft_model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is None for p in base.values())
    for name, p in base.items():
        assert torch.equal(p.detach().dequantize(), data[name])
    with torch.no_grad():
        before = peft_model(x)
        merged = peft_model.merge_and_unload()
        after = merged(x)
    held = [p for p in merged.parameters() if type(p) is FP8Parameter]
    assert len(held) == 2
    assert (after - before).norm() < 0.1 * before.norm()
