"""FSDP2 whose all-gathers carry FP8 data against one that gathers in high precision."""

import os

import pytest
import torch
from gathers import RECIPES, Small, assert_alike, linears, sharded, train, train_rows, weights_of
from rank_sets import ranks_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import apex_te
from apex_te.distributed.fsdp.fp8_all_gather import enable_fp8_all_gather


def _both(rank, name, steps, device, dtype, options):
    options = dict(options)
    change = options.pop("change", {})
    trained = {k: options.pop(k) for k in ("micro", "kind") if k in options}
    if device == "cuda":
        device = f"cuda:{rank}"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)  # attention's backward is not
    found = []
    for fp8 in (True, False):
        model = sharded(fp8, RECIPES[name], dtype, device, **options)
        for key, value in change.items():
            setattr(model, key, value)
        losses, counts = train(rank, model, RECIPES[name], steps, device, dtype, **trained)
        apex_te.flush_fp8_state()  # or it were the next run's first collective
        found.append((losses, weights_of(model), counts))
    (ours, weights, counts), (theirs, expected, plain) = found
    assert torch.isfinite(ours).all()
    assert_alike((ours, weights), (theirs, expected))
    bytes_ours, bytes_theirs = (sum(sum(c.gathered) for c in cs) for cs in (counts, plain))
    reduced = [len(c.reduced) for c in counts]
    return bytes_ours / bytes_theirs, reduced, [len(c.reduced) for c in plain], ours


def check(ranks, name, steps=4, device="cpu", dtype=torch.bfloat16, **options):
    found = ranks.run(_both, name, steps, device, dtype, options)
    assert not torch.equal(found[0][3], found[1][3])  # each rank has its own data
    return found[0]


@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_twenty_steps(two_ranks, name):
    ratio, reduced, plain, losses = check(two_ranks, name, 20)
    assert ratio <= 0.51
    # Delayed scaling: that of the scale update, none before the first.
    assert reduced == ([0] + [1] * 19 if name == "delayed" else [1] * 20)
    assert plain == ([0] + [1] * 19 if name == "delayed" else [0] * 20)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["first", "hif8"])
def test_other_schemes(two_ranks, name):
    ratio, reduced, _, _ = check(two_ranks, name)
    assert ratio <= 0.51
    assert reduced == [1] * 4


def test_four_ranks(all_ranks):
    for name in ("delayed", "tensorwise"):
        four = ranks_of(all_ranks, 4, "gloo")
        assert check(four, name)[0] <= 0.51
        assert check(four, name, mesh=(2, 2))[0] <= 0.51  # two replicas of two shards


VARIANTS = {
    "keep": {"reshard": False},
    "reshard": {"reshard": True},
    "accumulate": {"micro": 2},
    "checkpointed": {"change": {"checkpointed": True}},
    "twice": {"change": {"again": True}},
    "separate": {"fuse_qkv_params": False, "bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["first", "tensorwise"])
def test_variants(two_ranks, name, variant):
    reduced = check(two_ranks, name, 3, **VARIANTS[variant])[1]
    per_step = 2 if variant == "accumulate" and name == "first" else 1  # a region each
    assert reduced == [per_step] * 3


@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_param_dtype(two_ranks, name):
    """Shards in float32, weights and codes of their bfloat16 values, gradients in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check(two_ranks, name, 3, "cpu", torch.float32, policy=policy)


def _frozen(dtype, device):
    model = linears(16, 16, 16)(dtype, device)
    model.layers[0].weight.requires_grad_(False)
    return model


def _grouped(dtype, device):
    torch.manual_seed(2)
    return Small(apex_te.GroupedLinear(3, 16, 16, params_dtype=dtype, device=device))


def _shared(fp8, scaling):
    model = linears(16, 16, 16)(torch.float32, "cpu")
    model.layers[1].weight = model.layers[0].weight
    if fp8:
        enable_fp8_all_gather(model, scaling)
        assert model.layers[0].weight is model.layers[1].weight
    return fully_shard(model)


def _small(rank, kind, name, sizes=(16,)):
    """Losses and weights after some steps, with and without FP8 gathers."""
    scaling, found = RECIPES[name], []
    build = {"frozen": _frozen, "grouped": _grouped}.get(kind) or linears(*sizes)
    more = {"m_splits": [4, 0, 12]} if kind == "grouped" else {"features": sizes[0]}
    for fp8 in (True, False):
        if kind == "shared":
            model = _shared(fp8, scaling)
        else:
            model = sharded(fp8, scaling, torch.float32, "cpu", build=build)
        losses, _ = train_rows(rank, model, scaling, **more)
        found.append((losses, weights_of(model)))
    assert_alike(*found)
    return [p.to_local().numel() for p in model.parameters() if p.dim() == 2]


@pytest.mark.parametrize("name", ["first", "delayed", "tensorwise", "hif8"])
def test_uneven_and_empty_shards(ranks, name):
    found = ranks.run(_small, "linears", name, (16, 5, 3, 32))
    assert len({shards[0] for shards in found}) > 1
    if ranks.size == 4:
        assert [shards[1] for shards in found] == [5, 5, 5, 0]


def test_blocks(two_ranks):
    two_ranks.run(_small, "linears", "blockwise", (64, 256, 512, 256))


def test_rows_with_a_scale_each(two_ranks):
    """A shard may have any number of rows: none shares its scale."""
    two_ranks.run(_small, "linears", "rowwise", (48, 36, 20, 48))


SMALL = {
    "frozen": ["first", "tensorwise"],
    "shared": ["first", "delayed", "tensorwise"],  # one weight of two modules
    "grouped": ["delayed", "tensorwise"],
}


@pytest.mark.parametrize(("kind", "name"), [(k, name) for k in SMALL for name in SMALL[k]])
def test_other_weights(two_ranks, kind, name):
    two_ranks.run(_small, kind, name)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["first", "delayed", "tensorwise", "hif8"])
def test_on_gpus(two_gpus, name):
    ratio, reduced, _, _ = check(two_gpus, name, 20, "cuda")
    assert ratio <= 0.51
    assert reduced == ([0] + [1] * 19 if name == "delayed" else [1] * 20)
