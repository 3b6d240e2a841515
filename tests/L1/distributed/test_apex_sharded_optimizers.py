"""apex's DistributedFusedAdam and DistributedFusedLAMB: as one rank with averaged gradients."""

import pytest
import torch
from on_rank import device_of, recorded, told
from rank_sets import cases, ranks_of
from torch import distributed, nn

from apex_te.comm.collectives import REDUCE_SCATTER
from apex_te.integrations.apex.contrib.optimizers import DistributedFusedAdam, DistributedFusedLAMB
from apex_te.optimizers import FusedAdam, FusedLAMB

STEPS = 4
SHAPES = [(33, 7), (5,), (2, 3, 4, 5), (1,), (64, 16), (0,), (129,)]
ADAM = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.9, 0.95)}
SMALL = {"bucket_cap_mb": 0.002}  # four buckets


WHERE = cases(lambda _: [()], (2, "gloo"), (4, "gloo"), (2, "nccl"))


def _params(dtype=torch.float32, device="cpu"):
    torch.manual_seed(7)
    made = [torch.randn(shape) for shape in SHAPES]
    made[2] = made[2].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(p.to(device, dtype)) for p in made]


def _factors(rank, seed, dtype=torch.float32):
    """The gradients of a backward on a rank, exact in bfloat16."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return [torch.randn(s, generator=generator).bfloat16().to(dtype) for s in SHAPES]


def _backward(params, rank, seed, scale=1.0):
    factors = _factors(rank, seed, params[0].dtype)
    loss = sum((p * c.to(p.device)).sum() for p, c in zip(params, factors, strict=True))
    (loss * scale).backward()


def _averages(seeds):
    """Averages over ranks of the sums of some backwards' gradients, as the ranks compute them."""
    ranks = distributed.get_world_size()
    means = None
    for rank in range(ranks):
        own = [sum(c) for c in zip(*(_factors(rank, seed) for seed in seeds), strict=True)]
        own = [c / ranks for c in own]
        means = own if means is None else [a + b for a, b in zip(means, own, strict=True)]
    return means


def _reference(params, make, batches):
    """float32 weights after steps on one rank, each with the gradients of some backwards."""
    weights = [nn.Parameter(p.detach().float().clone()) for p in params]
    optimizer = make([{"params": weights[:3], "lr": 0.02}, {"params": weights[3:]}])
    for seeds in batches:
        for weight, mean in zip(weights, _averages(seeds), strict=True):
            weight.grad = mean
        optimizer.step()
    return weights, optimizer


def _groups(params):
    return [{"params": params[:3], "lr": 0.02}, {"params": params[3:]}]


def _same(params, weights):
    """Bits on two ranks, whose sums have one order; else rounding of sums."""
    for p, w in zip((p.detach().cpu() for p in params), weights, strict=True):
        wide = w.detach().to(p.dtype)
        if distributed.get_world_size() == 2:
            assert torch.equal(p, wide)
        else:
            tolerance = {"rtol": 2e-6, "atol": 1e-6} if p.dtype is torch.float32 else {}
            torch.testing.assert_close(p, wide, **tolerance)


def _alike(params):
    for p in (p for p in params if p.numel()):
        whole = [
            torch.empty_like(p.detach().contiguous()) for _ in range(distributed.get_world_size())
        ]
        distributed.all_gather(whole, p.detach().contiguous())
        assert all(torch.equal(p, other) for other in whole)


OPTIONS = {
    "plain": (torch.float32, {}),
    "small buckets": (torch.float32, SMALL),
    "no overlap": (torch.float32, {**SMALL, "overlap_grad_sync": False}),
    "overlapped gathers": (torch.float32, {**SMALL, "overlap_param_sync": True}),
    "buffers": (
        torch.float32, {**SMALL, "contiguous_param_buffer": True, "contiguous_grad_buffer": True},
    ),
    "masters": (torch.bfloat16, SMALL),
    "gathered wide": (torch.bfloat16, {**SMALL, "param_sync_dtype": torch.float32}),
    "capturable": (torch.float32, {**SMALL, "capturable": True}),
    "not stored": (torch.float32, {**SMALL, "store_params": False}),
    "pipelined": (torch.float32, {**SMALL, "pipeline_size": 1}),
}  # fmt: skip


def _steps(rank, name):
    dtype, options = OPTIONS[name]
    device = device_of(rank)
    params = _params(dtype, device)
    if rank:  # the first rank's values count
        for p in params:
            p.data.zero_()
    optimizer = DistributedFusedAdam(_groups(params), **ADAM, **options, device=device)
    batches = [[i] for i in range(STEPS)]
    weights, _ = _reference(_params(dtype), lambda p: FusedAdam(p, **ADAM), batches)
    for (seed,) in batches:
        optimizer.zero_grad()
        _backward(params, rank, seed)
        optimizer.step()
    optimizer.param_sync()
    _same(params, weights)
    _alike(params)
    used = sum(p.numel() for p in params)
    sizes = [sum(b.state[n].numel() for b in optimizer._buckets) for n in ("exp_avg", "exp_avg_sq")]
    return sizes, used, len(optimizer._buckets)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_one_rank(all_ranks, name, where):
    ranks = ranks_of(all_ranks, *where)
    for sizes, used, buckets in ranks.run(_steps, name):
        padding = 8 * (len(SHAPES) + buckets)
        assert all(size <= used / ranks.size + padding for size in sizes)
        assert buckets == (2 if name == "plain" else buckets)
        assert buckets >= 2


def _accumulation(rank, greedy, overlap):
    params = _params()
    optimizer = DistributedFusedAdam(
        _groups(params), **ADAM, **SMALL, overlap_grad_sync=overlap, device="cpu"
    )
    batches = [[0, 1, 2], [3, 4]]
    weights, _ = _reference(params, lambda p: FusedAdam(p, **ADAM), batches)
    with recorded(REDUCE_SCATTER) as calls:
        for seeds in batches:
            optimizer.zero_grad()
            for seed in seeds[:-1]:
                with optimizer.no_sync(greedy_grad_copy=greedy):
                    _backward(params, rank, seed)
            assert all((p.grad is None) is greedy for p in params if p.numel())
            _backward(params, rank, seeds[-1])
            optimizer.step()
    _same(params, weights)
    assert len(calls) == 2 * len(optimizer._buckets)
    # Without no_sync each backward reduces, into the same sums.
    params = _params()
    again = DistributedFusedAdam(_groups(params), **ADAM, **SMALL, device="cpu")
    for seeds in batches:
        again.zero_grad()
        for seed in seeds:
            _backward(params, rank, seed)
        again.step()
    for p, w in zip(params, weights, strict=True):
        torch.testing.assert_close(p, w, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
def test_accumulation(two_ranks, greedy, overlap):
    two_ranks.run(_accumulation, greedy, overlap)


def _overlap(rank, overlap):
    params = _params()
    optimizer = DistributedFusedAdam(_groups(params), **ADAM, **SMALL, overlap_grad_sync=overlap)
    optimizer.init_params()
    seen = []
    with recorded(REDUCE_SCATTER) as calls:
        loss = 0.0
        for p, c in zip(params, _factors(rank, 0), strict=True):  # a chain, so in this order
            loss = (p * c).sum() + loss * 1.0
            if p.numel():
                p.register_post_accumulate_grad_hook(lambda _: seen.append(len(calls)))
        loss.backward()
        seen.append(len(calls))
        optimizer.grad_sync()
    return seen, len(calls), len(optimizer._buckets)


@pytest.mark.parametrize("overlap", [False, True])
def test_reductions_are_started_during_backward(two_ranks, overlap):
    for seen, calls, buckets in two_ranks.run(_overlap, overlap):
        assert calls == buckets > 2
        if overlap:
            assert seen[-1] == buckets
            assert 0 < seen[-3] < buckets  # before the last gradients of backward
        else:
            assert seen[-1] == 0


def _unused(rank):
    """Parameters without gradients, even other ones on each rank, have zeros."""
    params = _params()
    optimizer = DistributedFusedAdam(_groups(params), **ADAM, **SMALL, device="cpu")
    for seed in range(2):
        optimizer.zero_grad()
        factors = _factors(rank, seed)
        loss = sum(
            (p * c).sum()
            for i, (p, c) in enumerate(zip(params, factors, strict=True))
            if i != 1 + rank
        )
        loss.backward()
        optimizer.step()
    _alike(params)
    weights = [nn.Parameter(p.detach().clone()) for p in _params()]
    plain = FusedAdam(_groups(weights), **ADAM)
    for seed in range(2):
        made = [_factors(r, seed) for r in range(2)]
        for r in range(2):
            made[r][1 + r].zero_()
        for w, a, b in zip(weights, *made, strict=True):
            w.grad = a / 2 + b / 2
        plain.step()
    _same(params, weights)


def test_parameters_without_gradients(two_ranks):
    two_ranks.run(_unused)


def _remainders(rank, tmp):
    params = _params(torch.bfloat16)
    make = lambda p: DistributedFusedAdam(  # noqa: E731
        _groups(p), **ADAM, **SMALL, store_param_remainders=True, device="cpu"
    )
    optimizer = make(params)
    weights, _ = _reference(params, lambda p: FusedAdam(p, **ADAM), [[i] for i in range(STEPS)])
    for seed in range(STEPS):
        optimizer.zero_grad()
        _backward(params, rank, seed)
        optimizer.step()
    state = optimizer.state_dict()
    for i, (p, w) in enumerate(zip(params, weights, strict=True)):
        if not p.numel():
            continue
        assert torch.equal(state["state"][i]["param"], w.detach())
        nearest = ((w.detach().view(torch.int32) + 0x8000) >> 16).to(torch.int16)
        assert torch.equal(p.detach().view(torch.int16), nearest)
    assert all("param" not in b.state for b in optimizer._buckets)
    others = _params(torch.bfloat16)
    resumed = make(others)
    resumed.load_state_dict(state)
    for tensors, each in ((params, optimizer), (others, resumed)):
        each.zero_grad()
        _backward(tensors, rank, 50)
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_remainders(two_ranks, tmp_path):
    two_ranks.run(_remainders, str(tmp_path))


def _norms(rank):
    params = _params()
    optimizer = DistributedFusedAdam(_groups(params), **ADAM, **SMALL, device="cpu")
    _backward(params, rank, 0)
    means = _averages([0])
    total = torch.linalg.vector_norm(torch.cat([m.flatten() for m in means]).double())
    some = torch.linalg.vector_norm(torch.cat([m.flatten() for m in means[1:3]]).double())
    torch.testing.assert_close(optimizer.grad_norm(params[1:3]).double(), some, rtol=1e-6, atol=0)
    torch.testing.assert_close(optimizer.grad_norm().double(), total, rtol=1e-6, atol=0)
    before = optimizer.clip_grad_norm(0.5)
    torch.testing.assert_close(before.double(), total, rtol=1e-6, atol=0)
    assert optimizer.grad_norm().item() == pytest.approx(0.5, rel=1e-4)
    optimizer.step()
    weights = [nn.Parameter(p.detach().clone()) for p in _params()]
    for w, mean in zip(weights, means, strict=True):
        w.grad = mean
    torch.nn.utils.clip_grad_norm_(weights, 0.5)
    FusedAdam(_groups(weights), **ADAM).step()
    for p, w in zip(params, weights, strict=True):
        torch.testing.assert_close(p, w, rtol=1e-5, atol=1e-5)
    return [
        told(optimizer.grad_norm, norm_type=1.0),
        told(optimizer.clip_grad_norm, 1.0, params[:1]),
        told(optimizer.grad_buffer_view, params[0]),
        told(DistributedFusedAdam, params, with_scaled_states=True),
        told(optimizer.state_dict, state_dict_format=3),
    ]


def test_norms_clipping_and_refusals(ranks):
    for told_ in ranks.run(_norms):
        assert "norm_type must be 2, got 1.0" in told_[0]
        assert "parameters must be None or all" in told_[1]
        assert "contiguous_grad_buffer must be True" in told_[2]
        assert told_[3].startswith("NotImplementedError: DistributedFusedAdam: with_scaled_states")
        assert "state_dict_format must be 1 or 2, got 3" in told_[4]


def _scaled(rank, capturable, unscales, overlap):
    params = _params()
    optimizer = DistributedFusedAdam(
        _groups(params), **ADAM, **SMALL, capturable=capturable, overlap_grad_sync=overlap
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(()))
    for seed in range(3):
        optimizer.zero_grad()
        scale = scaler.get_scale()
        if seed == 1 and rank == 1:
            scale = float("inf")
        _backward(params, rank, seed, scale)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    weights, _ = _reference(_params(), lambda p: FusedAdam(p, **ADAM), [[0], [2]])
    for p, w in zip(params, weights, strict=True):
        torch.testing.assert_close(p, w, rtol=1e-6, atol=1e-6)
    assert int(optimizer.param_groups[0]["step"]) == 2
    assert scaler.get_scale() == 2.0**9


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
def test_loss_scaler_skips_on_all_ranks(two_ranks, capturable, unscales, overlap):
    two_ranks.run(_scaled, capturable, unscales, overlap)


def _run(rank, make, seeds, state=None, dtype=torch.float32, start=None):
    params = _params(dtype)
    if start is not None:
        for p, s in zip(params, start, strict=True):
            p.data.copy_(s)
    optimizer = make(_groups(params))
    if state is not None:
        optimizer.load_state_dict(state)
    for seed in seeds:
        optimizer.zero_grad()
        _backward(params, rank, seed)
        optimizer.step()
    return params, optimizer


def _states(rank, layout, kind):
    cls, options = (DistributedFusedAdam, {**ADAM, **SMALL}) if kind == "adam" else (
        DistributedFusedLAMB, {"lr": 0.05, "weight_decay": 0.1},
    )  # fmt: skip

    def make(groups):
        return cls(groups, **options)

    whole, _ = _run(rank, make, range(5))
    params, optimizer = _run(rank, make, range(3))
    state = optimizer.state_dict(state_dict_format=layout)
    if layout == 1:
        assert (state["gathered_states"] is not None) is (rank == 0)
        held = [state]
        distributed.broadcast_object_list(held, src=0)
        state = held[0]
    start = [p.detach().clone() for p in params]
    resumed, again = _run(rank, make, [3, 4], state, start=start)
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole, strict=True))
    assert again.param_groups[0]["step"] == 5
    if layout == 1:
        state["gathered_states"] = state["gathered_states"][:1]
        return told(again.load_state_dict, state)
    if kind == "adam":  # what one rank has saved loads, too
        weights, plain = _reference(
            _params(), lambda p: FusedAdam(p, **ADAM), [[i] for i in range(3)]
        )
        loaded, _ = _run(
            rank, lambda g: cls(g, **options), [3, 4], plain.state_dict(),
            start=[w.detach() for w in weights],
        )  # fmt: skip
        for p, w in zip(loaded, whole, strict=True):
            torch.testing.assert_close(p, w, rtol=1e-5, atol=1e-5)
    return ""


@pytest.mark.parametrize("kind", ["adam", "lamb"])
@pytest.mark.parametrize("layout", [1, 2])
def test_state_dicts(ranks, layout, kind):
    for text in ranks.run(_states, layout, kind):
        assert layout == 2 or "must be of" in text


def _redundant(rank):
    """Shards over pairs of ranks, each pair with the same ones."""
    pairs = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    crossed = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    params = _params()
    optimizer = DistributedFusedAdam(
        _groups(params), **ADAM, **SMALL, distributed_process_group=pairs[rank // 2],
        redundant_process_group=crossed[rank % 2],
    )  # fmt: skip
    weights, _ = _reference(params, lambda p: FusedAdam(p, **ADAM), [[i] for i in range(3)])
    for seed in range(3):
        optimizer.zero_grad()
        _backward(params, rank, seed)
        optimizer.step()
    _same(params, weights)
    _alike(params)
    assert optimizer.distributed_size == 2
    return told(DistributedFusedAdam, params, distributed_process_group=pairs[rank // 2])


def test_redundant_groups(all_ranks):
    for text in ranks_of(all_ranks, 4, "gloo").run(_redundant):
        assert "must be given together" in text


def _lamb(rank, dtype, max_norm):
    options = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-6}
    params = _params(dtype, device_of(rank))
    optimizer = DistributedFusedLAMB(_groups(params), **options, max_grad_norm=max_norm)
    optimizer.set_global_scale(4.0)
    batches = [[0], [1, 2], [3]]
    weights, _ = _reference(
        _params(dtype), lambda p: FusedLAMB(p, **options, max_grad_norm=max_norm), batches
    )
    for seeds in batches:
        optimizer.zero_grad()
        for seed in seeds:
            optimizer.set_is_accumulation_step(seed != seeds[-1])
            _backward(params, rank, seed, 4.0)
        optimizer.complete_reductions()
        optimizer.step()
    for p, w in zip(params, weights, strict=True):
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {}
        torch.testing.assert_close(p.detach().cpu(), w.detach().to(dtype), **tolerance)
    _alike(params)
    return sum(b.state["exp_avg"].numel() for b in optimizer._buckets)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lamb(all_ranks, dtype, max_norm, where):
    ranks = ranks_of(all_ranks, *where)
    sizes = ranks.run(_lamb, dtype, max_norm)
    used = sum(torch.Size(shape).numel() for shape in SHAPES)
    assert all(size < used / ranks.size + 100 for size in sizes)
