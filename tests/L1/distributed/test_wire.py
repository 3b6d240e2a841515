"""Tokens and gradients that travel between ranks as FP8: their bytes, and the same numbers."""

import pytest
import torch
from on_rank import alone, device_of, recorded
from shards import decibels
from torch import distributed
from torch.nn import functional

from apex_te import fp8_autocast
from apex_te.comm.collectives import ALL_GATHER
from apex_te.comm.expert_parallel import TokenDispatcher
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.recipe import BlockScaling
from tests.checks import assert_same_bits, spread

HIDDEN, FFN, BLOCKS = 256, 48, 2  # BLOCKS of a row, another number than that of columns of probs
EXCHANGES = ("all_to_all", "all_gather")
FORMATS = ("E4M3", "HYBRID")


def routed(rank, tokens, experts, unused, device, dtype):
    """Tokens of one rank, weights and experts of each, and gradients."""
    torch.manual_seed(60 + rank)
    x, dy = (spread((tokens, HIDDEN), dtype) for _ in range(2))
    logits = torch.randn(tokens, experts)
    logits[:, list(unused)] = -1e4
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    chosen.scatter_(1, logits.topk(2, dim=1).indices, True)
    return [t.to(device) for t in (x, logits.softmax(1) * chosen, chosen, dy)]


def experts_of(count, first, device, dtype):
    """FC1 and FC2 of ``count`` experts from the ``first`` on."""
    layers = []
    for k, (rows, cols) in enumerate(((FFN, HIDDEN), (HIDDEN, FFN))):
        layer = GroupedLinear(
            count, cols, rows, False, single_parameter=True, params_dtype=dtype, device=device
        )
        with torch.no_grad():
            for i, weight in enumerate(layer.weight):
                torch.manual_seed(7 + 2 * (first + i) + k)
                weight.copy_(torch.randn(rows, cols) * 0.2)
        layers.append(layer)
    return layers


def step(dispatcher, first, given, recipe):
    """Results by name, and for dispatch and backward the bytes of rows that each call sent."""
    x, probs, chosen, dy = (t.clone() for t in given)
    layers = experts_of(dispatcher.local_experts, first, x.device, x.dtype)
    x.requires_grad_()
    probs.requires_grad_()
    sent = []

    def bytes_of(out, inp, *_, **__):
        rows = inp.dim() == 2 and inp.shape[1] in (HIDDEN, BLOCKS)
        return inp.nbytes if rows else None

    name = "all_to_all_single" if dispatcher.exchange == "all_to_all" else ALL_GATHER
    with recorded(name, bytes_of) as calls:
        dispatch = dispatcher.dispatch(x, probs, chosen)
    sent.append([size for size in calls if size is not None])
    with fp8_autocast(recipe is not None, recipe):
        hidden = functional.silu(layers[0](dispatch.rows, dispatch.m_splits))
        out = dispatch.combine(layers[1](hidden, dispatch.m_splits))
    with recorded(name, bytes_of) as calls:
        out.backward(dy)
    sent.append([size for size in calls if size is not None])
    weights = {f"fc{k}": layer.weight.grad for k, layer in enumerate(layers)}
    return {"out": out.detach(), "x": x.grad, "probs": probs.grad, **weights}, sent


def check(rank, exchange, dtype, form, tokens):
    """With and without FP8 on the wire, and on one rank; the last rank gets no rows."""
    device, ranks = device_of(rank), distributed.get_world_size()
    experts, recipe = 2 * ranks, BlockScaling(fp8_format=form)
    counts = [tokens] * ranks
    if exchange == "all_to_all" and tokens:
        counts = [tokens + 3 * r if r != 1 else 0 for r in range(ranks)]
    unused = (experts - 2, experts - 1)
    every = [routed(r, counts[r], experts, unused, device, dtype) for r in range(ranks)]

    def run(wire):
        options = {"exchange": exchange, "max_experts_per_token": 2, "wire": wire}
        return step(TokenDispatcher(experts, **options), 2 * rank, every[rank], recipe)

    found, sent = run("blockwise" if form == "E4M3" else recipe)
    plain, plain_sent = run(None)
    joined = [torch.cat(parts) for parts in zip(*every, strict=True)]
    whole, _ = step(TokenDispatcher(experts, alone(rank)), 0, joined, recipe)
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    whole = {n: v[2 * rank : 2 * rank + 2] if n[:2] == "fc" else v[mine] for n, v in whole.items()}

    size = HIDDEN * every[0][0].element_size()
    for calls, plain_calls in zip(sent, plain_sent, strict=True):
        rows = plain_calls[0] // size
        assert calls == [rows * HIDDEN, rows * 4 * BLOCKS, *plain_calls[1:]]
    assert_same_bits(found["out"], plain["out"])
    exact = exchange == "all_to_all"  # else gradients are cast before they are weighted, and after
    if exact:
        assert_same_bits([found[n] for n in ("x", "probs")], [plain[n] for n in ("x", "probs")])
    # A second cast of a weight's operands loses only values far below their blocks' largest. E5M2
    # has 6 dB less than E4M3; sums of "all_gather" are rounded on each rank.
    least = 60 if exact else 20 if form == "E4M3" else 14
    for name, value in found.items():
        assert value.any() == (
            tokens and rank < ranks - 1 if name[:2] == "fc" else counts[rank] > 0
        )
        for wanted in (plain[name], whole[name]):
            assert value.shape == wanted.shape
            if wanted.any():
                ratio = decibels(value, wanted)
                assert ratio > (45 if name == "out" else least), f"{name}: {ratio:.1f} dB"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_wire(ranks, exchange, dtype, form):
    for tokens in (7, 0):
        ranks.run(check, exchange, dtype, form, tokens)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_wire_on_gpus(two_gpus, exchange, form):
    two_gpus.run(check, exchange, torch.bfloat16, form, 70)
