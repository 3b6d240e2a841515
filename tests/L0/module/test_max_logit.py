"""``return_max_logit`` of DotProductAttention against scores written out in float64."""

import pytest
import torch
from attention_cases import B, D, H, hides, padding_masks, tensors
from checks import in_pairs

from apex_te.module.attention import max_logit
from apex_te.module.attention.alibi import standard_slopes
from apex_te.module.attention.dot_product import DotProductAttention

KINDS = ["no_mask", "padding", "causal", "padding_causal", "causal_bottom_right"]
KINDS += ["padding_causal_bottom_right", "arbitrary"]


@in_pairs(
    kind=KINDS,
    window=[None, (2, 0), (1, -1), (0, 2)],
    lengths=[(7, 7), (5, 9), (9, 5)],
    groups=[1, 2],
    bias=["no_bias", "post_scale_bias", "alibi"],
    fmt=["sbhd", "thd"],
    dtype=[torch.float32, torch.bfloat16],
    block=[2**26, 1],
)
def test_against_scores(
    kind, window, lengths, groups, bias, fmt, dtype, block, monkeypatch, device
):
    """By blocks of queries, with padded tokens, which do not count, and their values NaN."""
    monkeypatch.setattr(max_logit, "_MOST_SCORES", block)
    window = (window[0], 0) if window and "causal" in kind else window
    if fmt == "thd":
        kind = "padding" if kind == "arbitrary" else kind
        bias = "no_bias" if bias == "alibi" else bias  # whose distances test_alibi knows
    queries, keys = lengths
    module = DotProductAttention(
        H, D, groups, attn_mask_type=kind, window_size=window, qkv_format=fmt,
        softmax_scale=None if block > 1 else -0.3, softmax_type="learnable",
        return_max_logit=True, device=device,
    )  # fmt: skip
    valid = [(queries - 2, keys - 1), (queries, keys)]
    named = kind
    if fmt == "thd" and "padding" not in kind:
        named = {"no_mask": "padding"}.get(kind, f"padding_{kind}")
    hidden, given = hides(named, window, queries, keys, valid), {}
    q, k, v = tensors(queries, keys, groups, dtype)
    scores = q.double() @ k.double().repeat_interleave(H // groups, 1).mT * module.softmax_scale
    if bias != "no_bias":
        given["core_attention_bias_type"] = bias
    if bias == "post_scale_bias":
        added = torch.randn(1, H, queries, keys)
        scores = scores + added.to(dtype).double()
        given["core_attention_bias"] = added.to(device)
    elif bias == "alibi":
        ends = torch.tensor(valid)
        offset = (ends[:, 1] - ends[:, 0])[:, None, None] if "padding" in kind else keys - queries
        offset = 0 if kind in ("causal", "padding_causal") else offset
        apart = (torch.arange(queries)[:, None] + offset - torch.arange(keys)).abs()
        slopes = standard_slopes("", H, 1, None, torch.device("cpu"))[:, None, None]
        scores = scores - apart.expand(B, queries, keys)[:, None] * slopes
    if fmt == "thd":
        for name, i in (("q", 0), ("kv", 1)):
            cu = torch.tensor([0, valid[0][i], valid[0][i] + valid[1][i]], dtype=torch.int32)
            given[f"cu_seqlens_{name}"] = cu.to(device)
        given |= {"max_seqlen_q": queries, "max_seqlen_kv": keys}
        q, k, v = (
            torch.cat([x[i, :, : valid[i][n]].transpose(0, 1) for i in range(B)])
            for n, x in ((0, q), (1, k), (1, v))
        )
    else:
        if "padding" in kind:
            masks = padding_masks(queries, keys, valid)
            q, k = (x.masked_fill(m.mT, torch.nan) for x, m in zip((q, k), masks, strict=True))
            given["attention_mask"] = tuple(m.to(device) for m in masks)
        elif kind == "arbitrary":
            mask = torch.rand(B, H, queries, keys) < 0.4
            hidden = hidden | mask
            given["attention_mask"] = mask.to(device)
        q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    out, found = module(*(x.contiguous().to(device) for x in (q, k, v)), **given)
    assert out.shape[-1] == H * D
    assert (found.dtype, found.requires_grad) == (dtype, False)
    wanted = scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
    tolerance = 2e-6 if dtype is torch.float32 else 1e-2  # bf16: of q k^T, of its sum with a bias
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=tolerance, atol=tolerance)


def test_nothing_visible_and_recomputed(device):
    module = DotProductAttention(
        2, D, attn_mask_type="padding", return_max_logit=True, qkv_format="bshd"
    )
    q = torch.randn(1, 3, 2, D, device=device, requires_grad=True)
    mask = torch.ones(1, 1, 1, 3, dtype=torch.bool, device=device)
    assert module(q, q, q, mask)[1].eq(-torch.inf).all()
    runs = [module(q, q, q, ~mask, checkpoint_core_attention=again) for again in (False, True)]
    for out, _ in runs:
        out.sum().backward()
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_compiles(kind):
    module = DotProductAttention(2, D, attn_mask_type=kind, return_max_logit=True)
    q = torch.randn(5, 1, 2, D)
    mask = torch.tensor([[[[False, False, True, False, True]]]]) if kind == "padding" else None
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for x, y in zip(compiled(q, q, q, mask), module(q, q, q, mask), strict=True):
        torch.testing.assert_close(x, y)
