"""Collectives of torch.distributed on weights held in FP8, and optimizers that rely on them."""

import pytest
import torch
from schemes import chosen
from torch import distributed
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import apex_te
from apex_te import flush_fp8_state, fp8_autocast, fp8_model_init
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.optimizers import FusedAdam

RECIPES = chosen("delayed", "tensorwise", "blockwise", "mxfp8", "rowwise")


def _held_model(recipe, seed):
    torch.manual_seed(seed)
    with fp8_model_init(True, recipe):
        return torch.nn.Sequential(apex_te.LayerNormLinear(32, 64), apex_te.Linear(64, 32))


def _written(rank, name):
    """Checks what each collective leaves of weights that differ between the ranks."""
    recipe = RECIPES[name]
    weight = _held_model(recipe, rank)[1].weight
    own = weight.dequantize().detach()
    parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    with torch.no_grad():
        distributed.all_gather(parts, weight)
        assert torch.equal(parts[rank], own)
        for is_async in (False, True):
            weight.copy_(own)
            work = distributed.broadcast(weight.data, 1, async_op=is_async)
            if is_async:
                work.wait()
            assert torch.equal(weight.dequantize(), parts[1])
        weight.copy_(own)
        distributed.all_reduce(weight)
        expected = FP8Parameter.empty(tuple(weight.shape), recipe, weight.dtype)
        expected.copy_(sum(parts))
        assert torch.equal(weight.dequantize(), expected)
        with pytest.raises(NotImplementedError, match=r"scatter_ must write to a plain tensor"):
            distributed.scatter(weight, [own, own] if rank == 0 else None)


@pytest.mark.parametrize("name", RECIPES)
def test_collectives_write_to_held_weights(two_ranks, name):
    two_ranks.run(_written, name)


def _zero(rank, name):
    """Trains with states on all ranks and with each on one: the same weights, on all ranks."""
    recipe, found = RECIPES[name], []
    for is_split in (False, True):
        model = _held_model(recipe, 1)
        run = DistributedDataParallel(model)
        options = {"lr": 0.01, "master_weights": True}
        if is_split:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), FusedAdam, **options)
        else:
            optimizer = FusedAdam(model.parameters(), **options)
        for step in range(3):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * step + rank))
            with fp8_autocast(True, recipe):
                loss = (run(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        flush_fp8_state()
        values = [p.dequantize() if type(p) is FP8Parameter else p for p in model.parameters()]
        found.append([value.detach().clone() for value in values])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return found[0]


@pytest.mark.parametrize("name", RECIPES)
def test_split_optimizer_states_of_held_weights(two_ranks, name):
    ours, theirs = two_ranks.run(_zero, name)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
