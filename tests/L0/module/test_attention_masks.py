"""Masks of cross attention as one tensor, and masks beside cu_seqlens."""

import pytest
import torch
from attention_cases import (
    PATHS,
    B,
    D,
    G,
    H,
    build,
    check,
    exact_attention,
    hides,
    padding_masks,
    take_path,
    tensors,
)
from plain_transformer import HIDDEN, build_attention, build_layer
from torch.testing import assert_close

from apex_te import DotProductAttention
from apex_te.module.attention.places import padding_behind

path = pytest.fixture(params=PATHS)(take_path)
TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}


def starts(lengths, device="cpu"):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(torch.int32).to(device)


@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 9), (9, 5), (1, 6)])
@pytest.mark.parametrize("rows", ["all", "one", "shared"])
def test_one_tensor_in_cross_attention(kind, queries, keys, rows, path, device):
    """It hides scores: a query that it hides from all keys gives zeros, no other is padded."""
    module = build(device, H, D, G, attention_type="cross", attn_mask_type=kind)
    shape = {"all": (B, 1, queries, keys), "one": (B, 1, 1, keys), "shared": (1, 1, queries, keys)}
    mask = torch.rand(shape[rows]) < 0.4
    mask[0, 0, -1] = True
    lengths = [(queries, keys)] * B
    hidden = hides(kind, None, queries, keys, lengths) | mask
    check(module, tensors(queries, keys), hidden, "bshd", mask=mask)


@pytest.mark.parametrize("kind", ["padding_causal", "padding_causal_bottom_right", "padding"])
@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
@pytest.mark.parametrize("batch", [B, 1])
def test_padding_with_holes(kind, fmt, batch, path, device):
    """Anywhere in a sequence, and of a whole one; one mask for all."""
    module = build(device, H, D, G, attn_mask_type=kind)
    mask = torch.rand(batch, 1, 1, 19) < 0.4
    mask[-1] |= batch == B
    hidden = hides("causal" if "causal" in kind else "no_mask", None, 19, 19, None)
    check(module, tensors(19, 19), hidden | mask | mask.mT, fmt, mask=mask)


@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
def test_padded_tokens_do_not_matter(fmt, device):
    module = DotProductAttention(H, D, G, qkv_format=fmt, attn_mask_type="padding_causal")
    mask = torch.rand(B, 1, 1, 19, device=device) < 0.4
    shape = (19, B) if fmt == "sbhd" else (B, 19)
    padded = mask[:, 0, 0].t() if fmt == "sbhd" else mask[:, 0, 0]
    found = []
    for value in (0.0, float("nan")):
        torch.manual_seed(1)
        q, k, v = (torch.randn(*shape, n, D).to(device) for n in (H, G, G))
        parts = [x.masked_fill(padded[..., None, None], value).requires_grad_() for x in (q, k, v)]
        out = module(*parts, mask)
        grads = torch.autograd.grad(out.square().sum(), parts)
        assert not any(x[padded].any() for x in (out, *grads))
        found.append([out, *grads])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_layers_share_places_until_the_mask_changes(device):
    mask = torch.rand(B, 1, 1, 19, device=device) < 0.4
    first = padding_behind(mask, B, False)
    assert padding_behind(mask, B, False) is first
    assert not torch.equal(padding_behind(mask, B, True).closing, first.closing)
    mask.logical_not_()
    changed = padding_behind(mask, B, False)
    assert torch.equal(changed.closing, padding_behind(mask.clone(), B, False).closing)
    assert not torch.equal(changed.closing, first.closing)


def test_one_tensor_has_no_last_tokens(device):
    """Windows and bottom-right types count from tokens that such a mask does not name."""
    q, k = torch.randn(5, B, H, D, device=device), torch.randn(7, B, G, D, device=device)
    mask = torch.zeros(B, 1, 5, 7, dtype=torch.bool, device=device)
    module = DotProductAttention(H, D, G, attention_type="cross", attn_mask_type="padding")
    for options in ({"window_size": (2, 2)}, {"attn_mask_type": "padding_causal_bottom_right"}):
        with pytest.raises(ValueError, match=r"must be a tuple \(queries, keys\) with attn_mask"):
            module(q, k, k, mask, **options)


def test_decoder_takes_one_tensor(device):
    """As a tuple of padding masks, and as the mask of the scores that these amount to."""
    layer = build_layer(layer_type="decoder", device=device)
    x = torch.randn(5, 2, HIDDEN, device=device)
    memory = torch.randn(7, 2, HIDDEN, device=device)
    none, keys = padding_masks(5, 7, [(5, 4), (5, 7)])
    none, keys = none.to(device), keys.to(device)
    pair = layer(x, encoder_output=memory, enc_dec_attn_mask=(none, keys))
    for one in (keys, keys.expand(2, 1, 5, 7)):
        assert_close(layer(x, encoder_output=memory, enc_dec_attn_mask=one), pair, **TOLERANCE)
        arbitrary = layer(
            x, encoder_output=memory, enc_dec_attn_mask=one, enc_dec_attn_mask_type="arbitrary"
        )
        assert_close(arbitrary, pair, **TOLERANCE)
    attention = build_attention(attention_type="cross", attn_mask_type="padding", device=device)
    assert_close(attention(x, keys, memory), attention(x, (none, keys), memory), **TOLERANCE)


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("form", ["self", "pair", "scores"])
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_beside_cu_seqlens(kind, form, layout, path, device):
    """What either hides is hidden: the sequences' lengths, and more tokens of them."""
    lengths = [(3, 3), (6, 6)] if form == "self" else [(3, 5), (6, 2)]
    queries = max(q for q, _ in lengths)
    keys = max(k for _, k in lengths)
    spare = 2  # a mask may be longer than the longest packed sequence
    extents = (queries + spare, keys + spare) if layout == "thd" else (queries, keys)
    more = [torch.zeros(B, 1, 1, n, dtype=torch.bool) for n in extents]
    more[0][1, ..., 4:] = True  # queries 4 and 5 of the second sequence
    more[1][1, ..., 1:] = form != "self"
    cross = {"attention_type": "cross"} if form == "scores" else {}
    if form == "self":
        mask, kept = more[0], [(3, 3), (4, 4)]
    elif form == "pair":
        mask, kept = tuple(more), [(3, 5), (4, 1)]
    else:
        mask, kept = more[1], lengths
    if form == "scores" and kind == "padding_causal_bottom_right":
        kept = lengths  # its positions are those of the lengths
    hidden = hides(kind, None, queries, keys, kept)
    if form == "scores":
        hidden = hidden | more[1][..., :keys]
    q, k, v = tensors(queries, keys)
    module = DotProductAttention(H, D, G, qkv_format=layout, attn_mask_type=kind, **cross)
    expected = exact_attention(*(t.double() for t in (q, k, v)), hidden)
    cu = {"cu_seqlens_q": starts([n for n, _ in lengths], device)}
    if form != "self":
        cu["cu_seqlens_kv"] = starts([n for _, n in lengths], device)
    move = (lambda m: m.to(device)) if form != "pair" else lambda m: tuple(t.to(device) for t in m)
    if layout == "bshd":
        inputs = [t.transpose(1, 2).contiguous().to(device) for t in (q, k, v)]
        out = module(*inputs, move(mask), **cu).unflatten(2, (H, D)).transpose(1, 2)
        assert_close(out.cpu(), expected.float(), **TOLERANCE)
        return

    def packed(x, which):
        rows = [x[b, :, : pair[which]].transpose(0, 1) for b, pair in enumerate(lengths)]
        return torch.cat(rows).to(device)

    out = module(packed(q, 0), packed(k, 1), packed(v, 1), move(mask), **cu)
    assert_close(out.cpu(), packed(expected.float(), 0).cpu().flatten(1), **TOLERANCE)


def test_redundant_masks_change_nothing(device):
    """Masks that say again what cu_seqlens do; alone these take the kernel for packed sequences."""
    lengths = [5, 3]
    cu = starts(lengths, device)
    q = torch.randn(8, H, D, device=device, requires_grad=True)
    module = DotProductAttention(H, D, qkv_format="thd", attn_mask_type="padding_causal")
    mask = padding_masks(6, 6, [(n, n) for n in lengths])[0].to(device)
    found = []
    for each in (None, mask, (mask, mask)):
        out = module(q, q, q, each, cu_seqlens_q=cu)
        found.append((out, *torch.autograd.grad(out.square().sum(), q)))
    for some in found[1:]:
        for a, b in zip(some, found[0], strict=True):
            assert_close(a, b, rtol=1.3e-6, atol=1e-5)
    path = module.explain(q, q, q, mask, cu_seqlens_q=cu)
    assert path.startswith("padded: ")


def test_layer_of_packed_sequences_takes_a_mask(device):
    layer = build_layer(
        attn_input_format="thd", self_attn_mask_type="padding_causal", device=device
    )
    x, cu = torch.randn(8, HIDDEN, device=device), starts([5, 3], device)
    mask = padding_masks(5, 5, [(5, 5), (3, 3)])[0].to(device)
    out = layer(x, cu_seqlens_q=cu, max_seqlen_q=5)
    assert_close(layer(x, mask, cu_seqlens_q=cu, max_seqlen_q=5), out, **TOLERANCE)
    mask[0, ..., 3:] = True
    shorter = layer(x, mask, cu_seqlens_q=cu, max_seqlen_q=5)
    assert_close(shorter[:3], out[:3], **TOLERANCE)
    assert not torch.allclose(shorter[3:5], out[3:5])


def test_checkpointed_and_compiled(device):
    cu = starts([5, 3], device)
    q = torch.randn(8, H, D, device=device, requires_grad=True)
    module = DotProductAttention(H, D, qkv_format="thd", attn_mask_type="padding")
    mask = padding_masks(5, 5, [(4, 4), (3, 3)])[0].to(device)
    more = {"cu_seqlens_q": cu, "max_seqlen_q": 5}
    out = module(q, q, q, mask, **more)
    (dq,) = torch.autograd.grad(out.square().sum(), q)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for run, options in ((module, {"checkpoint_core_attention": True}), (compiled, {})):
        other = run(q, q, q, mask, **more, **options)
        assert_close(other, out, **TOLERANCE)
        assert_close(torch.autograd.grad(other.square().sum(), q)[0], dq, **TOLERANCE)


@pytest.mark.parametrize(
    ("layout", "kwargs", "error", "match"),
    [
        ("thd", {"attn_mask_type": "causal"}, ValueError, "must be None with qkv_format 'thd'"),
        ("thd", {"attn_mask_type": "no_mask"}, ValueError, "must be None with qkv_format 'thd'"),
        ("thd", {"mask": torch.zeros(2, 1, 1, 4, dtype=torch.bool)}, ValueError,
         r"query tokens must have shape \[2, 1, 1, 5\], got \[2, 1, 1, 4\]"),
        ("thd", {"mask": torch.zeros(2, 1, 1, 5)}, TypeError, "must be a bool tensor"),
        ("thd", {"mask": (torch.zeros(2, 1, 1, 5, dtype=torch.bool),) * 3}, ValueError,
         "must be a tensor or two"),
        ("bshd", {"attn_mask_type": "causal", "mask": None}, ValueError,
         "cu_seqlens_q and cu_seqlens_kv must be None with attn_mask_type 'causal'"),
    ],
)  # fmt: skip
def test_refusals(layout, kwargs, error, match):
    kwargs = dict(kwargs)
    mask = kwargs.pop("mask", torch.zeros(2, 1, 1, 5, dtype=torch.bool))
    module = DotProductAttention(H, D, qkv_format=layout, attn_mask_type="padding")
    q = torch.randn((8, H, D) if layout == "thd" else (2, 5, H, D))
    with pytest.raises(error, match=match):
        module(q, q, q, mask, cu_seqlens_q=starts([5, 3]), **kwargs)


def test_keys_alone_have_no_lengths():
    q = torch.randn(2, 5, H, D)
    module = DotProductAttention(H, D, qkv_format="bshd", attn_mask_type="padding")
    with pytest.raises(ValueError, match="cu_seqlens_q must be given"):
        module(q, q, q, cu_seqlens_kv=starts([5, 3]))
