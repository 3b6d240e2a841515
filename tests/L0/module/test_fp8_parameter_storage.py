"""FP8Parameters in checkpoints, copies, on other devices, and in FSDP2's hands."""

import copy
import io

import pytest
import torch

from apex_te import Linear
from apex_te.parameter import FP8Parameter
from apex_te.recipe import BlockScaling, DelayedScaling
from tests.checks import assert_same_bits, codes
from tests.fp8_weight_cases import RECIPES, build, reference, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RECIPES)
def test_loading_saved_values_restores_the_weight(name, dtype):
    scheme = RECIPES[name]
    for magnitude in (0.023, 1.7, 31.0):
        module = build(Linear, 96, 64, scheme=scheme, params_dtype=dtype)
        with torch.no_grad():
            module.weight.copy_(torch.randn(64, 96) * magnitude)
        other = build(Linear, 96, 64, scheme=scheme, params_dtype=dtype)
        other.load_state_dict(module.state_dict())
        wide = torch.float32
        assert torch.equal(other.weight.dequantize(wide), module.weight.dequantize(wide))
        x, dy = torch.randn(4, 96).to(dtype), torch.randn(4, 64).to(dtype)
        assert_same_bits(run(module, x, dy, scheme), run(other, x, dy, scheme))


@pytest.mark.parametrize("name", RECIPES)
def test_state_dicts_hold_values(name):
    module = build(scheme=RECIPES[name])
    saved = module.state_dict()
    assert type(saved["weight"]) is torch.Tensor
    assert torch.equal(saved["weight"], module.weight.dequantize())
    plain = torch.nn.Linear(160, 48)
    plain.load_state_dict(saved)  # strict, both ways
    other = build(scheme=RECIPES[name])
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.weight.dequantize(), module.weight.dequantize())
    assert type(other.weight) is FP8Parameter
    assert module.state_dict(keep_vars=True)["weight"] is module.weight
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], saved["weight"])


@pytest.mark.parametrize("name", RECIPES)
def test_copies_and_pickles(name):
    module = build(scheme=RECIPES[name], params_dtype=torch.bfloat16, preserve=True)
    module.weight.requires_grad_(False)
    file = io.BytesIO()
    torch.save(module.weight, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    others = [copy.deepcopy(module).weight, loaded, torch.load(file, weights_only=False).weight]
    initial = module.weight.get_high_precision_init_val()
    for other in others:
        assert type(other) is FP8Parameter
        assert isinstance(other, torch.nn.Parameter)
        assert not other.requires_grad
        assert other.dtype == torch.bfloat16
        assert other.recipe == module.weight.recipe
        assert other.data_ptr() != module.weight.data_ptr()
        assert torch.equal(other.dequantize(), module.weight.dequantize())
        assert torch.equal(other.get_high_precision_init_val(), initial)
        with torch.no_grad():
            other.fill_(1.0)
    shared = copy.deepcopy({"a": module.weight, "b": module.weight})
    assert shared["a"] is shared["b"]
    assert not module.weight.dequantize().eq(1).all()


def test_hostile_pickles_build_nothing():
    rebuild, (packed, *rest) = build().weight.__reduce_ex__(2)
    for wrong in (("make_recipe", packed[1]), (packed[0], {"x": 1}), None):
        with pytest.raises(ValueError, match="FP8Parameter: recipe must be what was saved"):
            rebuild(wrong, *rest)


def test_initial_values(device):
    assert build().weight.get_high_precision_init_val() is None
    module = build(Linear, 64, 32, scheme=DelayedScaling(), preserve=True, device=device)
    initial = module.weight.get_high_precision_init_val()
    assert initial.device.type == "cpu"
    expected = reference(initial)
    assert torch.equal(codes(module.weight._rowwise), codes(expected.rowwise))
    moved = module.bfloat16().weight
    assert moved.get_high_precision_init_val() is initial
    moved.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
    custom = build(Linear, 4, 4, init_method=torch.nn.init.ones_)
    assert custom.weight.dequantize().eq(1).all()


@pytest.mark.parametrize("name", RECIPES)
def test_meta_device_and_moves(name, device):
    module = build(scheme=RECIPES[name], device="meta", preserve=True)
    assert module.weight.is_meta
    assert module.weight.get_high_precision_init_val() is None
    module.to_empty(device=device)
    module.reset_parameters()
    weight = module.weight
    assert type(weight) is FP8Parameter
    assert weight.get_high_precision_init_val() is not None
    values = weight.dequantize(torch.float32)
    weight.grad = torch.ones(48, 160, device=device)
    module.half()
    assert module.weight is weight
    assert weight.dtype == weight.grad.dtype == torch.float16
    assert torch.equal(weight.dequantize(torch.float32), values)
    module.cpu()
    assert torch.equal(weight.dequantize(torch.float32), values.cpu())
    module.double()
    assert type(weight) is FP8Parameter
    assert weight.dequantize().dtype == torch.float64
    assert torch.equal(weight.dequantize(), values.cpu().double())
    assert module(torch.ones(2, 160, dtype=torch.float64)).dtype == torch.float64


def gathered(weights):
    """What FSDP2 makes of shards: its hooks around a concatenation along the rows."""
    inputs, contexts = zip(
        *(w.fsdp_pre_all_gather(None, None, None, None, None) for w in weights), strict=True
    )
    outputs = tuple(torch.cat(parts) for parts in zip(*inputs, strict=True))
    return outputs, contexts[0]


@pytest.mark.parametrize("name", RECIPES)
def test_fsdp_hooks(name, device):
    whole = build(Linear, 64, 256, scheme=RECIPES[name], device=device).weight.detach()
    shards = [whole.new_zeros(128, 64) for _ in range(2)]
    for shard, part in zip(shards, whole.chunk(2), strict=True):
        shard.narrow(0, 0, 128).copy_(part)
    outputs, context = gathered(shards)
    assert outputs[0].dtype == torch.uint8
    made, inner = shards[0].fsdp_post_all_gather(outputs, context, torch.float32)
    assert_same_bits(made.dequantize(), whole.dequantize())
    assert inner[0].data_ptr() == outputs[0].data_ptr()
    # Written apart, the shards have scales of their own.
    values = [torch.randn(128, 64).to(device), torch.randn(128, 64).to(device) * 5]
    for shard, value in zip(shards, values, strict=True):
        shard.copy_(value)
    outputs, context = gathered(shards)
    assert shards[0].fsdp_post_all_gather(outputs, context, torch.float32, out=made) is None
    exact = torch.cat(values)
    for rows in (slice(0, 128), slice(128, 256)):
        error = (made.dequantize()[rows] - exact[rows]).norm() / exact[rows].norm()
        assert error < 0.04
    if name == "tensorwise":
        alone, _ = shards[1].fsdp_post_all_gather(
            (shards[1]._rowwise.view(torch.uint8),), context, torch.float32
        )
        assert torch.equal(alone.dequantize(), shards[1].dequantize())


def test_fsdp_hooks_refuse_what_they_cannot_gather():
    weight = build(Linear, 64, 100, scheme=BlockScaling()).weight
    with pytest.raises(
        NotImplementedError, match=r"shards must be of whole blocks, got \[100, 64\]"
    ):
        weight.fsdp_pre_all_gather(None, None, None, None, None)
