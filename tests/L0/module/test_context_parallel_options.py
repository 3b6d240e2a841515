"""What attention takes besides masks, with sequences split over ranks that one process emulates."""

import pytest
import torch
from emulated_ranks import emulate

import apex_te
from apex_te.module.attention.context_parallel.split import PackedZigZag

HEADS, GROUPS, SIZE = 4, 2, 8


def own(x, size, rank, dim=0):
    chunks = x.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim)


def joined(parts, dim=0):
    chunks = [chunk for part in parts for chunk in part.chunk(2, dim)]
    return torch.cat((*chunks[::2], *reversed(chunks[1::2])), dim)


def results(module, tensors, grad, bias, options):
    leaves = [x.detach().requires_grad_() for x in tensors]
    given = {} if bias is None else {"core_attention_bias": bias.detach().requires_grad_()}
    out = module(*leaves, **given, **options)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves), *(x.grad for x in given.values())]


def draw(*shape, device, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        device, dtype
    )


def cases(device, queries, keys):
    """Constructor's options, a bias or None, and options of the call, by name."""
    hidden = draw(1, HEADS, queries, keys, device=device) > 1.0
    bias = draw(1, HEADS, queries, keys, device=device)
    ends = torch.arange(queries, device=device).flip(0) < 3, torch.arange(keys, device=device) > 20
    padded = tuple(x[None, None, None].expand(2, 1, 1, -1).clone() for x in ends)
    post = {"core_attention_bias_type": "post_scale_bias"}
    return {
        "cross": ({"attn_mask_type": "no_mask", "attention_type": "cross"}, None, {}),
        "cross_causal": ({"attn_mask_type": "causal_bottom_right"}, None, {}),
        "arbitrary": ({"attn_mask_type": "arbitrary"}, None, {"attention_mask": hidden}),
        "bias": ({"attn_mask_type": "causal"}, bias, post),
        "pre_bias": (
            {"attn_mask_type": "no_mask"},
            bias[:, :1],
            {"core_attention_bias_type": "pre_scale_bias"},
        ),
        "padded_cross": (
            {"attn_mask_type": "padding", "attention_type": "cross", "window_size": (9, 4)},
            None,
            {"attention_mask": padded},
        ),
        "alibi": ({"attn_mask_type": "causal"}, None, {"core_attention_bias_type": "alibi"}),
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
@pytest.mark.parametrize("case", cases("cpu", 32, 24))
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_options(device, size, comm_type, case, layout):
    dim = layout.index("s")
    queries, keys = 32, 24 if "cross" in case else 32
    build, bias, options = cases(device, queries, keys)[case]
    module = apex_te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format=layout, **build)
    shape = ((queries, HEADS), (keys, GROUPS), (keys, GROUPS))
    tensors = [draw(n, 2, heads, SIZE, device=device) for n, heads in shape]
    grad = draw(queries, 2, HEADS * SIZE, device=device)
    tensors, grad = [x.transpose(0, dim) for x in tensors], grad.transpose(0, dim)
    one = results(module, tensors, grad, bias, options)

    def run(ranks):
        module._context = ranks
        parts = [own(x, size, ranks.rank, dim) for x in (*tensors, grad)]
        return results(module, parts[:-1], parts[-1], bias, options)

    if case == "alibi" and comm_type != "a2a":
        with pytest.raises(NotImplementedError, match="must not be 'alibi' with cp_comm_type 'all"):
            emulate(size, comm_type, run)
        return
    found = list(zip(*emulate(size, comm_type, run), strict=True))
    found = [joined(x, dim) for x in found[:4]] + [torch.stack(x).sum(0) for x in found[4:]]
    for x, y in zip(found, one, strict=True):
        # fp32 sums in another order.
        torch.testing.assert_close(x, y, rtol=0.0, atol=4e-6 * float(y.abs().max()))


@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
def test_float64_and_sizes_of_heads(device, comm_type):
    module = apex_te.DotProductAttention(2, (8, 16), qkv_format="bshd", softmax_type="off-by-one")
    tensors = [draw(1, 16, 2, n, device=device, dtype=torch.float64) for n in (8, 8, 16)]
    grad = draw(1, 16, 32, device=device, dtype=torch.float64)
    one = results(module, tensors, grad, None, {})

    def run(ranks):
        module._context = ranks
        parts = [own(x, 2, ranks.rank, 1) for x in (*tensors, grad)]
        return results(module, parts[:-1], parts[-1], None, {})

    for x, y in zip(zip(*emulate(2, comm_type, run), strict=True), one, strict=True):
        torch.testing.assert_close(joined(x, 1), y, rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
def test_without_gradients(comm_type):
    module = apex_te.DotProductAttention(2, 8)
    x = draw(8, 1, 2, 8, device="cpu")

    def run(ranks):
        module._context = ranks
        with torch.no_grad():
            return module(*(own(x, 2, ranks.rank),) * 3)

    found = joined(emulate(2, comm_type, run))
    del module._context
    assert torch.equal(found, module(x, x, x)) or comm_type == "all_gather"
    torch.testing.assert_close(found, module(x, x, x), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
@pytest.mark.parametrize("window", [None, (9, 0)])
def test_batch_invariant_outputs_have_the_bits_of_one_rank(device, comm_type, window):
    module = apex_te.DotProductAttention(
        HEADS, SIZE, GROUPS, window_size=window, softmax_type="off-by-one"
    )
    tensors = [draw(32, 2, n, SIZE, device=device) for n in (HEADS, GROUPS, GROUPS)]
    with apex_te.batch_invariant(), torch.no_grad():
        one = module(*tensors)

        def run(ranks):
            module._context = ranks
            return module(*(own(x, 2, ranks.rank) for x in tensors))

        assert torch.equal(joined(emulate(2, comm_type, run)), one)


PLAIN = {
    "causal": ({"attn_mask_type": "causal"}, None, {}),
    "all": ({"attn_mask_type": "no_mask"}, None, {}),
    "window": ({"window_size": (9, 0)}, None, {}),
    "both_sides": ({"attn_mask_type": "no_mask", "window_size": (3, 6)}, None, {}),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
@pytest.mark.parametrize("case", [*PLAIN, *cases("cpu", 32, 24)])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_largest_logits_are_those_of_whole_sequences(device, size, comm_type, case, layout):
    """On every rank, of all heads; results are those without them."""
    dim = layout.index("s")
    queries, keys = 32, 24 if "cross" in case else 32
    build, bias, options = (PLAIN | cases(device, queries, keys))[case]
    if case == "alibi" and comm_type != "a2a":
        pytest.skip("refused, see test_options")
    module = apex_te.DotProductAttention(HEADS, SIZE, GROUPS, qkv_format=layout, **build)
    shape = ((queries, HEADS), (keys, GROUPS), (keys, GROUPS))
    tensors = [draw(n, 2, heads, SIZE, device=device).transpose(0, dim) for n, heads in shape]
    tensors[0].requires_grad_()
    given = {**options, **({} if bias is None else {"core_attention_bias": bias})}

    def run(ranks, with_max=True):
        module._context, module.return_max_logit = ranks, with_max
        return module(*(own(x, size, ranks.rank, dim) for x in tensors), **given)

    plain = emulate(size, comm_type, lambda ranks: run(ranks, False))
    found = emulate(size, comm_type, run)
    del module._context
    module.return_max_logit = True
    _, expected = module(*tensors, **given)
    for (out, largest), alone in zip(found, plain, strict=True):
        assert torch.equal(out, alone)
        assert not largest.requires_grad
        # Products of other shapes sum in another order.
        torch.testing.assert_close(largest, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
def test_largest_logits_of_packed_sequences(device, comm_type):
    module = apex_te.DotProductAttention(HEADS, SIZE, qkv_format="thd", return_max_logit=True)
    starts = torch.tensor([0, 8, 24], dtype=torch.int32, device=device)
    x = draw(24, HEADS, SIZE, device=device)
    given = {"cu_seqlens_q": starts, "max_seqlen_q": 16, "max_seqlen_kv": 16}
    expected = module(x, x, x, **given)[1]
    order = PackedZigZag(2, starts, 24)

    def run(ranks):
        module._context = ranks
        return module(*(order.by_rank(x).chunk(2)[ranks.rank],) * 3, **given)[1]

    if comm_type == "p2p":
        with pytest.raises(NotImplementedError, match="return_max_logit must be False with qkv_f"):
            emulate(2, comm_type, run)
        return
    for largest in emulate(2, comm_type, run):
        torch.testing.assert_close(largest, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "heads", "groups", "window", "kind", "served"),
    [(4, 4, 4, None, "causal", "a2a"), (2, 4, 4, None, "causal", "all_gather"),
     (4, 8, 2, None, "causal", "all_gather"), (2, 4, 2, None, "arbitrary", "a2a"),
     (2, 3, 3, None, "arbitrary", "all_gather"), (4, 4, 4, (5, 0), "causal", "all_gather"),
     (4, 4, 4, None, "thd", "all_gather")],
)  # fmt: skip
def test_what_serves_p2p(device, ranks, heads, groups, window, kind, served):
    """The exchange that ``explain`` names gives the results that it gives by its own name."""
    packed = kind == "thd"
    layout = "thd" if packed else "sbhd"
    module = apex_te.DotProductAttention(
        heads, SIZE, groups, qkv_format=layout, window_size=window,
        attn_mask_type="causal" if packed else kind,
    )  # fmt: skip
    tokens = (24,) if packed else (24, 2)
    tensors = [draw(*tokens, n, SIZE, device=device) for n in (heads, groups, groups)]
    given = {}
    if packed:
        starts = torch.tensor([0, 8, 24], dtype=torch.int32, device=device)
        given = {"cu_seqlens_q": starts, "max_seqlen_q": 16}
        order = PackedZigZag(ranks, starts, 24)
    elif kind == "arbitrary":
        given = {"attention_mask": torch.rand(2, 1, 24, 24, device=device) < 0.2}

    def run(context):
        module._context = context
        parts = [
            order.by_rank(x).chunk(ranks)[context.rank] if packed else own(x, ranks, context.rank)
            for x in tensors
        ]
        said = module.explain(*parts, **given)
        return said, module(*parts, **given)

    named = emulate(ranks, served, run)
    for (said, out), (by_name, expected) in zip(emulate(ranks, "p2p", run), named, strict=True):
        assert said.startswith(served)
        assert f"{served} serves cp_comm_type 'p2p'; " in said
        assert by_name.startswith(served)
        assert "serves" not in by_name
        assert torch.equal(out, expected)
