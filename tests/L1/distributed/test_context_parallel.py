"""Attention with sequences split over ranks, against one rank that has them whole."""

import itertools

import pytest
import torch
from on_rank import all_equal, device_of
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


def _inputs(shape, groups, device, dtype):
    generator = torch.Generator().manual_seed(5)
    lead = shape[:-2]
    sizes = ((HEADS, SIZE), (groups, SIZE), (groups, SIZE), (HEADS * SIZE,))
    drawn = [torch.randn(*lead, *size, generator=generator).to(device, dtype) for size in sizes]
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


def _case(mask, groups, sink, layout, device, comm_type, group, size):
    """(this rank's share of results joined, one rank's results, those in float64)."""
    dim = {"sbhd": 0, "bshd": 1, "thd": 0}[layout]
    shape = {"sbhd": (TOKENS, BATCH), "bshd": (BATCH, TOKENS), "thd": (sum(ROOMS) + 8,)}[layout]
    options = _options(mask, layout, device)
    cu = options.get("cu_seqlens_q_padded")
    found = []
    for dtype in (torch.float32, torch.float64):
        tensors, grad = _inputs((*shape, HEADS, SIZE), groups, device, dtype)
        module = _module(mask, groups, sink, layout, device)
        found.append(_results(module, tensors, grad, options))
    tensors, grad = _inputs((*shape, HEADS, SIZE), groups, device, torch.float32)
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
        joined, one, exact = _case(mask, groups, sink, layout, device, comm_type, group, size)
        same = len(joined) if groups % size == 0 else 2
        if comm_type == "a2a" and not all_equal(joined[:same], one[:same]):
            wrong.append((mask, groups, sink, "bits"))
        for name, x, y, z in zip("oqkvs"[: len(one)], joined, one, exact, strict=True):
            bound = 2 * (y - z).abs().max() + 4 * torch.finfo(y.dtype).eps * z.abs().max()
            if not (x - z).abs().max() <= bound:
                wrong.append((mask, groups, sink, name, float((x - z).abs().max() / bound)))
    return wrong


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("comm_type", ["all_gather", "a2a", "p2p"])
def test_results_are_those_of_one_rank(ranks, comm_type, layout):
    masks = [m for m in MASKS if layout != "thd" or m not in ("both_sides", "left")]
    assert ranks.run(_compare, layout, comm_type, masks) == [[]] * ranks.size
