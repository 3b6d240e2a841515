"""Transformer Engine's collectives, FP8 weights written by parts, and scaled state of DTensors."""

import copy

import pytest
import torch
from on_rank import all_equal
from optimizer_cases import sharded
from schemes import chosen
from torch import distributed, nn

import apex_te
from apex_te.integrations.transformer_engine.pytorch import distributed as te
from apex_te.integrations.transformer_engine.pytorch import optimizers
from apex_te.integrations.transformer_engine.pytorch.tensor import utils

RECIPES = chosen("delayed", "tensorwise", "blockwise", "mxfp8")


def _rows(rank, async_op):
    group = distributed.group.WORLD
    ranks = te.get_distributed_world_size(group)
    assert te.get_distributed_rank(group) == rank
    x = torch.arange(8.0).view(4, 2) + 10 * rank
    found = []
    for function in (te.gather_along_first_dim, te.reduce_scatter_along_first_dim):
        out, handle = function(x, group, async_op)
        assert (handle is None) is not async_op
        if async_op:
            handle.wait()
        found.append(out)
    assert found[1].shape == (4 // ranks, 2)
    return found


@pytest.mark.parametrize("async_op", [False, True])
def test_rows_of_ranks(two_ranks, async_op):
    first, second = two_ranks.run(_rows, async_op)
    x = torch.arange(8.0).view(4, 2)
    assert torch.equal(first[0], torch.cat((x, x + 10)))
    assert torch.equal(second[0], first[0])
    assert torch.equal(torch.cat((first[1], second[1])), 2 * x + 10)


def _weight(recipe):
    with apex_te.fp8_model_init(recipe=recipe):
        return apex_te.Linear(192, 160, bias=False, params_dtype=torch.bfloat16).weight


def _masters():
    generator = torch.Generator().manual_seed(2)
    masters = [torch.randn(160, 192, generator=generator) * s for s in (3.0, 0.1, 1.0)]
    masters[0][150, 3] = 70.0
    return masters


def _parts(rank, name, size):
    """A distributed optimizer's step: parts of buffers, then an all-gather of the buffers."""
    recipe, masters = RECIPES[name], _masters()
    weights = [_weight(recipe) for _ in masters]
    count = weights[0].numel()
    buffer = torch.zeros(len(weights) * count, dtype=torch.uint8)
    for i, weight in enumerate(weights):
        utils.replace_raw_data(weight, buffer[i * count : (i + 1) * count].view(weight.shape))
    flat = torch.cat([m.view(-1) for m in masters])
    share = -(-len(flat) // size)
    low, high = rank * share, min((rank + 1) * share, len(flat))
    parts, starts = [], []
    for i in range(len(weights)):
        a, b = max(low, i * count), min(high, (i + 1) * count)
        parts.append(flat[a:b] if a < b else None)
        starts.append(a - i * count if a < b else None)
    utils.cast_master_weights_to_fp8(
        weights, parts, starts, distributed.group.WORLD, manual_post_all_gather_processing=True
    )
    gathered = [torch.zeros(share, dtype=torch.uint8) for _ in range(size)]
    padded = torch.zeros(size * share, dtype=torch.uint8)
    padded[: len(buffer)] = buffer
    distributed.all_gather(gathered, padded[low : low + share].contiguous())
    buffer.copy_(torch.cat(gathered)[: len(buffer)])
    utils.post_all_gather_processing(weights)
    return [
        (w._held.rowwise.view(torch.uint8), w._held.rowwise_scale_inv.view(torch.uint8))
        for w in weights
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_weights_from_parts_are_those_of_whole_master_weights(two_ranks, name):
    expected = []
    for master in _masters():
        weight = _weight(RECIPES[name])
        with torch.no_grad():
            weight.copy_(master.bfloat16())
        expected.append(weight)
    for held in two_ranks.run(_parts, name, 2):
        for (data, scale_inv), weight in zip(held, expected, strict=True):
            assert torch.equal(data, weight._held.rowwise.view(torch.uint8))
            assert torch.equal(scale_inv, weight._held.rowwise_scale_inv.view(torch.uint8))


def _model():
    torch.manual_seed(3)
    return sharded(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 3)).bfloat16())


def _train(model, optimizer, steps, rank):
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x.bfloat16()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _scaled(rank, options):
    model = _model()
    optimizer = optimizers.FusedAdam(model.parameters(), 0.01, master_weights=True, **options)
    _train(model, optimizer, range(3), rank)
    for param in model.parameters():
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            value = optimizer.get_unscaled_state(param, name)
            assert value.placements == param.placements
            assert value.shape == param.shape
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _train(model, optimizer, range(3, 5), rank)
    other = _model()
    resumed = optimizers.FusedAdam(other.parameters(), 0.5, master_weights=True, **options)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    _train(other, resumed, range(3, 5), rank)
    ours, theirs = ([p.full_tensor().detach() for p in m.parameters()] for m in (model, other))
    assert all_equal(ours, theirs)
    return ours


@pytest.mark.parametrize(
    "options",
    [
        {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
        {"exp_avg_dtype": torch.uint8, "master_weight_dtype": torch.float16},
        {"store_param_remainders": True},
    ],
)
def test_scaled_state_of_sharded_parameters(two_ranks, options):
    first, second = two_ranks.run(_scaled, options)
    plain = two_ranks.run(_scaled, {})[0]
    for a, b, c in zip(first, second, plain, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.float(), c.float(), rtol=0, atol=0.01)
