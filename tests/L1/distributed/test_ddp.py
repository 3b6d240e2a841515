"""Every module under DistributedDataParallel against one rank with the rows of all."""

import contextlib

import pytest
import torch
from on_rank import all_equal, device_of, states_of
from rank_sets import ranks_of
from schemes import chosen
from shards import decibels
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import apex_te
from apex_te import flush_fp8_state, fp8_autocast, fp8_model_init, init_fp8_state
from apex_te.distributed import get_state_dict, set_model_state_dict, set_state_dict
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.recipe import DelayedScaling

HIDDEN, FFN, HEADS, TOKENS = 32, 64, 4, 8
LOSS_SCALE = 1024.0  # gradients in the normal range of FP8 from the first step, with scales of 1
RECIPES = {"none": None, **chosen("delayed", "tensorwise", "blockwise", amax_history_len=3)}


class Experts(torch.nn.Module):
    """GroupedLinear on the rows of one rank, halved."""

    def __init__(self, device):
        super().__init__()
        self.experts = apex_te.GroupedLinear(2, HIDDEN, HIDDEN, device=device)

    def forward(self, x):
        half = x.shape[0] // 2
        return self.experts(x, [half * x.shape[1], (x.shape[0] - half) * x.shape[1]])


MODULES = {
    "linear": lambda d: apex_te.Linear(HIDDEN, HIDDEN, device=d),
    "layer_norm": lambda d: apex_te.LayerNorm(HIDDEN, device=d),
    "rms_norm": lambda d: apex_te.RMSNorm(HIDDEN, device=d),
    "norm_linear": lambda d: apex_te.LayerNormLinear(HIDDEN, HIDDEN, device=d),
    "mlp": lambda d: apex_te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", device=d),
    "experts": Experts,
    "attention": lambda d: apex_te.MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, device=d
    ),
    "layer": lambda d: apex_te.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, device=d
    ),
}


def _values(p):
    p = p.detach()
    return (p.dequantize() if isinstance(p, FP8Parameter) else p.clone()).float().cpu()


def _train(rank, kind, recipe, ddp=None, steps=3, microbatches=1, in_fp8=None, setup=None):
    """Trains on this rank's batch entries (``ddp``), or on all: what weights became, how far they
    went, FP8 state and losses.
    """
    ranks, device = distributed.get_world_size(), device_of(rank)
    amax_groups.pending = 0
    torch.manual_seed(1 if ddp is None else 1 + rank)  # DDP gives all ranks the weights of rank 0
    if ddp is not None and rank == 0:
        torch.manual_seed(1)
    with contextlib.nullcontext() if in_fp8 is None else fp8_model_init(recipe=in_fp8):
        model = torch.nn.Sequential(MODULES[kind](device), MODULES["linear"](device))
    run = model
    if ddp is not None:
        ids = [rank] if device.type == "cuda" else None
        run = DistributedDataParallel(model, device_ids=ids, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / LOSS_SCALE, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    losses, start = [], [_values(p) for p in model.parameters()]
    for _ in range(steps):
        optimizer.zero_grad()
        for microbatch in range(microbatches):
            x = torch.randn(TOKENS, 2 * ranks, HIDDEN, generator=generator)
            if ddp is not None:
                x = x.chunk(ranks, 1)[rank].contiguous()
            last = microbatch == microbatches - 1
            sync = contextlib.nullcontext() if ddp is None or last else run.no_sync()
            with sync:
                with fp8_autocast(recipe is not None, recipe):
                    loss = run(x.to(device)).square().mean() / microbatches
                (loss * LOSS_SCALE).backward()
        losses.append(loss.item())
        optimizer.step()
    flush_fp8_state()
    states = [[getattr(s, name).cpu().clone() for name in TENSORS] for s in states_of(model)]
    return *_weights(model, start), states, losses


def _weights(model, start):
    """The parameters, and the way that all of them together have gone."""
    now = [_values(p) for p in model.parameters()]
    return now, torch.cat([(a - b).flatten() for a, b in zip(now, start, strict=True)])


def _both(rank, kind, recipe, options, microbatches=1, in_fp8=None):
    recipe, in_fp8 = RECIPES[recipe], None if in_fp8 is None else RECIPES[in_fp8]
    more = {"microbatches": microbatches, "in_fp8": in_fp8}
    return _train(rank, kind, recipe, options, **more), _train(rank, kind, recipe, **more)


def _check(results, recipe):
    (first, _, states, _), _ = results[0]
    for (ours, way, our_states, losses), (whole, whole_way, whole_states, all_losses) in results:
        assert all_equal(ours, first)  # to the last bit
        _close(ours, whole, way, whole_way, recipe)
        assert len(our_states) == len(whole_states) == len(states)
        for a, b, c in zip(our_states, states, whole_states, strict=True):
            for name, x, y, z in zip(TENSORS, a, b, c, strict=True):
                assert torch.equal(x, y), name
                if recipe == "delayed":
                    if name.endswith("fwd"):
                        torch.testing.assert_close(x, z, rtol=0.02, atol=0.0)
                    elif name == "scale_bwd":  # a mean of fewer rows has larger gradients
                        x_whole = torch.where(x == 1, x, x * len(results))
                        torch.testing.assert_close(x_whole, z, rtol=0.02, atol=0.0)
                    assert torch.equal(x == 1, z == 1)
        assert all(abs(loss) < 1e3 for loss in losses + all_losses)


def _close(ours, whole, way, whole_way, recipe):
    if recipe == "none":
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=2e-6)
    else:  # the order of sums decides how values in the middle between two codes round
        assert decibels(way, whole_way) > 20


@pytest.mark.parametrize("recipe", ["none", "delayed"])
@pytest.mark.parametrize("kind", MODULES)
def test_equals_one_rank(two_ranks, kind, recipe):
    _check(two_ranks.run(_both, kind, recipe, {}), recipe)


@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}]
)
@pytest.mark.parametrize("recipe", ["none", "delayed", "tensorwise", "blockwise"])
def test_options(two_ranks, recipe, options):
    _check(two_ranks.run(_both, "mlp", recipe, options), recipe)


def test_four_ranks(all_ranks):
    _check(ranks_of(all_ranks, 4, "gloo").run(_both, "mlp", "delayed", {}), "delayed")


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_no_sync(two_ranks, recipe):
    _check(two_ranks.run(_both, "mlp", recipe, {}, 3), recipe)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_weights_held_in_fp8(two_ranks, recipe, options):
    """Rank 0's codes reach all ranks; steps and codes then stay the same on all."""
    results = two_ranks.run(_both, "mlp", recipe, options, 1, recipe)
    (first, _, _, _), _ = results[0]
    for (ours, _, _, losses), (_, _, _, whole) in results:
        assert all_equal(ours, first)
        # Its weights move by steps of FP8, and what rounds one way here rounds the other there.
        assert losses[-1] == pytest.approx(sum(whole[-1:]), rel=0.5)


@pytest.mark.cuda
def test_on_gpus(two_gpus):
    for kind in ("mlp", "layer"):
        for recipe in ("none", "delayed"):
            results = two_gpus.run(_both, kind, recipe, {})
            (first, _, states, _), _ = results[0]
            for (ours, way, our_states, _), (_, whole_way, _, _) in results:
                assert all_equal(ours, first)
                assert all(map(all_equal, our_states, states))
                assert decibels(way, whole_way) > 20


class _Branches(torch.nn.Module):
    """Each rank runs one of two experts, frozen ones included."""

    def __init__(self):
        super().__init__()
        self.shared = apex_te.Linear(HIDDEN, HIDDEN)
        self.branches = torch.nn.ModuleList(apex_te.LayerNormMLP(HIDDEN, FFN) for _ in range(2))

    def forward(self, x, which):
        return self.branches[which](self.shared(x))


def _unused(rank, recipe):
    recipe = RECIPES[recipe]
    found = []
    for in_ddp in (True, False):
        amax_groups.pending = 0
        torch.manual_seed(1)
        model = _Branches()
        run = DistributedDataParallel(model, find_unused_parameters=True) if in_ddp else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / LOSS_SCALE)
        generator = torch.Generator().manual_seed(3)
        start = [_values(p) for p in model.parameters()]
        for _ in range(3):
            optimizer.zero_grad()
            parts = torch.randn(2, 4, HIDDEN, generator=generator)
            with fp8_autocast(recipe is not None, recipe):
                if in_ddp:
                    (run(parts[rank], rank).square().mean() * LOSS_SCALE).backward()
                else:
                    outs = [run(part, which) for which, part in enumerate(parts)]
            if not in_ddp:
                (sum(out.square().mean() for out in outs) * (LOSS_SCALE / 2)).backward()
            optimizer.step()
        flush_fp8_state()
        states = [[getattr(s, name).clone() for name in TENSORS] for s in states_of(model)]
        found.append((*_weights(model, start), states))
    return found


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_unused_parameters(two_ranks, recipe):
    """A branch that only one rank runs is trained there, and scaled alike on both."""
    results = two_ranks.run(_unused, recipe)
    for (ours, way, our_states), (whole, whole_way, whole_states) in results:
        assert all_equal(ours, results[0][0][0])
        _close(ours, whole, way, whole_way, recipe)
        if recipe == "delayed":  # a state is there once its module has run, so twice in all
            assert len(whole_states) == 3
            assert len(our_states) == 2


def _buffers(rank):
    """What DDP broadcasts before each forward leaves FP8 state alone."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(apex_te.Linear(HIDDEN, HIDDEN), torch.nn.BatchNorm1d(HIDDEN))
    recipe = DelayedScaling(amax_history_len=3, reduce_amax=False)
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    for _ in range(3):
        with fp8_autocast(True, recipe):
            ddp(torch.full((4, HIDDEN), 1.0 + rank) + torch.rand(4, HIDDEN) / 8).sum().backward()
    staged = model[0].fp8_state.amax_history_fwd[0, 0].item()
    names = [name for name, _ in model.named_buffers()]
    return model[0].fp8_state.scale_fwd[0].item(), staged, names


def test_fp8_state_is_not_broadcast(two_ranks):
    (scale, staged, names), (other, other_staged, _) = two_ranks.run(_buffers)
    assert scale > 1.5 * other
    assert other_staged > 1.5 * staged
    assert not any("fp8" in name for name in names)


def _round_trip(rank, kind, recipe, in_fp8):
    """Saves a wrapped model, loads it into a fresh one, and into one without a wrapper."""
    recipe = RECIPES[recipe]

    def make(seed, wrapped=True):
        amax_groups.pending = 0
        torch.manual_seed(seed)
        with fp8_model_init(recipe=recipe) if in_fp8 else contextlib.nullcontext():
            model = torch.nn.Sequential(MODULES[kind]("cpu"), MODULES["linear"]("cpu"))
        init_fp8_state(model, recipe)
        return DistributedDataParallel(model) if wrapped else model

    def step(model):
        x = torch.ones(TOKENS, 2, HIDDEN)
        with fp8_autocast(True, recipe):
            loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    trained = make(1)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
    for _ in range(2):
        step(trained)
        optimizer.step()
    flush_fp8_state()
    options = {} if kind != "experts" else {"expert_group": None}
    states = get_state_dict(trained, optimizer, **options)
    assert not any(name.startswith("module.") for name in states[0])
    expected = step(trained)
    for wrapped in (True, False):
        fresh = make(2, wrapped)
        keys = set_model_state_dict(fresh, states[0], **options)
        assert not keys.missing_keys
        assert not keys.unexpected_keys
        assert torch.equal(step(fresh), expected)
    again = make(3)
    other = torch.optim.AdamW(again.parameters(), lr=0.01)
    set_state_dict(again, other, model_state_dict=states[0], optim_state_dict=states[1], **options)
    assert torch.equal(step(again), expected)


@pytest.mark.parametrize("in_fp8", [False, True], ids=["high precision", "fp8 weights"])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "experts", "layer"])
def test_state_dict_round_trip(two_ranks, kind, recipe, in_fp8):
    """set_state_dict takes what get_state_dict returns of a DDP model, FP8 state included."""
    two_ranks.run(_round_trip, kind, recipe, in_fp8)


def _joined(rank, recipe):
    """Numbers of steps that a rank has taken, with other numbers of batches on each rank."""
    recipe = {"none": None, "tensorwise": RECIPES["tensorwise"]}.get(
        recipe, DelayedScaling(amax_history_len=3, reduce_amax=False)
    )
    torch.manual_seed(1)
    model = DistributedDataParallel(MODULES["mlp"]("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join():
        for _ in range(2 + rank):
            with fp8_autocast(recipe is not None, recipe):
                model(torch.ones(TOKENS, 2, HIDDEN)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    flush_fp8_state()
    return _weights(model, [_values(p) for p in model.parameters()])[0]


@pytest.mark.parametrize("recipe", ["none", "tensorwise", "delayed"])
def test_join(two_ranks, recipe):
    """DDP's join() takes uneven numbers of batches where no region reduces amaxes."""
    assert all_equal(*two_ranks.run(_joined, recipe))
