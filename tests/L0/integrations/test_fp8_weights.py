"""from_torch inside fp8_model_init: weights held in FP8, in files and optimizers as ever."""

import copy
import warnings

import pytest
import torch
from families import IDS, build, load, logits
from torch import nn

from apex_te import fp8_autocast, fp8_model_init
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.integrations import from_torch, key_map
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling

RECIPES = [DelayedScaling(amax_history_len=4), CurrentScaling(), BlockScaling()]


def held(model, **options):
    """Names of the parameters that are held in FP8, after from_torch in fp8_model_init."""
    init = {
        k: options.pop(k) for k in ("recipe", "preserve_high_precision_init_val") if k in options
    }
    with fp8_model_init(**init):
        from_torch(model, **options)
    return {key for key, p in model.named_parameters() if type(p) is FP8Parameter}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=["delayed", "tensorwise", "blockwise"])
def test_trains_and_saves(recipe, fuse, tmp_path):
    plain = build("qwen2")
    model = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = held(model, recipe=recipe, fuse=fuse)
    matrices = {k for k, p in model.named_parameters() if p.dim() == 2 and "embed" not in k}
    assert names == matrices
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = logits(plain, "qwen2")
    actual = logits(model, "qwen2")
    assert 0 < (actual - expected).norm() < 0.1 * expected.norm()
    model.save_pretrained(tmp_path)
    again = load("qwen2", tmp_path)
    torch.testing.assert_close(logits(again, "qwen2"), actual, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(type(value) is torch.Tensor for value in model.state_dict().values())
    views = model.state_dict(keep_vars=True)
    assert views.keys() == plain.state_dict().keys()
    other = build("qwen2")
    held(other, recipe=recipe, fuse=fuse)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(logits(other, "qwen2"), actual)
    assert (
        key_map(model).to_original(dict(model.named_parameters())).keys()
        == dict(plain.named_parameters()).keys()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with fp8_autocast(True, recipe):
            out = logits(model, "qwen2")
        loss = nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert {k for k, p in model.named_parameters() if type(p) is FP8Parameter} == names


def test_initial_values_and_frozen_weights():
    model = build("llama")
    original = {key: p.detach().clone() for key, p in model.named_parameters()}
    model.model.layers[0].requires_grad_(False)
    names = held(model, preserve_high_precision_init_val=True)
    assert "model.layers.0.self_attn.q_proj.weight" in names
    for key, parameter in model.named_parameters():
        assert parameter.requires_grad == (".layers.0." not in key)
        if key in names:
            assert torch.equal(parameter.get_high_precision_init_val(), original[key])
            assert not torch.equal(parameter.detach().dequantize(), original[key])


def test_shared_weights():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    held(model)
    assert type(model[0].weight) is FP8Parameter
    assert model[1].weight is model[0].weight
    model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    with pytest.warns(UserWarning, match=r"1 \(fp8_model_init: its weight is shared with 0, and"):
        assert held(model, include="*") == set()
    assert model[1].weight is model[0].weight


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", r"2 of transformer.h.\*.attn.c_attn \(fp8_model_init: its weights are transposed"),
        ("mixtral", r"2 of model.layers.\*.mlp.experts \(fp8_model_init: its weights are stacked"),
    ],
)
def test_layouts_that_stay_are_named(name, message):
    model = build(name)
    with pytest.warns(UserWarning, match=message):
        names = held(model)
    assert not any("c_attn" in key or "experts" in key for key in names)
    expected = logits(build(name), name)
    assert (logits(model, name) - expected).norm() < 0.5 * expected.norm()


def test_joined_conv1d_is_held():
    model = build("gpt2")
    original = model.state_dict()
    original = {key: value.clone() for key, value in original.items()}
    names = held(model, fuse=True)
    assert {"transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.fc1_weight"} <= names
    state = model.state_dict()
    assert list(state) == list(original)
    key = "transformer.h.1.mlp.c_fc.weight"
    assert state[key].shape == original[key].shape
    assert (state[key] - original[key]).norm() < 0.1 * original[key].norm()


def test_meta():
    with torch.device("meta"):
        model = build("llama")
    names = held(model)
    assert names
    assert all(p.is_meta for p in model.parameters())


def test_refused_once_parameters_are_in_an_optimizer():
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"fp8_model_init must be left once .* \(SGD holds"):
        held(model)
    assert optimizer
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_memory_footprint_counts_what_is_held(recipe):
    """``get_memory_footprint`` counts FP8 weights with one byte an element, and their scales."""
    plain = build("llama")
    before = plain.get_memory_footprint()
    names = {key for key, p in plain.named_parameters() if "proj" in key}
    nominal = sum(p.numel() for key, p in plain.named_parameters() if key in names)
    with fp8_model_init(recipe=recipe):
        model = from_torch(plain)
    saved = before - model.get_memory_footprint()
    assert 2.7 * nominal < saved < 3 * nominal
    assert copy.deepcopy(model).get_memory_footprint() == model.get_memory_footprint()
    buffers = sum(b.nelement() * b.element_size() for b in model.buffers())
    assert model.get_memory_footprint(return_buffers=False) == before - saved - buffers
