"""Attention with sequences split over ranks, which one process emulates, against whole ones."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from emulated_ranks import EmulatedRanks, emulate

import apex_te
from apex_te.module.attention.context_parallel import split as splitting
from apex_te.module.attention.context_parallel.meeting import Neighbourhood
from apex_te.module.attention.context_parallel.pieces import pieces_of
from apex_te.module.attention.context_parallel.split import PackedZigZag, ZigZag

HEADS, SIZE = 8, 16
WINDOWS = [(0, 0), (3, 0), (7, 0), (50, 0), (-1, 2), (4, -1), (2, 5)]


def own(x, size, rank, dim=0):
    chunks = x.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_pieces_have_each_query_and_key_that_see_each_other_once(size):
    tokens = 8 * size  # chunks of four
    place = torch.arange(tokens)
    by_rank = torch.cat([own(place, size, rank) for rank in range(size)])
    apart = place[:, None] - place
    cases = [(False, None), (True, None), *((False, w) for w in WINDOWS)]
    for rank, (causal, window) in itertools.product(range(size), cases):
        left, right = (-1, 0 if causal else -1) if window is None else window
        sees = torch.ones(tokens, tokens, dtype=torch.bool)
        sees &= (apart <= left) if left >= 0 else True
        sees &= (-apart <= right) if right >= 0 else True
        count = torch.zeros(tokens, tokens)
        pieces = pieces_of(rank, size, 8, 8, causal, window)
        begun = set()
        for piece in pieces:
            rows = own(place, size, rank)[slice(*piece.queries)]
            keys = torch.cat([by_rank[a:b] for a, b in piece.keys])
            assert piece.is_own == set(keys.tolist()).issubset(own(place, size, rank).tolist())
            assert piece.is_first == begun.isdisjoint(rows.tolist())
            begun.update(rows.tolist())
            # As kernels align them, at the last query and key.
            gap = torch.arange(len(rows))[:, None] + len(keys) - len(rows) - torch.arange(len(keys))
            seen = torch.ones_like(gap, dtype=torch.bool)
            left, right = (-1, 0) if piece.causal else piece.window
            seen &= (gap <= left) if left >= 0 else True
            seen &= (-gap <= right) if right >= 0 else True
            count[rows[:, None], keys] += seen
        expected = torch.zeros_like(count)
        mine = own(place, size, rank)
        expected[mine] = sees[mine].float()
        assert torch.equal(count, expected)
        assert len(begun) == 8


def test_a_window_gets_the_keys_before_its_chunks_alone():
    size, rows = 4, 64
    every = [pieces_of(rank, size, rows, rows, False, (5, 0)) for rank in range(size)]
    needs = tuple(tuple(span for piece in all_ for span in piece.keys) for all_ in every)
    for rank, pieces in enumerate(every):
        meeting = Neighbourhood(EmulatedRanks(size, rank, "all_gather", []), needs, rows)
        # The last rank has neighbouring chunks, the first the first.
        assert meeting.rows - rows == 5 * (2 - (rank in (0, size - 1)))
        spans = [span for piece in pieces for span in meeting.places(piece.keys)]
        assert {row for a, b in spans for row in range(a, b)} == set(range(meeting.rows))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_orders_of_tokens(size, device):
    rooms = [2 * size, 0, 6 * size, 4 * size]
    starts = torch.tensor([0, *itertools.accumulate(rooms)], dtype=torch.int32, device=device)
    x = torch.randn(sum(rooms) + 2 * size, 3, device=device)
    parts = x.split([*rooms, 2 * size])
    tail = parts[-1] * 0
    expected = [
        torch.cat([*(own(p, size, r) for p in parts[:-1]), tail[: len(tail) // size]])
        for r in range(size)
    ]
    order = PackedZigZag(size, starts, len(x))
    assert torch.equal(order.by_rank(x), torch.cat(expected))
    assert torch.equal(order.whole(torch.cat(expected)), torch.cat((*parts[:-1], tail)))
    expected = torch.cat([own(x, size, r) for r in range(size)])
    assert torch.equal(ZigZag(size).by_rank(x), expected)
    assert torch.equal(ZigZag(size).whole(expected), x)


def test_a_batch_is_split_as_megatron_splits_it(monkeypatch):
    monkeypatch.setattr(
        splitting, "ContextRanks", lambda *args, **kwargs: EmulatedRanks(2, 1, "p2p", [])
    )
    ids = torch.arange(32).view(2, 16)
    batch = apex_te.split_for_context_parallel({"ids": ids, "name": "x"}, None)
    assert batch["name"] == "x"
    # Megatron-LM's way: chunks as a dimension, of which two are taken.
    index = torch.tensor([1, 2])
    assert torch.equal(batch["ids"], ids.view(2, 4, 4).index_select(1, index).view(2, -1))
    cu = torch.tensor([0, 4, 16], dtype=torch.int32)
    found = apex_te.split_for_context_parallel(ids, None, 1, cu)[0]
    assert found.tolist() == [1, 2, 7, 8, 9, 10, 11, 12]
    with pytest.raises(ValueError, match=r"multiple of 4 tokens .* in dimension 1, got .2, 14."):
        apex_te.split_for_context_parallel(ids[:, :14], None)
    with pytest.raises(ValueError, match="cu_seqlens must have sequences of multiples of 4"):
        apex_te.split_for_context_parallel(ids, None, 1, cu - cu // 16 * 2)
    with pytest.raises(TypeError, match="cu_seqlens must be an int32 tensor, got"):
        apex_te.split_for_context_parallel(ids, None, 1, cu.long())


def results(module, tensors, grad, options):
    module.zero_grad()
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = module(*leaves, **options)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves), *(p.grad for p in module.parameters())]


def emulated(module, size, comm_type, tensors, grad, options, dim):
    """Results of all ranks, joined; gradients of parameters are summed."""

    def run(ranks):
        module._context = ranks
        parts = [own(x, size, ranks.rank, dim) for x in (*tensors, grad)]
        return results(module, parts[:-1], parts[-1], options)

    found = emulate(size, comm_type, run)
    del module._context
    *tokens, last = zip(*found, strict=True)
    joined = []
    for parts in tokens if len(found[0]) == 5 else (*tokens, last):
        chunks = [chunk for part in parts for chunk in part.chunk(2, dim)]
        joined.append(torch.cat((*chunks[::2], *reversed(chunks[1::2])), dim))
    return [*joined, torch.stack(last).sum(0)] if len(found[0]) == 5 else joined


MASKS = {
    "causal": ("causal", None),
    "all": ("no_mask", None),
    "window": ("causal", (9, 0)),
    "padding": ("padding_causal", None),
}


def compared(device, size, comm_type, mask, groups, sink, layout, tokens, batch=2, **sizes):
    """Results of ranks, of one rank, and those in float64 on the CPU."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    kind, window = MASKS[mask]
    head = sizes.get("head", SIZE)
    dim = layout.index("s")
    shape = (tokens, batch) if dim == 0 else (batch, tokens)
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, n, head).to(dtype) for n in (HEADS, groups, groups)]
    grad = torch.randn(*shape, HEADS * head).to(dtype)
    options = {}
    if mask == "padding":
        padded = torch.zeros(batch, 1, 1, tokens, dtype=torch.bool)
        padded[0, ..., tokens - 5 :] = padded[1, ..., 2:4] = True
        options["attention_mask"] = padded

    def module_on(where):
        made = apex_te.DotProductAttention(
            HEADS, head, groups, qkv_format=layout, attn_mask_type=kind, window_size=window,
            softmax_type=sink, device=where,
        )  # fmt: skip
        if sink == "learnable":
            with torch.no_grad():
                made.softmax_offset.copy_(torch.linspace(-1.0, 1.5, HEADS))
        return made

    exact = results(module_on("cpu"), [x.double() for x in tensors], grad.double(), options)
    options = {name: x.to(device) for name, x in options.items()}
    tensors, grad = [x.to(device) for x in tensors], grad.to(device)
    module = module_on(device)
    one = results(module, tensors, grad, options)
    ranks = emulated(module, size, comm_type, tensors, grad, options, dim)
    return SimpleNamespace(ranks=ranks, one=one, exact=exact, module=module)


def assert_as_exact_as_one_rank(found):
    """At most twice one rank's error beside float64, and an ulp of the largest value.

    The ulp is that of the tokens' dtype: sinks' gradients in float32 are sums of rounded tokens,
    and one rank's error in such a sum is at times near 0 by chance.
    """
    eps = torch.finfo(found.one[0].dtype).eps
    for x, y, z in zip(found.ranks, found.one, found.exact, strict=True):
        error = (y.double().cpu() - z).abs().max()
        allowed = 2 * error + 2 * eps * z.abs().max()
        assert (x.double().cpu() - z).abs().max() <= allowed


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("sink", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_gathered_keys_are_as_exact_as_one_rank(device, size, mask, groups, sink, layout):
    found = compared(device, size, "all_gather", mask, groups, sink, layout, 12 * size)
    assert_as_exact_as_one_rank(found)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("sink", ["vanilla", "learnable"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_split_heads_have_the_bits_of_one_rank(device, size, mask, groups, sink, layout):
    found = compared(device, size, "a2a", mask, groups, sink, layout, 12 * size)
    assert_as_exact_as_one_rank(found)
    if device.type == "cpu":
        # Gradients of heads that several ranks have are sums.
        names = range(len(found.one)) if groups % size == 0 else (0, 1)
        assert all(torch.equal(found.ranks[n], found.one[n]) for n in names)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mask", ["causal", "all", "window"])
@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
@pytest.mark.parametrize("sink", ["vanilla", "learnable"])
def test_long_sequences_on_a_gpu(size, mask, comm_type, sink):
    """Long enough for cuDNN's kernel."""
    found = compared(
        torch.device("cuda"), size, comm_type, mask, 2, sink, "sbhd", 1024 * size, 1, head=64
    )
    assert_as_exact_as_one_rank(found)
