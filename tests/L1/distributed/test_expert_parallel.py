"""Experts spread over ranks: outputs and gradients equal those of one rank that has them all."""

import pytest
import torch
from on_rank import device_of, dtype_of, told
from schemes import chosen
from shards import decibels
from torch import distributed
from torch.nn import functional

from apex_te import fp8_autocast
from apex_te.comm.expert_parallel import TokenDispatcher
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.recipe import BlockScaling, MXFP8Scaling

HIDDEN, FFN = 32, 48
RECIPES = {"none": None, **chosen("delayed", "tensorwise", "mxfp8", reduce_amax=False)}


def routed(rank, tokens, experts, topk, device, unused=()):
    """Tokens of one rank, where they go, and with which weights."""
    generator = torch.Generator().manual_seed(50 + rank)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    logits = torch.randn(tokens, experts, generator=generator)
    logits[:, list(unused)] = -1e4
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool)
    if tokens:
        routing_map.scatter_(1, logits.topk(topk, dim=1).indices, True)
    probs = logits.softmax(1) * routing_map
    dy = torch.randn(tokens, HIDDEN, generator=generator)
    return [t.to(device) for t in (x, probs, routing_map, dy)]


def experts_of(count, first, device, dtype):
    """FC1 and FC2 of ``count`` experts from the ``first`` on, whichever rank makes them."""
    layers = []
    for k, (rows, cols) in enumerate(((FFN, HIDDEN), (HIDDEN, FFN))):
        layer = GroupedLinear(count, cols, rows, bias=False, params_dtype=dtype, device=device)
        with torch.no_grad():
            for i, weight in enumerate(layer.parameters()):
                generator = torch.Generator().manual_seed(7 + 2 * (first + i) + k)
                weight.copy_(torch.randn(rows, cols, generator=generator) * 0.2)
        layers.append(layer)
    return layers


def run(layers, dispatcher, x, probs, routing_map, recipe):
    dispatch = dispatcher.dispatch(x, probs, routing_map)
    with fp8_autocast(recipe is not None, recipe):
        hidden = functional.silu(layers[0](dispatch.rows, dispatch.m_splits))
        return dispatch.combine(layers[1](hidden, dispatch.m_splits)), dispatch


def tokens_of(rank, exchange, tokens):
    return tokens if exchange == "all_gather" else (tokens + 5 * rank if rank != 1 else 0)


def against_one_rank(rank, exchange, topk, align, recipe, unused=()):
    device, ranks = device_of(rank), distributed.get_world_size()
    dtype, experts, recipe = dtype_of(device), 2 * ranks, RECIPES[recipe]
    layers = experts_of(2, 2 * rank, device, dtype)
    dispatcher = TokenDispatcher(
        experts, align=align, exchange=exchange, max_experts_per_token=topk
    )
    every = [
        routed(r, tokens_of(r, exchange, 11), experts, topk, device, unused) for r in range(ranks)
    ]
    every = [[t.to(dtype) if t.is_floating_point() else t for t in one] for one in every]
    x, probs, routing_map, dy = every[rank]
    x.requires_grad_()
    probs.requires_grad_()
    out, dispatch = run(layers, dispatcher, x, probs, routing_map, recipe)
    out.backward(dy)
    found = {"out": out, "x": x.grad, "probs": probs.grad}
    found |= {f"fc{k} {n}": p.grad for k in (0, 1) for n, p in layers[k].named_parameters()}

    whole = experts_of(experts, 0, device, dtype)
    alone = TokenDispatcher(
        experts, distributed.new_group([rank], use_local_synchronization=True), align=align
    )
    joined = [torch.cat(parts).detach() for parts in zip(*every, strict=True)]
    joined[0].requires_grad_()
    joined[1].requires_grad_()
    all_out, _ = run(whole, alone, joined[0], joined[1], joined[2], recipe)
    all_out.backward(joined[3])
    starts = [sum(one[0].shape[0] for one in every[:r]) for r in range(ranks + 1)]
    mine = slice(starts[rank], starts[rank + 1])
    expected = {"out": all_out[mine], "x": joined[0].grad[mine], "probs": joined[1].grad[mine]}
    for k in (0, 1):
        for i in range(2):
            weight = getattr(whole[k], f"weight{2 * rank + i}")
            expected[f"fc{k} weight{i}"] = weight.grad
    splits = dispatch.m_splits
    splits = splits if isinstance(splits, list) else splits.tolist()
    assert all(split % align == 0 for split in splits)
    for name, value in found.items():
        wanted = expected[name]
        assert value.shape == wanted.shape, name
        if dtype is torch.float32:
            torch.testing.assert_close(
                value, wanted, rtol=1.3e-6, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
        elif wanted.any():  # roundings differ; so do FP8 data of what was rounded
            ratio = decibels(value, wanted)
            assert ratio > (40 if recipe is None else 20), f"{name}: {ratio:.1f} dB"
    return [p.grad.abs().sum().item() for p in layers[0].parameters()]


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize(("topk", "align"), [(1, 1), (2, 16), (4, 16)])
def test_equals_one_rank(ranks, exchange, topk, align):
    ranks.run(against_one_rank, exchange, topk, align, "none")


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_an_empty_expert(two_ranks, exchange):
    """Its rank takes part, and its weights get zeros."""
    grads = two_ranks.run(against_one_rank, exchange, 2, 16, "none", (2, 3))
    assert grads[1] == [0.0, 0.0]
    assert all(total > 0 for total in grads[0])


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_fp8(two_ranks, exchange, recipe):
    """Each expert sees all of its tokens, so its scales are those of one rank."""
    two_ranks.run(against_one_rank, exchange, 2, 16, recipe)


def test_fp8_blocks(two_ranks):
    """Blocks that are shared by rows begin with each expert's."""
    two_ranks.run(against_one_rank, "all_to_all", 2, 32, "mxfp8")


def _errors(rank):
    found = [told(TokenDispatcher, *args) for args in ((3,), (True,), (4, "world"))]
    found += [told(TokenDispatcher, 4, align=0), told(TokenDispatcher, 4, exchange="broadcast")]
    for wire in ("blokwise", MXFP8Scaling(), BlockScaling(pow2=False), torch.float8_e4m3fn):
        found.append(told(TokenDispatcher, 4, wire=wire))
    dispatcher = TokenDispatcher(4, exchange="all_gather")
    x, probs, routing_map, _ = routed(rank, 3, 4, 1, "cpu")
    for given in (
        (x[0], probs, routing_map),
        (x, probs[:, :2], routing_map),
        (x, probs, routing_map.float()),
        (x, probs.double(), routing_map),
    ):
        found.append(told(dispatcher.dispatch, *given))
    dispatch = dispatcher.dispatch(x, probs, routing_map)
    found.append(told(dispatch.combine, dispatch.rows[:1]))
    return [*found, told(dispatcher.dispatch, x[:2], probs[:2], routing_map[:2])]


def test_errors(two_ranks):
    for found in two_ranks.run(_errors):
        wanted = (
            "num_experts must be a multiple of the 2 ranks of group, got 3",
            "num_experts must be an int, got bool",
            "group must be a torch.distributed.ProcessGroup, got str",
            "align must be at least 1, got 0",
            "exchange must be one of all_to_all, all_gather, got 'broadcast'",
            "wire must be \"blockwise\", a BlockScaling recipe or None, got 'blokwise'; did",
            'wire must be "blockwise", a BlockScaling recipe or None, got MXFP8Scaling',
            "wire must be a recipe with scales=\"pow2\", got scales='fp32'",
            'wire must be "blockwise", a BlockScaling recipe or None, got dtype',
            r"tokens must be [tokens, hidden], got [32]",
            r"probs must have shape [3, 4], got [3, 2]",
            "routing_map must have dtype bool, got torch.float32",
            "probs must have dtype float32 or torch.float32, got torch.float64",
            "results must be [",
            "tokens must be 3 in each call",
        )
        for text, part in zip(found, wanted, strict=True):
            assert part in text


# One rank differs, at the first call or later: each raises something of its own or the mismatch.


def _differing(rank, exchange, what, later):
    device = device_of(rank)
    dispatcher = TokenDispatcher(
        4 + 2 * (what == "experts" and rank), align=1, exchange=exchange,
        wire="blockwise" if what == "wire" and rank else None,
    )  # fmt: skip

    def call(what):
        odd = rank == 1 and what is not None
        x, probs, routing_map, dy = routed(
            rank, 3 + (odd and what == "tokens"), dispatcher.num_experts, 2, device
        )
        if odd and what == "probs":
            probs = probs[:, :3]
        elif odd and what == "hidden":
            x, dy = x[:, :16], dy[:, :16]
        elif odd and what == "dtype":
            x, dy = x.bfloat16(), dy.bfloat16()
        x.requires_grad_(not (odd and what == "frozen"))
        dispatch = dispatcher.dispatch(x, probs, routing_map)
        rows = dispatch.rows * 2
        if odd and what == "rows":
            rows = torch.cat((rows, rows))
        elif odd and what == "results":
            rows = rows.detach()
        dispatch.combine(rows).backward(dy)

    if later:
        call(None)
    message = told(call, what)
    if what not in ("experts", "wire"):
        call(None)  # all of them may go on
    return message


MISMATCHES = {  # what differs: whether rank 1 raises something else, and what rank 0 is told
    "experts": (None, "num_experts (got 4 on rank 0 and 6 on rank 1)"),
    "wire": (None, "wire (got None on rank 0 and BlockScaling(fp8_format=Format.E4M3, "),
    "tokens": (None, "number of tokens (got 3 on rank 0 and 4 on rank 1)"),
    "probs": ("ValueError: TokenDispatcher: probs must have shape [3, 4], got [3, 3]",) * 2,
    "hidden": (None, "hidden size (got 32 on rank 0 and 16 on rank 1)"),
    "dtype": (None, "dtype of tokens (got torch.float32 on rank 0 and torch.bfloat16 on rank 1)"),
    "frozen": (None, "tokens.requires_grad (got True on rank 0 and False on rank 1)"),
    "rows": ("ValueError: Dispatch: results must be [",) * 2,
    "results": (None, "results.requires_grad (got True on rank 0 and False on rank 1)"),
}


def _check(messages, own, told):
    ours, theirs = messages
    assert ours.startswith("RankMismatchError: ")
    assert told in ours
    assert theirs == ours if own is None else theirs.startswith(own)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_differ(two_ranks, exchange, what):
    messages = two_ranks.run(_differing, exchange, what, False)
    if exchange == "all_to_all" and what == "tokens":
        assert messages == ["nothing was raised"] * 2
    else:
        _check(messages, *MISMATCHES[what])


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("what", ["tokens", "probs", "hidden", "dtype", "frozen"])
def test_ranks_that_differ_later(two_ranks, exchange, what):
    """The counts that travel say so; between GPUs "all_gather" has none, but on CPUs asks again."""
    messages = two_ranks.run(_differing, exchange, what, True)
    if what == "tokens" and exchange == "all_to_all":
        assert messages == ["nothing was raised"] * 2
    elif what == "tokens":
        own = 'ValueError: TokenDispatcher: tokens must be 3 in each call with "all_gather"'
        _check(messages, own, own)
    else:
        _check(messages, *MISMATCHES[what])


@pytest.mark.cuda
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_ranks_that_differ_on_gpus(two_gpus, exchange):
    for what in ("experts", "probs", "frozen"):
        _check(two_gpus.run(_differing, exchange, what, False), *MISMATCHES[what])
    if exchange == "all_to_all":
        for what in ("probs", "dtype"):
            _check(two_gpus.run(_differing, exchange, what, True), *MISMATCHES[what])


@pytest.mark.cuda
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("recipe", ["none", "tensorwise"])
def test_on_gpus(two_gpus, exchange, recipe):
    two_gpus.run(against_one_rank, exchange, 2, 16, recipe)


def _without_waiting(rank, wire):
    device = torch.device("cuda", rank)
    layers = experts_of(2, 2 * rank, device, torch.bfloat16)
    dispatcher = TokenDispatcher(4, exchange="all_gather", max_experts_per_token=2, wire=wire)
    x, probs, routing_map, dy = routed(rank, 64, 4, 2, device)
    x, probs, dy = (t.bfloat16() for t in (x, probs, dy))
    x.requires_grad_()

    def step():
        out, _ = run(layers, dispatcher, x, probs, routing_map, RECIPES["tensorwise"])
        out.backward(dy)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return x.grad.float().abs().sum().item()


@pytest.mark.cuda
@pytest.mark.parametrize("wire", [None, "blockwise"])
def test_nothing_waits_for_the_gpu(two_gpus, wire):
    assert all(total > 0 for total in two_gpus.run(_without_waiting, wire))
