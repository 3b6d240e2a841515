"""Split GEMMs and modules on 2 and 4 ranks against the whole module on one."""

import pytest
import torch
from on_rank import all_equal, device_of, dtype_of, told
from schemes import chosen
from shards import MODULES, build, compare, decibels, step

import apex_te
from apex_te import flush_fp8_state
from apex_te.fp8.delayed.state import TENSORS
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling

RECIPES = {
    **chosen("delayed", "tensorwise", "hif8", "blockwise", "rowwise"),
    "unreduced": DelayedScaling(amax_history_len=4, reduce_amax=False),
    "dequantized": BlockScaling(backward="dequantized"),
    "high_precision": BlockScaling(backward="high_precision"),
    "dequantized, one scale": CurrentScaling(backward="dequantized"),
}


def _plain(rank, name, sequence_parallel):
    device = device_of(rank)
    dtype = dtype_of(device)

    def close(what, found, expected):
        scale = expected.abs().max().item()
        bound = (1e-5 if dtype is torch.float32 else 3e-2) * scale
        error = (found.float() - expected.float()).abs().max().item()
        assert error <= bound, f"{what}: {error} above {bound}"

    compare(name, sequence_parallel, None, device, dtype, close, steps=1)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_high_precision(ranks, name, sequence_parallel):
    ranks.run(_plain, name, sequence_parallel)


def _quantized(rank, name, sequence_parallel, recipe):
    device = device_of(rank)
    dtype = dtype_of(device)
    found_noise = {}

    def close(what, *pair):
        found_noise[what] = decibels(*pair)

    whole, shard = compare(name, sequence_parallel, RECIPES[recipe], device, dtype, close)
    flush_fp8_state()
    scales = {}
    for key, module in (("whole", whole), ("shard", shard)):
        if module.fp8_state.allocated:
            scales[key] = [getattr(module.fp8_state, n).clone().cpu() for n in TENSORS]
    return found_noise, scales


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_fp8(two_ranks, name, recipe, sequence_parallel):
    """Scaled as the whole is: equal but for the order of sums. Else within FP8's noise."""
    results = two_ranks.run(_quantized, name, sequence_parallel, recipe)
    # One tensor's shards have scales of their own where nothing is reduced over ranks.
    same_scales = recipe in ("delayed", "blockwise", "dequantized", "high_precision")
    floor = 60.0 if same_scales and name in ("column", "row", "norm") else 20.0
    for noise, scales in results:
        assert min(noise.values()) >= floor, noise
        if recipe == "delayed":
            assert all_equal(scales["shard"], results[0][1]["shard"])
            if name in ("column", "row", "norm"):
                torch.testing.assert_close(scales["shard"][0], scales["whole"][0])


@pytest.mark.cuda
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_on_gpus(two_gpus, name, sequence_parallel):
    two_gpus.run(_plain, name, sequence_parallel)
    for recipe in ("delayed", "tensorwise", "blockwise"):
        for noise, scales in two_gpus.run(_quantized, name, sequence_parallel, recipe):
            assert min(noise.values()) >= 20.0, (recipe, noise)
            if recipe == "delayed":
                assert scales["shard"]


def _no_grad(rank):
    whole, shard = build("mlp", "cpu", torch.float32, False)
    x = torch.randn(4, 2, 32)
    with torch.no_grad(), apex_te.fp8_autocast(True, CurrentScaling()):
        return whole(x), shard(x)


def test_without_gradients(two_ranks):
    for whole, shard in two_ranks.run(_no_grad):
        assert decibels(shard, whole) >= 20.0


def _main_grad(rank, sequence_parallel):
    """``main_grad`` of the shards, two microbatches, beside the whole's gradient."""
    found = []
    for fused in (False, True):
        _, shard = build(
            "mlp", "cpu", torch.float32, sequence_parallel, fuse_wgrad_accumulation=fused
        )
        for parameter in shard.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        generator = torch.Generator().manual_seed(5)
        total = {}
        for first in (True, False):
            x = torch.randn(8, 2, 32, generator=generator)
            dy = torch.randn(8, 2, 32, generator=generator)
            if sequence_parallel:
                x, dy = x.chunk(2)[rank], dy.chunk(2)[rank]
            x.requires_grad_()
            with apex_te.fp8_autocast(True, BlockScaling()):
                y = shard(x, is_first_microbatch=first)
            y.backward(dy)
        for key in ("fc1_weight", "fc2_weight"):
            parameter = shard.get_parameter(key)
            total[key] = parameter.main_grad if fused else parameter.grad
        found.append(total)
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_main_grad(two_ranks, sequence_parallel):
    for plain, fused in two_ranks.run(_main_grad, sequence_parallel):
        for key, value in plain.items():
            assert value.abs().max() > 0
            torch.testing.assert_close(fused[key], value)


def _attributes(rank):
    found = {}
    for name in MODULES:
        _, shard = build(name, "cpu", torch.float32, True)
        for key, p in shard.named_parameters():
            split = p.tensor_model_parallel, p.partition_dim, p.partition_stride
            found[name, key] = (*split, p.sequence_parallel, list(p.shape))
    return found


def test_parameter_attributes(two_ranks):
    for found in two_ranks.run(_attributes):
        assert found["column", "weight"] == (True, 0, 1, False, [24, 32])
        assert found["column", "bias"] == (True, 0, 1, False, [24])
        assert found["row", "weight"] == (True, 1, 1, False, [48, 16])
        assert found["row", "bias"] == (False, -1, 1, True, [48])
        assert found["norm", "layer_norm_weight"] == (False, -1, 1, True, [32])
        assert found["mlp", "fc1_weight"] == (True, 0, 1, False, [32, 32])
        assert found["mlp", "fc2_weight"] == (True, 1, 1, False, [32, 32])
        assert found["mlp", "fc2_bias"] == (False, -1, 1, True, [32])
        assert found["gated", "fc1_weight"] == (True, 0, 1, False, [64, 32])


def _set_later(rank):
    module = apex_te.Linear(32, 48, parallel_mode="column", tp_size=2)
    message = told(module, torch.randn(4, 32))
    module.set_tensor_parallel_group(torch.distributed.group.WORLD)
    alone = torch.distributed.new_group([0])
    if rank == 0:
        message += told(module.set_tensor_parallel_group, alone)
    return message, step(module, torch.randn(4, 32), torch.randn(4, 24), None)[0].shape


def test_group_set_later(two_ranks):
    for rank, (message, shape) in enumerate(two_ranks.run(_set_later)):
        assert "set_tensor_parallel_group must be called before forward with tp_size=2" in message
        assert rank or "tp_group must have the 2 ranks of tp_size, got 1" in message
        assert shape == (4, 24)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tp_size": 3, "parallel_mode": "column"}, ValueError, "out_features must be a multiple"),
        ({"tp_size": 0}, ValueError, "tp_size must be at least 1, got 0"),
        ({"tp_size": 2.0}, TypeError, "tp_size must be an int, got float"),
        ({"tp_group": "world"}, TypeError, "tp_group must be a torch.distributed.ProcessGroup"),
        ({"parallel_mode": "both"}, ValueError, "parallel_mode must be None, 'column' or 'row'"),
        ({"sequence_parallel": 1}, TypeError, "sequence_parallel must be a bool, got int"),
    ],
)
def test_rejects(options, error, message):
    with pytest.raises(error, match=f"^Linear: {message}"):
        apex_te.Linear(32, 16, **options)
