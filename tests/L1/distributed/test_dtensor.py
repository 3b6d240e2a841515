"""parallelize_module with the project's styles against one rank, and against own arguments."""

import pytest
import torch
from dtensor_cases import (
    MODULES,
    RECIPES,
    against_one_rank,
    batches,
    computed_with,
    parallelized,
    step,
    tp_mesh,
    whole_module,
)
from on_rank import all_equal, recorded
from shards import rows
from torch import distributed
from torch.distributed.tensor import Replicate, Shard

from apex_te import flush_fp8_state
from apex_te.comm.collectives import ALL_GATHER


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_equals_one_rank(two_ranks, name, sequence_parallel):
    for found in two_ranks.run(against_one_rank, name, sequence_parallel, None, 2):
        assert min(found.values()) > 100, found


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("name", ["pair", "mlp"])
def test_fp8against_one_rank(two_ranks, name, recipe):
    """Scales of shards differ from the whole's, so the noise does."""
    for found in two_ranks.run(against_one_rank, name, True, recipe, 3):
        assert min(found.values()) > 20, found


def _against_own_arguments(rank, name, sequence_parallel, recipe):
    """Bits, against the modules that are made with ``tp_group``; and what was gathered."""
    ranks, recipe = distributed.get_world_size(), RECIPES[recipe]
    whole = whole_module(name)
    part = parallelized(whole, name, sequence_parallel, tp_mesh())
    own = MODULES[name](
        {"tp_group": distributed.group.WORLD, "sequence_parallel": sequence_parallel}
    )
    with torch.no_grad():
        for key, parameter in own.named_parameters():
            value = part.get_parameter(key)
            parameter.copy_(computed_with(name, key, value.detach()))
    gathers = []
    for x, dy in batches(3):
        if sequence_parallel:
            x, dy = (rows(t, rank, ranks) for t in (x, dy))
        expected = step(own, x, dy, recipe)
        with recorded(ALL_GATHER, lambda out, x, *args, **kwargs: x.dtype) as dtypes:
            actual = step(part, x, dy, recipe)
        gathers += dtypes
        assert all_equal(actual, expected)
    flush_fp8_state()
    for key, parameter in own.named_parameters():
        grad = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            distributed.all_reduce(grad)
        found = part.get_parameter(key)
        assert torch.equal(computed_with(name, key, found.grad), grad)
        assert not found.sequence_parallel
        assert found.tensor_model_parallel == found.placements[0].is_shard()
    for a, b in zip(part.modules(), own.modules(), strict=True):
        assert repr(a).splitlines()[0] == repr(b).splitlines()[0]
        state = getattr(a, "fp8_state", None)
        if state is not None and state.allocated:
            assert torch.equal(state.scale_fwd, b.fp8_state.scale_fwd)
            assert torch.equal(state.scale_bwd, b.fp8_state.scale_bwd)
    return gathers


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["pair", "mlp", "layer", "flat", "cross", "geglu"])
def test_bits_of_own_arguments(two_ranks, name, sequence_parallel, recipe):
    for gathers in two_ranks.run(_against_own_arguments, name, sequence_parallel, recipe):
        wanted = torch.float32 if recipe is None else torch.uint8
        assert set(gathers) == ({wanted} if sequence_parallel else set())


def _placements(rank):
    part = parallelized(whole_module("layer"), "layer", False, tp_mesh())
    return {key: str(p.placements[0]) for key, p in part.named_parameters()}


def test_placements(two_ranks):
    for found in two_ranks.run(_placements):
        assert found == {
            "self_attention.layernorm_qkv.layer_norm_weight": str(Replicate()),
            "self_attention.layernorm_qkv.weight": str(Shard(0)),
            "self_attention.proj.weight": str(Shard(1)),
            "layernorm_mlp.layer_norm_weight": str(Replicate()),
            "layernorm_mlp.fc1_weight": str(Shard(0)),
            "layernorm_mlp.fc2_weight": str(Shard(1)),
        }


@pytest.mark.cuda
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["pair", "layer", "flat"])
def test_on_gpus(two_gpus, name, sequence_parallel):
    for found in two_gpus.run(against_one_rank, name, sequence_parallel, None, 2, "cuda"):
        assert min(found.values()) > 30, found
    for recipe in ("delayed", "tensorwise"):
        for found in two_gpus.run(against_one_rank, name, sequence_parallel, recipe, 3, "cuda"):
            assert min(found["output"], found["input"]) > 15, found
