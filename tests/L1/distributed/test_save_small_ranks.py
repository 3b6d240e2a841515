"""fp8_autocast(save="small") on several ranks: the bits of "all" but for what is held in FP8."""

import copy
import unittest.mock

import pytest
import torch
from on_rank import device_of, dtype_of
from schemes import SCHEMES
from shards import BATCH, IN, TOKENS, build, rows
from torch.distributed.fsdp import fully_shard

import apex_te
from apex_te import fp8_autocast
from apex_te.module import layer_norm_mlp

KINDS = ("norm", "mlp", "gated")
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8", "rowwise")


def trained(module, recipe, save, first, exact):
    """Outputs and gradients of three steps, with FC1's output held as it is if ``exact``."""
    found = []
    device = next(module.parameters()).device
    held = layer_norm_mlp.hold
    with unittest.mock.patch.object(
        layer_norm_mlp, "hold", (lambda x: (x, None)) if exact else held
    ):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(TOKENS, BATCH, IN, generator=generator)
            x = first(x).to(device, next(module.parameters()).dtype).requires_grad_()
            module.zero_grad()
            with fp8_autocast(fp8_recipe=SCHEMES[recipe], save=save):
                out = module(x)
            (out * out).sum().backward()
            grads = [p.grad for p in module.parameters()]
            grads = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
            found += [out.detach(), x.grad, *(g.clone() for g in grads)]
    return found


def assert_same(one, other):
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b), f"tensor {i}"


def _split(rank, name, recipe, sequence_parallel):
    device = device_of(rank)
    _, shard = build(name, device, dtype_of(device), sequence_parallel)
    ranks = torch.distributed.get_world_size()

    def first(x):
        return rows(x, rank, ranks).contiguous() if sequence_parallel else x

    other = copy.deepcopy(shard)
    assert_same(
        trained(shard, recipe, "all", first, True), trained(other, recipe, "small", first, True)
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", KINDS)
def test_split_modules(two_ranks, name, recipe, sequence_parallel):
    two_ranks.run(_split, name, recipe, sequence_parallel)


SHARDED = {
    "norm": lambda: apex_te.LayerNormLinear(IN, 48),
    "parts": lambda: apex_te.LayerNormLinear(IN, 48, parameters_split=("a", "b", "c")),
    "mlp": lambda: apex_te.LayerNormMLP(IN, 64, activation="swiglu"),
}


def _sharded(rank, name, recipe):
    found = []
    for save, sharded, exact in (("all", True, True), ("small", True, True), ("small", True, False),
                                 ("small", False, False)):  # fmt: skip
        torch.manual_seed(3)
        module = SHARDED[name]()
        if sharded:
            module = fully_shard(module)
        found.append(trained(module, recipe, save, lambda x: x, exact))
    assert_same(found[0], found[1])
    # All ranks have one batch, so that a rank alone computes the same outputs and input gradients.
    every = len(found[3]) // 3
    for i, (a, b) in enumerate(zip(found[2], found[3], strict=True)):
        if i % every < 2:
            assert torch.equal(a, b), f"tensor {i}"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_modules(two_ranks, name, recipe):
    two_ranks.run(_sharded, name, recipe)
