"""Padded tokens of split sequences, left out for the flash kernel, which a CPU's stands in for."""

import contextlib

import pytest
import torch
from checks import each_of
from emulated_ranks import emulate
from flash_stand_in import as_on_a_gpu

import apex_te
from apex_te.module.attention import places

HEADS, SIZE, BATCH = 4, 8, 3


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch, device):
    with as_on_a_gpu(monkeypatch) if device.type == "cpu" else contextlib.nullcontext():
        yield


def own(x, size, rank, dim=0):
    chunks = x.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim)


def joined(parts, dim=0):
    chunks = [chunk for part in parts for chunk in part.chunk(2, dim)]
    return torch.cat((*chunks[::2], *reversed(chunks[1::2])), dim)


def padding(holes, tokens):
    """Mask [b, 1, 1, s] that hides all tokens of the second sequence and none of the last."""
    mask = torch.zeros(BATCH, 1, 1, tokens, dtype=torch.bool)
    mask[1] = True
    generator = torch.Generator().manual_seed(tokens)
    mask[0] = {
        "right": torch.arange(tokens) >= tokens - 7,
        "left": torch.arange(tokens) < 9,
        "a chunk": (torch.arange(tokens) >= 4) & (torch.arange(tokens) < 12),
        "anywhere": torch.rand(tokens, generator=generator) < 0.4,
    }[holes]
    return mask


def results(module, tensors, grad, mask):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = module(*leaves, mask)
    out = out if isinstance(out, tuple) else (out, None)
    out[0].backward(grad)
    return [out[0].detach(), *(x.grad for x in leaves), out[1]]


@each_of(
    size=[2, 4],
    kind=["padding", "padding_causal", "padding_causal_bottom_right", "cross"],
    holes=["right", "left", "a chunk", "anywhere"],
    groups=[1, 2, HEADS],
    value=[SIZE, 4],
    layout=["sbhd", "bshd"],
    sink=["vanilla", "off-by-one"],
    with_max=[False, True],
)
def test_results_are_those_of_one_rank(
    size, kind, holes, groups, value, layout, sink, with_max, device
):
    """With other values in padded tokens; one rank computes in float64 by a mask."""
    queries, keys, dim = 32, 48 if kind == "cross" else 32, layout.index("s")
    mask = padding(holes, keys).to(device)
    both = (padding("left", queries).to(device), mask) if kind == "cross" else (mask, mask)
    module = apex_te.DotProductAttention(
        HEADS, (SIZE, value), groups, qkv_format=layout, softmax_type=sink,
        attn_mask_type="padding" if kind == "cross" else kind, return_max_logit=with_max,
        attention_type="cross" if kind == "cross" else "self",
    )  # fmt: skip
    torch.manual_seed(0)
    shapes = ((queries, HEADS, SIZE), (keys, groups, SIZE), (keys, groups, value))
    drawn = [torch.randn(n, BATCH, *rest).to(device, torch.bfloat16) for n, *rest in shapes]
    grad = torch.randn(queries, BATCH, HEADS * value).to(device, torch.bfloat16)
    padded = [m.expand(BATCH, 1, 1, -1)[:, 0, 0].t()[..., None, None] for m in (*both, both[1])]
    wide = [
        x.masked_fill(m, 0.0).double().transpose(0, dim) for x, m in zip(drawn, padded, strict=True)
    ]
    drawn = [x.masked_fill(m, 1e4).transpose(0, dim) for x, m in zip(drawn, padded, strict=True)]
    grad = grad.transpose(0, dim)
    given = both if kind == "cross" else mask
    exact = results(module, wide, grad.double(), given)
    one = results(module, drawn, grad, given)

    def run(ranks):
        module._context = ranks
        parts = [own(x, size, ranks.rank, dim) for x in (*drawn, grad)]
        name, _, reason = module.explain(*parts[:3], given).partition(": ")
        assert name == "all_gather packed", (name, reason)
        assert f"in {1 + ('causal' in kind)} call" in reason
        return results(module, parts[:-1], parts[-1], given)

    *found, largest = zip(*emulate(size, "all_gather", run), strict=True)
    for parts, x, y in zip(found, one, exact[:4], strict=False):
        z = joined(parts, dim).double()
        assert z.isfinite().all()
        # Twice one rank's rounding: gradients of keys are sums over ranks.
        error = (x.double() - y).abs().max() + 2**-8 * y.abs().max()
        assert (z - y).abs().max() <= 2 * error
    if with_max:
        for each in largest:
            torch.testing.assert_close(each.double(), exact[4], rtol=2e-2, atol=2e-2)


def test_layers_share_the_places_of_tokens(device, monkeypatch):
    """A mask is sorted once for all layers, and anew after a change."""
    sorted_, sort = [], places._without_padding

    def counted(*args):
        sorted_.append(args)
        return sort(*args)

    monkeypatch.setattr(places, "_without_padding", counted)
    places._made.clear()
    module = apex_te.DotProductAttention(HEADS, SIZE, attn_mask_type="padding_causal")
    x = torch.randn(16, BATCH, HEADS, SIZE).to(device, torch.bfloat16)
    mask = padding("left", 32).to(device)

    def layers(ranks):
        module._context = ranks
        out = [module(x, x, x, mask) for _ in range(3)]
        return out[0]

    for _ in range(2):
        sorted_.clear()
        emulate(2, "all_gather", lambda ranks: layers(ranks) if ranks.rank else x)
        assert len(sorted_) == 4  # queries and keys of two chunks
        mask[2, ..., -1] = True


@pytest.mark.parametrize("kind", ["padding_causal", "padding"])
def test_other_masks_are_masks_of_scores(kind, device):
    """A window counts padded tokens, and masks of queries and keys may end a chunk elsewhere."""
    x = torch.randn(16, BATCH, HEADS, SIZE).to(device, torch.bfloat16)
    mask, other = (padding(holes, 32).to(device) for holes in ("left", "right"))
    module = apex_te.DotProductAttention(HEADS, SIZE, attn_mask_type=kind)

    def run(ranks):
        module._context = ranks
        window = (3, 0 if "causal" in kind else 3)
        found = [module.explain(x, x, x, mask, window_size=window)]
        if "causal" in kind:
            found.append(module.explain(x, x, x, (mask, other)))
        assert not any(each.startswith("all_gather packed") for each in found)
        return x

    emulate(2, "all_gather", run)
