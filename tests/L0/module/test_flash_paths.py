"""The paths around PyTorch's flash kernel, on a CPU with a kernel that stands in for it."""

import pytest
import torch
from attention_cases import D, H, assert_matches, build, check, hides, padding_masks, tensors
from checks import in_pairs
from flash_stand_in import as_on_a_gpu

from apex_te.module.attention.alibi import Alibi, standard_slopes
from apex_te.module.attention.dot_product import DotProductAttention
from apex_te.module.attention.masks import MASK_TYPES

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch):
    with as_on_a_gpu(monkeypatch):
        yield


@in_pairs(
    kind=["no_mask", "causal_bottom_right", "padding", "padding_causal_bottom_right"],
    window=[None, (3, 0), (1, -1), (2, 4)],
    lengths=[(9, 9), (5, 12), (12, 5)],
    groups=[1, 2, H],
    value=[D, 4],
    fmt=["sbhd", "bshd"],
    alike=[True, False],
)
def test_windows_and_padding(kind, window, lengths, groups, value, fmt, alike):
    """Sequences of other lengths in one batch, one without queries or without keys."""
    if "causal" in kind and window:
        window = window[0], 0
    queries, keys = lengths
    alike = alike and queries == keys
    module = build(torch.device("cpu"), H, (D, value), groups, attn_mask_type=kind,
                   window_size=window, qkv_format=fmt)  # fmt: skip
    valid = [(queries - 3, queries - 3), (queries, keys)] if alike else [(2, 0), (queries, 3)]
    hidden, mask = hides(kind, window, queries, keys, valid), None
    if "padding" in kind:
        mask = padding_masks(queries, keys, valid)
        mask = mask[0] if alike else mask
    inputs = tensors(queries, keys, groups, HALF, value)
    check(module, inputs, hidden, fmt, mask=mask)
    shape = [x.transpose(1, 2) for x in inputs]
    found = module.explain(*shape, mask, qkv_format="bshd").partition(":")[0]
    if "padding" in kind:
        # Windows of one mask count padded tokens, too.
        assert found in (("sdpa", "softmax") if alike and window else ("packed",))
    elif window or (kind == "causal_bottom_right" and queries != keys):
        assert found == ("flash" if value == D else "widened")


@in_pairs(holes=["left", "anywhere"], kind=["padding", "padding_causal_bottom_right"])
def test_padded_tokens_do_not_count(holes, kind):
    """With NaN in them, wherever they are; gradients are 0 there."""
    module = DotProductAttention(H, D, 2, attn_mask_type=kind, qkv_format="bshd")
    mask = torch.rand(2, 1, 1, 12) < 0.4 if holes == "anywhere" else torch.arange(12) < 5
    mask = mask.expand(2, 1, 1, 12)
    q, k, v = (torch.randn(2, 12, n, D).to(HALF) for n in (H, 2, 2))
    padded = mask[:, 0, 0, :, None, None]
    leaves = [x.masked_fill(padded, torch.nan).requires_grad_() for x in (q, k, v)]
    found = module(*leaves, mask)
    grads = torch.autograd.grad(found.float().square().sum(), leaves)
    assert found[mask[:, 0, 0]].eq(0).all()
    for i in range(2):  # alone, each sequence is the tokens that are not padded
        kept = ~mask[i, 0, 0]
        alone = [x[i : i + 1, kept].requires_grad_() for x in (q, k, v)]
        kind_alone = "causal" if "causal" in kind else "no_mask"
        out = module(
            *alone, attn_mask_type=kind_alone, window_size=(20, -1 if kind == "padding" else 0)
        )
        wanted = torch.autograd.grad(out.float().square().sum(), alone)
        assert torch.equal(found[i, kept], out[0])
        for x, y in zip(grads, wanted, strict=True):
            assert torch.equal(x[i, kept], y[0])
            assert x[i, ~kept].eq(0).all()


@in_pairs(
    kind=["causal", "padding", "padding_causal_bottom_right"],
    value=[16, 24],
    sink=["vanilla", "learnable"],
    rest=[0, 3],
    cross=[False, True],
    known=[True, False],
)
def test_packed_sequences(kind, value, sink, rest, cross, known):
    """Each as if it were alone, of one of which only the device knows the end; 0 for the rest."""
    cross = (cross and "causal" not in kind) or kind == "padding_causal_bottom_right"
    lengths = [4, 0, 7, 3]
    key_lengths = [5, 2, 0, 9] if cross else lengths
    module = DotProductAttention(H, (24, value), 2, attn_mask_type=kind, qkv_format="thd",
                                 softmax_type=sink)  # fmt: skip
    shapes = ((sum(lengths), H, 24), (sum(key_lengths), 2, 24), (sum(key_lengths), 2, value))
    leaves = [torch.randn(n + rest, *shape).to(HALF).requires_grad_() for n, *shape in shapes]
    cu, cu_keys = (
        torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32)
        for each in (lengths, key_lengths)
    )
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu_keys if cross else cu}
    if known:
        given |= {"max_seqlen_q": 9, "max_seqlen_kv": 9}
    assert module.explain(*leaves, **given).split(":")[0] == (
        "varlen" if value == 24 else "widened"
    )
    out = module(*leaves, **given)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    at = key_at = 0
    for n, m in zip(lengths, key_lengths, strict=True):
        mine, other = slice(at, at + n), slice(key_at, key_at + m)
        at, key_at = at + n, key_at + m
        if not n or not m:
            assert out[mine].eq(0).all()
            assert all(x[s].eq(0).all() for x, s in zip(found, (mine, other, other), strict=True))
            continue
        runs = []
        for dtype in (torch.float64, HALF):
            alone = [
                x[s][None].detach().to(dtype).requires_grad_()
                for x, s in zip(leaves, (mine, other, other), strict=True)
            ]
            plain = DotProductAttention(H, (24, value), 2, qkv_format="bshd", softmax_type=sink)
            name = {"padding": "no_mask", "causal": "causal"}.get(kind, "causal_bottom_right")
            alone_out = plain.to(dtype)(*alone, attn_mask_type=name)
            runs.append(
                [alone_out, *torch.autograd.grad(alone_out, alone, grad[mine][None].to(dtype))]
            )
        parts = [out[mine], found[0][mine], found[1][other], found[2][other]]
        for x, wanted, same_dtype in zip(parts, *runs, strict=True):
            assert_matches(x.detach(), wanted[0].detach(), same_dtype[0].detach())
    for x, end in zip((out, *found), (at, at, key_at, key_at), strict=True):
        assert x[end:].eq(0).all()


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_dropout_in_windows_and_packed_sequences(fmt):
    """Backward drops what forward dropped: values of a unit matrix show the weights."""
    module = DotProductAttention(1, 32, attention_dropout=0.25, qkv_format=fmt, window_size=(9, 0))
    q, k = (torch.randn(32, 1, 32).to(HALF).requires_grad_() for _ in range(2))
    v = torch.eye(32)[:, None].to(HALF).requires_grad_()
    cu = torch.tensor([0, 12, 32], dtype=torch.int32)
    more = {"cu_seqlens_q": cu} if fmt == "thd" else {}

    def call(*inputs):
        out = module(*(x if more else x[None] for x in inputs), **more)
        return out if more else out[0]

    out = call(q, k, v)
    dropped = out.detach() == 0
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    module.eval()
    weights = call(q, k, v)
    keep = (~dropped).double() / 0.75
    seen = weights.detach() != 0
    assert 0.1 < (dropped & seen).sum() / seen.sum() < 0.4
    torch.testing.assert_close(out.double(), weights.double() * keep, rtol=1e-2, atol=1e-3)
    dv = (weights.double() * keep).mT @ grad.double()
    torch.testing.assert_close(found[2][:, 0].double(), dv, rtol=2e-2, atol=1e-2)
    (wanted,) = torch.autograd.grad(call(q, k, v), q, (grad * keep.to(HALF)), retain_graph=True)
    error = (found[0] - wanted).double().norm() / wanted.double().norm()
    assert error < 2e-2


@pytest.mark.cover(0)
@pytest.mark.parametrize(
    ("kind", "window", "value"),
    [("causal", (3, 0), 16), ("causal", (3, 0), 8), ("padding", None, 16), ("packed", None, 8)],
)
def test_compiles(kind, window, value):
    fmt = "thd" if kind == "packed" else "bshd"
    module = DotProductAttention(
        H, (16, value), 2, attn_mask_type="padding" if kind == "padding" else "causal",
        window_size=window, qkv_format=fmt, softmax_type="learnable",
    )  # fmt: skip
    shape = (9,) if fmt == "thd" else (2, 9)
    leaves = [torch.randn(*shape, n, d).to(HALF) for n, d in ((H, 16), (2, 16), (2, value))]
    leaves = [x.requires_grad_() for x in (*leaves, module.softmax_offset)]
    given = {}
    if fmt == "thd":
        given = {"cu_seqlens_q": torch.tensor([0, 3, 8], dtype=torch.int32), "max_seqlen_q": 5}
    elif kind == "padding":
        given = {"attention_mask": torch.rand(2, 1, 1, 9) < 0.3}
    found = []
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        out = call(*leaves[:3], **given)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


@in_pairs(
    kind=["causal", "causal_bottom_right", "padding_causal"],
    window=[None, (5, 0)],
    more_keys=[0, 6],
    groups=[1, H],
    slopes=["standard", "batch"],
    deterministic=[False, True],
)
def test_alibi_in_columns(kind, window, more_keys, groups, slopes, deterministic):
    queries = 33
    keys = queries + more_keys * ("bottom_right" in kind)
    module = build(torch.device("cpu"), H, 24, groups, attn_mask_type=kind, window_size=window)
    inputs = [torch.randn(2, n, s, 24).to(HALF) for n, s in ((H, queries), (groups, keys))]
    inputs.append(torch.randn_like(inputs[1]))
    hidden = hides(kind.removeprefix("padding_"), window, queries, keys, None)
    given, mask = {"core_attention_bias_type": "alibi"}, None
    if "padding" in kind:
        mask = torch.rand(2, 1, 1, keys) < 0.3
        hidden = hidden | mask | mask.mT
    known = standard_slopes("", H, 1, None, torch.device("cpu")).expand(2, H)
    if slopes == "batch":
        known = given["alibi_slopes"] = torch.rand(2, H)
    apart = torch.arange(keys) - torch.arange(queries)[:, None] - keys + queries
    constant = -known.double()[..., None, None] * apart.abs()
    torch.use_deterministic_algorithms(deterministic)
    try:
        check(module, inputs, hidden, "sbhd", mask=mask, constant=constant, **given)
        if not ("padding" in kind and window):
            found = module.explain(*(x.permute(2, 0, 1, 3) for x in inputs), mask, **given)
            assert found.startswith("alibi: ALiBi is 8 more columns")
    finally:
        torch.use_deterministic_algorithms(False)


def test_columns_are_exact():
    """Up to float32's roundings of a score, at the last of many keys."""
    keys = 2**16
    slopes = standard_slopes("", 12, 1, None, torch.device("cpu"))
    q, k = torch.zeros(1, 12, 1, 8, dtype=HALF), torch.zeros(1, 1, keys, 8, dtype=HALF)
    alibi = Alibi(MASK_TYPES["causal"], None)
    assert alibi.has_columns(slopes, HALF, keys)
    for other in ((slopes, HALF, keys + 1), (slopes, torch.float16, keys)):
        assert not alibi.has_columns(*other)
    q, k = (x[0].double() for x in alibi.columns(slopes, q, k, 128**-0.5))
    found = (q @ k.mT)[:, 0] * 128**-0.5
    wanted = slopes.double()[:, None] * torch.arange(keys)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)
