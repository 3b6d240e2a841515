"""Attention with sequences split over ranks, against one rank that has them whole."""

import itertools

import pytest
import torch
from on_rank import all_equal, assert_told, device_of, dtype_of, told
from rank_sets import ranks_of
from torch import distributed

import apex_te

HEADS, SIZE, BATCH, TOKENS = 4, 8, 2, 32
# Mask types and windows.
MASKS = {
    "causal": ("causal", None),
    "all": ("no_mask", None),
    "window": ("causal", (5, 0)),
    "wide_window": ("causal", (13, 0)),
    "both_sides": ("no_mask", (3, 6)),
    "left": ("no_mask", (6, -1)),
    "padding": ("padding", None),
    "padding_causal": ("padding_causal", None),
    "padding_window": ("padding_causal", (5, 0)),
}
SINKS = ("vanilla", "off-by-one", "learnable")
# Lengths of packed sequences with and without their padding, which 8 divides.
LENGTHS, ROOMS = (7, 16, 0, 21, 1), (8, 16, 8, 24, 8)


def _ends(lengths, device):
    ends = [0, *itertools.accumulate(lengths)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _inputs(shape, groups, device, dtype=None):
    """Queries, keys, values and a gradient, rounded as the device computes, in ``dtype``."""
    generator = torch.Generator().manual_seed(5)
    lead = shape[:-2]
    sizes = ((HEADS, SIZE), (groups, SIZE), (groups, SIZE), (HEADS * SIZE,))
    drawn = [
        torch.randn(*lead, *n, generator=generator).to(device, dtype_of(device)) for n in sizes
    ]
    drawn = drawn if dtype is None else [x.to(dtype) for x in drawn]
    return [x.requires_grad_() for x in drawn[:3]], drawn[3]


def _module(mask, groups, sink, layout, device, **options):
    kind, window = MASKS[mask]
    module = apex_te.DotProductAttention(
        HEADS, SIZE, groups, qkv_format=layout, attn_mask_type=kind, window_size=window,
        softmax_type=sink, device=device, **options,
    )  # fmt: skip
    if sink == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(torch.linspace(-1.0, 1.5, HEADS))
    return module


def _options(mask, layout, device):
    """Arguments of a call that are about whole sequences."""
    if layout != "thd":
        if "padding" not in mask:
            return {}
        padded = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.bool, device=device)
        padded[0, ..., 27:] = padded[1, ..., :2] = padded[1, ..., 9:11] = True
        return {"attention_mask": padded}
    return {
        "cu_seqlens_q": _ends(LENGTHS, device),
        "cu_seqlens_q_padded": _ends(ROOMS, device),
        "max_seqlen_q": max(LENGTHS),
    }


def _results(module, tensors, grad, options):
    """Output and gradients; those of parameters last."""
    module.zero_grad()
    out = module(*tensors, **options)
    out.backward(grad)
    found = [out.detach(), *(x.grad for x in tensors)]
    return [*found, *(p.grad for p in module.parameters())]


def _sums_of_terms(module, tensors, grad, out, options):
    """Sums over tokens of the magnitudes of the terms of a sink's gradient, the largest of a head.

    A term is the sink's weight, which is what the keys' weights leave of 1, times grad . out.
    """
    q, k, v = (x.detach() for x in tensors)
    heads = (*q.shape[:-2], HEADS, SIZE)
    kept = module(q, k, torch.ones_like(v), **options).view(heads)[..., 0]
    terms = (1 - kept) * (grad * out).view(heads).sum(-1)
    return terms.abs().flatten(0, -2).sum(0).max().detach()


def _case(mask, groups, sink, layout, device, comm_type, group):
    """(this rank's share of results joined, one rank's results, those in float64, their sizes)."""
    dim = {"sbhd": 0, "bshd": 1, "thd": 0}[layout]
    shape = {"sbhd": (TOKENS, BATCH), "bshd": (BATCH, TOKENS), "thd": (sum(ROOMS) + 8,)}[layout]
    options = _options(mask, layout, device)
    cu = options.get("cu_seqlens_q_padded")
    found = []
    for dtype in (None, torch.float64):
        tensors, grad = _inputs((*shape, HEADS, SIZE), groups, device, dtype)
        module = _module(mask, groups, sink, layout, device)
        found.append(_results(module, tensors, grad, options))
    found.append([x.abs().max() for x in found[-1]])
    if len(found[-1]) > 4:  # terms of both signs: their sum may be far smaller than its roundings
        found[-1][4] = _sums_of_terms(module, tensors, grad, found[1][0], options)
    tensors, grad = _inputs((*shape, HEADS, SIZE), groups, device)
    split = apex_te.split_for_context_parallel
    own = [split(x.detach(), group, dim, cu).requires_grad_() for x in tensors]
    module = _module(mask, groups, sink, layout, device)
    module.set_context_parallel_group(group, None, None, comm_type)
    *local, offset = (*_results(module, own, split(grad, group, dim, cu), options), None)[:5]
    joined = [apex_te.join_context_parallel(x, group, dim, cu) for x in local]
    if offset is not None:
        for each in group if isinstance(group, list) else [group]:
            distributed.all_reduce(offset, group=each)
        joined.append(offset)
    return joined, *found


def _compare(rank, layout, comm_type, masks):
    """The cases that differ: those by a2a in a bit, others by more than one rank's roundings."""
    device, group = device_of(rank), distributed.group.WORLD
    if comm_type == "a2a+p2p":
        pairs = [distributed.new_group([r, r + 1]) for r in (0, 2)]
        others = [distributed.new_group([r, r + 2]) for r in (0, 1)]
        group = [pairs[rank // 2], others[rank % 2]]
    size, wrong = distributed.get_world_size(), []
    for mask, groups, sink in itertools.product(masks, (1, 2, 4), SINKS):
        joined, one, exact, sizes = _case(mask, groups, sink, layout, device, comm_type, group)
        # Some kernels of GPUs add up gradients in any order.
        same = 1 if device.type == "cuda" or groups % size else len(joined)
        if comm_type == "a2a" and not all_equal(joined[:same], one[:same]):
            wrong.append((mask, groups, sink, "bits"))
        names = "oqkvs"[: len(one)]
        for name, x, y, z, largest in zip(names, joined, one, exact, sizes, strict=True):
            eps = torch.finfo(joined[0].dtype).eps
            bound = 2 * (y - z).abs().max() + 4 * eps * largest
            if not (x - z).abs().max() <= bound:
                wrong.append((mask, groups, sink, name, float((x - z).abs().max() / bound)))
    return wrong


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("comm_type", ["all_gather", "a2a", "p2p"])
def test_results_are_those_of_one_rank(ranks, comm_type, layout):
    masks = [m for m in MASKS if layout != "thd" or m not in ("both_sides", "left")]
    assert ranks.run(_compare, layout, comm_type, masks) == [[]] * ranks.size


@pytest.mark.cuda
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
def test_results_on_gpus(all_ranks, size, comm_type, layout):
    masks = [m for m in MASKS if layout != "thd" or m not in ("both_sides", "left")]
    found = ranks_of(all_ranks, size, "nccl").run(_compare, layout, comm_type, masks)
    assert found == [[]] * size


def _captured(rank, comm_type, layout):
    """Whether a replay with new values has eager's bits; the host never waits for the device."""
    device, group = device_of(rank), distributed.group.WORLD
    module = _module("causal", 2, "learnable", layout, device)
    module.set_context_parallel_group(group, None, None, comm_type)
    size = distributed.get_world_size()
    shape = (sum(ROOMS) // size,) if layout == "thd" else (64, 1)
    options = _options("causal", layout, device)
    inputs, grad = _inputs((*shape, HEADS, SIZE), 2, device)
    own = [x.detach() for x in inputs]

    def run():
        leaves = [x.detach().requires_grad_() for x in own]
        out = module(*leaves, **options)
        return out, *torch.autograd.grad(out, [*leaves, module.softmax_offset], grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run()
    for x in own:
        x.mul_(0.5)
    graph.replay()
    return torch.equal(found[0], run()[0]), [bool(x.isfinite().all()) for x in found]


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["sbhd", "thd"])
@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
def test_graphs_replay_without_a_wait_of_the_host(two_gpus, comm_type, layout):
    assert two_gpus.run(_captured, comm_type, layout) == [(True, [True] * 5)] * 2


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_keys_gathered_in_two_stages(four_ranks, layout):
    masks = ["causal", "all", "padding_window"] if layout == "sbhd" else ["causal", "window"]
    assert four_ranks.run(_compare, layout, "a2a+p2p", masks) == [[]] * 4


WIDTH = HEADS * SIZE


def _layer(layout, device, package=apex_te):
    torch.manual_seed(2)
    kind = "padding_causal" if layout == "thd" else "causal"
    return package.TransformerLayer(
        WIDTH, 2 * WIDTH, HEADS, num_gqa_groups=2, attn_input_format=layout, hidden_dropout=0.0,
        attention_dropout=0.0, self_attn_mask_type=kind, device=device,
    )  # fmt: skip


def _layers_alike(rank, layout, comm_type, package):
    """Largest differences of output and gradients, relative to the largest value."""
    device, group = device_of(rank), distributed.group.WORLD
    if package == "alias":
        import apex_te.integrations.te_alias as te_alias

        te_alias.install()
        import transformer_engine.pytorch as package
    else:
        package = apex_te
    layer = _layer(layout, device, package)
    dim = {"sbhd": 0, "bshd": 1, "thd": 0}[layout]
    shape = {"sbhd": (TOKENS, BATCH), "bshd": (BATCH, TOKENS), "thd": (sum(ROOMS),)}[layout]
    options = {"rotary_pos_emb": apex_te.RotaryPositionEmbedding(SIZE, device=device)(40)}
    cu = None
    if layout == "thd":
        options |= _options("padding_causal", layout, device)
        cu = options["cu_seqlens_q_padded"]
    generator = torch.Generator().manual_seed(6)
    x, grad = (torch.randn(*shape, WIDTH, generator=generator).to(device) for _ in range(2))
    if cu is not None:  # the layer's other parts also compute what belongs to no sequence
        place = torch.arange(len(grad), device=device)
        own = torch.searchsorted(cu, place, right=True) - 1
        grad[place - cu[own] >= options["cu_seqlens_q"].diff()[own]] = 0.0
    one = _results(layer, [x.requires_grad_()], grad, options)
    layer.set_context_parallel_group(
        group, distributed.get_process_group_ranks(group), None, comm_type
    )
    split = apex_te.split_for_context_parallel
    own = split(x.detach(), group, dim, cu).requires_grad_()
    found = _results(layer, [own], split(grad, group, dim, cu), options)
    for each in found[2:]:
        distributed.all_reduce(each)
    tokens = [apex_te.join_context_parallel(each, group, dim, cu) for each in found[:2]]
    if cu is not None:
        one[0], tokens[0] = (
            out * (grad != 0.0).any(-1, keepdim=True) for out in (one[0], tokens[0])
        )
    pairs = zip([*tokens, *found[2:]], one, strict=True)
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs]


@pytest.mark.parametrize("package", ["own", "alias"])
@pytest.mark.parametrize("comm_type", ["all_gather", "a2a", "p2p"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_a_layer_with_rotary_embedding(ranks, layout, comm_type, package):
    for found in ranks.run(_layers_alike, layout, comm_type, package):
        assert max(found) < 3e-6  # sums of fp32 in another order


def _again(rank, comm_type, how):
    """Bits of a call with attention recomputed or compiled, beside those of a plain one."""
    device, group = device_of(rank), distributed.group.WORLD
    module = _module("causal", 2, "learnable", "sbhd", device)
    module.set_context_parallel_group(group, None, None, comm_type)
    tensors, grad = _inputs((TOKENS // 2, BATCH, HEADS, SIZE), 2, device)
    plain = _results(module, tensors, grad, {})
    for x in tensors:
        x.grad = None
    if how == "recomputed":
        return all_equal(
            _results(module, tensors, grad, {"checkpoint_core_attention": True}), plain
        )
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    return all_equal(_results(compiled, tensors, grad, {}), plain)


@pytest.mark.parametrize("how", ["recomputed", "compiled"])
@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
def test_recomputed_and_compiled_attention_has_the_same_bits(two_ranks, comm_type, how):
    assert two_ranks.run(_again, comm_type, how) == [True, True]


def _batch(rank):
    from apex_te.integrations.transformer_engine.pytorch.attention.dot_product_attention import (
        context_parallel,
    )

    ids, cu = torch.arange(24)[None], torch.tensor([0, 8, 12, 24])
    split = context_parallel.get_batch_on_this_cp_rank
    found = split(cu, ids, -ids, ids[0] * 2, distributed.group.WORLD)
    assert torch.equal(found[0], -found[1])
    assert torch.equal(found[0][0] * 2, found[2])
    return found[0].tolist()


def test_a_packed_batch_is_split_under_the_alias(two_ranks):
    first = [0, 1, 6, 7, 8, 11, 12, 13, 14, 21, 22, 23]
    second = [2, 3, 4, 5, 9, 10, 15, 16, 17, 18, 19, 20]
    assert two_ranks.run(_batch) == [[first], [second]]


def _told(rank):
    group, device = distributed.group.WORLD, device_of(rank)
    make = apex_te.DotProductAttention
    x = torch.randn(4, 1, 6, 8, device=device)
    both = make(6, 8, cp_group=group, cp_comm_type="a2a")
    ring = make(6, 8, cp_group=group)
    gathers = make(6, 8, cp_group=group, cp_comm_type="all_gather")
    alibi = {"core_attention_bias_type": "alibi"}
    layer = apex_te.MultiheadAttention(48, 6, attention_dropout=0.0, device=device)
    layer.set_context_parallel_group(group)
    cu = torch.tensor([0, 6, 8], dtype=torch.int32, device=device)
    return [
        both.explain(x, x, x),
        ring.explain(x, x, x),
        told(make(6, 8, cp_group=group, attention_dropout=0.1), x, x, x),
        told(both, x[:3], x[:3], x[:3]),
        told(make(3, 8, cp_group=group, cp_comm_type="a2a"), *(x[:, :, :3],) * 3),
        told(gathers, x, x, x, **alibi),
        told(ring, x[:, 0], x[:, 0], x[:, 0], None, "thd", cu),
        told(make, 6, 8, cp_group=3),
        told(make, 6, 8, cp_group=[group, group]),
        told(layer, x[..., 0, :].repeat(1, 1, 6), inference_params=apex_te.InferenceParams(1, 8)),
    ]


def test_explanations_and_refusals(two_ranks):
    expected = [
        "a2a sdpa: each of 2 ranks has 3 heads of whole sequences; PyTorch's fused kernel",
        "all_gather sdpa: all_gather serves cp_comm_type 'p2p'; each rank attends to the keys of 2",
        "NotImplementedError: DotProductAttention: attention_dropout must be 0 while training",
        "ValueError: DotProductAttention: query_layer must have two equal chunks of each sequence",
        "ValueError: DotProductAttention: num_attention_heads must be a multiple of the 2 ranks",
        "NotImplementedError: DotProductAttention: core_attention_bias_type must not be 'alibi'",
        "ValueError: DotProductAttention: cu_seqlens_q must have sequences of multiples of 4 tok",
        "TypeError: DotProductAttention: cp_group must be a torch.distributed.ProcessGroup",
        "ValueError: DotProductAttention: cp_group must be one group, or a list of two",
        "NotImplementedError: MultiheadAttention: inference_params must be None with a cp_group",
    ]
    for found in two_ranks.run(_told):
        assert_told(found, expected)
