"""FP8Parameters in checkpoints, copies, on other devices, and in FSDP2's hands."""

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch

from apex_te import Linear, fp8_autocast, fp8_model_init
from apex_te.fp8.parameter.parameter import FP8Parameter
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
    others.append(pickle.loads(pickle.dumps(module)).weight)
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
    for name in ("get_high_precision_init_val", "clear_high_precision_init_val"):
        assert not hasattr(build().weight, name)  # by which Megatron-Core tells
    with pytest.raises(AttributeError, match="preserve_high_precision_init_val=True"):
        build().weight.get_high_precision_init_val()
    module = build(Linear, 64, 32, scheme=DelayedScaling(), preserve=True, device=device)
    initial = module.weight.get_high_precision_init_val()
    assert initial.device.type == "cpu"
    expected = reference(initial)
    assert torch.equal(codes(module.weight._rowwise), codes(expected.rowwise))
    moved = module.bfloat16().weight
    assert moved.get_high_precision_init_val() is initial
    moved.clear_high_precision_init_val()
    for name in ("get_high_precision_init_val", "clear_high_precision_init_val"):
        assert not hasattr(module.weight, name)
    custom = build(Linear, 4, 4, init_method=torch.nn.init.ones_)
    assert custom.weight.dequantize().eq(1).all()


@pytest.mark.parametrize("name", RECIPES)
def test_meta_device_and_moves(name, device):
    module = build(scheme=RECIPES[name], device="meta", preserve=True)
    assert module.weight.is_meta
    for name in ("get_high_precision_init_val", "clear_high_precision_init_val"):
        assert not hasattr(module.weight, name)
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
    mesh = SimpleNamespace(size=lambda: len(weights))
    size = (sum(w.shape[0] for w in weights), weights[0].shape[1])
    inputs, contexts = zip(
        *(w.fsdp_pre_all_gather(mesh, size, None, None, None) for w in weights), strict=True
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
    with torch.no_grad():
        whole.copy_(torch.randn(256, 64))
    for shard, part in zip(shards, whole.chunk(2), strict=True):
        shard.copy_(part)
    outputs, context = gathered(shards)
    assert shards[0].fsdp_post_all_gather(outputs, context, torch.float32, out=made) is None
    assert_same_bits(made.dequantize(), whole.dequantize())
    # The scale of gathered data stays as it was when they were gathered.
    shards[0].copy_(torch.randn(128, 64) * 5)
    if len(outputs) == 1:
        assert_same_bits(made.dequantize(), whole.dequantize())


def test_fsdp_hooks_refuse_what_they_cannot_gather():
    weight = build(Linear, 64, 100, scheme=BlockScaling()).weight
    with pytest.raises(
        NotImplementedError, match=r"shards must be of whole blocks, got \[100, 64\]"
    ):
        weight.fsdp_pre_all_gather(None, None, None, None, None)


MASTERS = {
    "float": lambda x: x.float(),
    "to dtype": lambda x: x.to(torch.float32),
    "to keyword": lambda x: x.to(dtype=torch.float32),
    "to device and dtype": lambda x: x.to(x.device, torch.float32, copy=True),
    "to like another": lambda x: x.to(torch.zeros(1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", MASTERS)
@pytest.mark.parametrize("name", RECIPES)
def test_master_copies_are_plain(name, how, dtype):
    """An optimizer's small steps add up in a master copy; quantized they would vanish."""
    weight = build(scheme=RECIPES[name], params_dtype=dtype).weight
    for alias in (weight.detach().clone(), weight.detach(), weight.data):
        master = MASTERS[how](alias)
        assert type(master) is torch.Tensor
        assert master.dtype is torch.float32
        assert not master.requires_grad
        values = weight.dequantize(torch.float32).detach()
        assert torch.equal(master, values)
        for _ in range(64):
            master.add_(1e-4)
        torch.testing.assert_close(master, values + 64e-4, rtol=0, atol=1e-6)
        assert torch.equal(weight.dequantize(torch.float32).detach(), values)
    short = weight.detach().clone()
    for other in (torch.float16, torch.bfloat16, torch.float64):
        methods = {torch.float16: short.half, torch.bfloat16: short.bfloat16}
        plain = methods.get(other, short.double)()
        assert type(plain) is torch.Tensor
        assert torch.equal(plain, weight.dequantize(other).detach())
    assert type(short) is FP8Parameter
    assert type(weight.to("cpu")) is FP8Parameter
    assert type(weight.detach().to("cpu")) is FP8Parameter


def attributed(module):
    """The module's weight with what Megatron and a user set on weights."""
    weight = module.weight
    weight.tensor_model_parallel, weight.partition_dim, weight.sequence_parallel = True, 1, False
    weight.note = {"layers": [1, 2]}
    weight.main_grad = torch.ones(weight.shape)
    return weight


def assert_attributes(weight):
    assert type(weight) is FP8Parameter
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.tensor_model_parallel is True
    assert weight.partition_dim == 1
    assert weight.sequence_parallel is False
    assert weight.note == {"layers": [1, 2]}
    assert weight.main_grad.eq(1).all()


CONVERSIONS = {
    "to": lambda m: m.to("cpu"),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(dtype=torch.float16),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "meta": lambda m: m.to("meta"),
    "cpu": lambda m: m.cpu(),
    "twice": lambda m: m.half().float(),
}


@pytest.mark.parametrize("how", CONVERSIONS)
def test_attributes_survive_conversions(how):
    inner = build()
    module = torch.nn.Sequential(inner)
    weight = attributed(inner)
    CONVERSIONS[how](module)
    assert inner.weight is weight
    assert_attributes(weight)


def test_attributes_survive_moves(device):
    module = build()
    weight = attributed(module)
    for _ in range(2):
        module.to(device)
        assert module.weight is weight
        assert weight.device.type == device.type
        assert_attributes(weight)
        module.cpu()
    if device.type == "cuda":
        assert_attributes(module.cuda().weight)


def test_attributes_survive_copies_and_files():
    module = build()
    weight = attributed(module)
    twin = copy.deepcopy(torch.nn.ModuleList([module, module]))
    assert twin[0] is twin[1]
    assert_attributes(twin[0].weight)
    assert twin[0].weight.note is not weight.note
    assert twin[0].weight.main_grad is not weight.main_grad
    assert_attributes(copy.deepcopy(weight))
    assert_attributes(pickle.loads(pickle.dumps(module)).weight)
    for saved, pick in ((weight, lambda x: x), (module, lambda x: x.weight)):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        assert_attributes(pick(torch.load(file, weights_only=saved is weight)))


def test_attributes_stay_out_of_state_dicts():
    module, plain = build(), build()
    attributed(module)
    sizes = []
    for each in (module, plain):
        file = io.BytesIO()
        torch.save(each.state_dict(), file)
        sizes.append(file.tell())
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["weight"]
        assert not hasattr(loaded, "main_grad")
    assert sizes[0] == sizes[1]


def test_files_without_attributes_load():
    """What earlier versions saved has five arguments, and so has a parameter without attributes."""
    weight = build().weight
    rebuild, saved = weight.__reduce_ex__(2)
    assert len(saved) == 5
    assert torch.equal(rebuild(*saved).dequantize(), weight.dequantize())


@pytest.mark.parametrize("name", RECIPES)
def test_shared_memory(name):
    with fp8_model_init(True, RECIPES[name]):
        module = torch.nn.Sequential(Linear(32, 32))
    plain = copy.deepcopy(module)
    weight = module[0].weight
    assert not weight.is_shared()
    assert module.share_memory()[0].weight is weight
    assert weight.is_shared()
    assert weight._held.rowwise_scale_inv.is_shared()
    x = torch.randn(16, 32)
    with fp8_autocast(True, RECIPES[name]):
        assert torch.equal(module(x), plain(x))


class _Saved:
    """A pickle of a weight with other arguments than were saved."""

    def __init__(self, weight, **changes):
        self.function, (packed, dtype, tensors, flags, initial, *_) = weight.__reduce_ex__(2)
        tensors = changes.get("tensors", lambda *each: each)(*tensors)
        self.arguments = (packed, dtype, tensors, flags, initial, changes.get("attributes"))

    def __reduce__(self):
        return self.function, self.arguments


CHANGED = {
    "one scale too few": lambda data, scale: (data, scale.flatten()[:-1].clone()),
    "scales of another shape": lambda data, scale: (data, scale.new_ones(7, 3)),
    "scales of another dtype": lambda data, scale: (data, scale.to(torch.int64)),
    "a vector of data": lambda data, scale: (data.flatten(), scale),
    "data of another dtype": lambda data, scale: (data.float(), scale),
    "no scales": lambda data, scale: (data,),
    "numbers": lambda data, scale: (1, 2),
}


@pytest.mark.parametrize("how", CHANGED)
@pytest.mark.parametrize("name", RECIPES)
def test_changed_weights_in_a_file_are_refused(name, how):
    """Data and scales that do not fit each other are an error on loading, not wrong values."""
    file = io.BytesIO()
    torch.save(_Saved(build(scheme=RECIPES[name]).weight, tensors=CHANGED[how]), file)
    file.seek(0)
    with pytest.raises(ValueError, match=r"FP8Parameter: (tensors|data|scale_inv) must "):
        torch.load(file, weights_only=True)


def test_attributes_in_a_file_are_the_users():
    """A file sets attributes of users, not those that hold the weight."""
    weight = build(scheme=RECIPES[next(iter(RECIPES))]).weight
    for attributes, is_right in (({"mine": 1}, True), ({"mine": 1, "_held": 2}, False)):
        file = io.BytesIO()
        torch.save(_Saved(weight, attributes=attributes), file)
        file.seek(0)
        if is_right:
            assert torch.load(file, weights_only=True).mine == 1
        else:
            with pytest.raises(ValueError, match=r"attributes must be a user's, got \['_held'\]"):
                torch.load(file, weights_only=True)
