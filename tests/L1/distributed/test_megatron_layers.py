"""Megatron's and MindSpeed's layers over ranks against the same on one."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_rank import alone, assert_same, told
from rank_sets import ranks_of
from shards import decibels, features, gathered, rows, summed
from torch import distributed
from torch.distributed.tensor import DTensor

from apex_te import fp8_autocast
from apex_te.integrations.megatron import (
    MindSpeedTEColumnParallelGroupedLinear,
    MindSpeedTELayerNormColumnParallelLinear,
    MindSpeedTERowParallelGroupedLinear,
    TEColumnParallelLinear,
    TERowParallelLinear,
)
from apex_te.recipe import CurrentScaling

IN, OUT, TOKENS, BATCH = 32, 48, 16, 2
COLUMN = {"gather_output": False, "bias": True, "init_method": None}
ROW = {"input_is_parallel": True, "bias": True, "init_method": None}
LAYERS = {
    "column": (TEColumnParallelLinear, COLUMN),
    "row": (TERowParallelLinear, ROW),
    "norm": (MindSpeedTELayerNormColumnParallelLinear, COLUMN),
}


def _make(name, group, sequence_parallel=False, skip_bias_add=False, **more):
    """A layer whose weight is a part of the one that all ranks draw alike."""
    kind, options = LAYERS[name]
    config = SimpleNamespace(
        use_cpu_initialization=True, sequence_parallel=sequence_parallel, **more
    )
    torch.manual_seed(8)
    layer = kind(IN, OUT, config=config, skip_bias_add=skip_bias_add, tp_group=group, **options)
    torch.manual_seed(9)
    with torch.no_grad():
        bias = torch.randn(OUT)
        split = name != "row" and group is not None
        layer.bias.copy_(features(bias, *_place(group)) if split else bias)
    return layer


def _place(group):
    return distributed.get_rank(group), distributed.get_world_size(group)


def _step(layer, x, dy, recipe):
    x = x.clone().requires_grad_()
    with fp8_autocast(recipe is not None, recipe):
        out, bias = layer(x)
    assert bias is None or torch.equal(bias, layer.bias)
    out.backward(dy)
    return out.detach(), x.grad, bias is not None


def _compare(rank, name, sequence_parallel, skip_bias_add, recipe):
    ranks = distributed.get_world_size()
    whole = _make(name, alone(rank), skip_bias_add=skip_bias_add)
    layer = _make(name, distributed.group.WORLD, sequence_parallel, skip_bias_add)
    x, dy = torch.randn(TOKENS, BATCH, IN), torch.randn(TOKENS, BATCH, OUT)
    recipe = CurrentScaling() if recipe else None
    y, dx, _ = _step(whole, x, dy, recipe)
    own_x = features(x, rank, ranks) if name == "row" else x
    own_dy = dy if name == "row" else features(dy, rank, ranks)
    if sequence_parallel and name == "row":
        own_dy = rows(dy, rank, ranks)
    elif sequence_parallel:
        own_x = rows(x, rank, ranks)
    found_y, found_dx, has_bias = _step(layer, own_x.contiguous(), own_dy.contiguous(), recipe)
    assert has_bias is skip_bias_add
    if name == "row":
        found_y = gathered(found_y) if sequence_parallel else found_y
        found_dx = gathered(found_dx, -1)
    else:
        found_y = gathered(found_y, -1)
        found_dx = gathered(found_dx) if sequence_parallel else found_dx
    pairs = {"output": (found_y, y), "input": (found_dx, dx)}
    for key, parameter in layer.named_parameters():
        expected, grad = whole.get_parameter(key).grad, parameter.grad
        if skip_bias_add and key == "bias":
            assert grad is None
            continue
        if parameter.tensor_model_parallel:
            expected = expected.chunk(ranks, parameter.partition_dim)[rank]
        if getattr(parameter, "sequence_parallel", False):
            grad = summed(grad)
        pairs[key] = (grad, expected)
    return {key: decibels(*pair) for key, pair in pairs.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_equals_one_rank(ranks, name, sequence_parallel):
    for found in ranks.run(_compare, name, sequence_parallel, False, False):
        assert min(found.values()) > 100, found


@pytest.mark.parametrize("name", LAYERS)
def test_skipped_bias_and_fp8(two_ranks, name):
    for found in two_ranks.run(_compare, name, True, True, True):
        assert min(found.values()) > 20, found


def _save(rank, path):
    """Layers split over two of four ranks, and the whole values that they draw."""
    pairs = [distributed.new_group(r) for r in ([0, 1], [2, 3])]
    layers = {name: _make(name, pairs[rank // 2]) for name in LAYERS}
    state = {}
    for name, layer in layers.items():
        state.update(layer.sharded_state_dict(f"{name}."))
    dcp.save(state, checkpoint_id=path)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def _load(rank, path, size):
    own = alone(rank)
    group = distributed.group.WORLD if size == 4 else own
    found = {}
    for name in LAYERS:
        layer = _make(name, group)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        state = layer.sharded_state_dict(f"{name}.")
        dcp.load(state, checkpoint_id=path)
        # Loading has filled the parameters themselves.
        for key, parameter in layer.named_parameters():
            value = state[f"{name}.{key}"]
            split = isinstance(value, DTensor)
            assert torch.equal(value.to_local() if split else value, parameter)
            found[f"{name}.{key}"] = (value.full_tensor() if split else value).detach().clone()
    return found


def test_sharded_state(all_ranks, tmp_path):
    four = ranks_of(all_ranks, 4, "gloo")
    saved = four.run(_save, str(tmp_path))[0]
    assert tuple(saved["column.weight"].shape) == tuple(saved["row.weight"].shape) == (OUT, IN)
    for size in (1, 4):
        for found in four.run(_load, str(tmp_path), size):
            assert_same(found, saved)


def _experts(rank):
    """An MLP of two experts, split over the ranks: the parts of its output add up."""
    config = SimpleNamespace(use_cpu_initialization=True, tp_group=None)
    shared = {
        "config": config, "init_method": None, "bias": False, "skip_bias_add": False,
        "is_expert": True,
    }  # fmt: skip
    results = []
    for group in (alone(rank), distributed.group.WORLD):
        config.expert_tp_group = group
        torch.manual_seed(4)
        first = MindSpeedTEColumnParallelGroupedLinear(2, IN, OUT, **shared)
        second = MindSpeedTERowParallelGroupedLinear(2, OUT, IN, **shared)
        torch.manual_seed(5)
        x, splits = torch.randn(12, IN), [5, 7]
        out, bias = second(first(x, splits)[0], splits)
        assert bias is None
        results.append(out.detach())
    torch.testing.assert_close(summed(results[1]), results[0])
    return tuple(first.weight1.shape), tuple(second.weight1.shape)


def test_experts(two_ranks):
    assert two_ranks.run(_experts) == [((OUT // 2, IN), (IN, OUT // 2))] * 2


def _raised(rank):
    world = distributed.group.WORLD
    return [
        told(_make, "column", world, tensor_model_parallel_size=3),
        told(_make("column", world).set_tensor_parallel_group, alone(rank)),
        told(_make, "row", None, tensor_model_parallel_size=2),
    ]


def test_wrong_groups(two_ranks):
    for found in two_ranks.run(_raised):
        assert found == [
            "ValueError: TEColumnParallelLinear: config.tensor_model_parallel_size must be the 2 "
            "ranks of the group, got 3",
            "ValueError: TEColumnParallelLinear: tp_group must have the 2 ranks of tp_size, got 1",
            "ValueError: TERowParallelLinear: tp_group must be given with "
            "config.use_cpu_initialization and 2 ranks, got None",
        ]
