"""ALiBi against attention written out with its bias."""

import math

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
from apex_te.module.attention.alibi import standard_slopes
from apex_te.module.attention.inference_params import InferenceParams

path = pytest.fixture(params=PATHS)(take_path)
TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}
ALIBI = {"core_attention_bias_type": "alibi"}


def paper_slopes(heads):
    """The recursion of the paper's own code."""
    if math.log2(heads).is_integer():
        first = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [first * first**i for i in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return paper_slopes(power) + paper_slopes(2 * power)[0::2][: heads - power]


def bias_of(kind, slopes, queries, keys, lengths):
    """Plain statement: [b, h, queries, keys]."""
    bias = torch.zeros(B, slopes.shape[-1], queries, keys, dtype=torch.float64)
    for b in range(B):
        q_length, k_length = lengths[b] if "padding" in kind else (queries, keys)
        offset = 0 if kind in ("causal", "padding_causal") else k_length - q_length
        apart = (torch.arange(queries)[:, None] + offset - torch.arange(keys)).abs()
        of_batch = slopes if slopes.dim() == 1 else slopes[b]
        bias[b] = -of_batch.double()[:, None, None] * apart
    return bias


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20, 40, 64])
def test_standard_slopes(heads, device):
    slopes = standard_slopes("test", heads, 1, None, device)
    expected = torch.tensor(paper_slopes(heads), dtype=torch.float64)
    assert_close(slopes.cpu().double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    "kind",
    ["no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "arbitrary",
     "padding_causal_bottom_right"],
)  # fmt: skip
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 9), (9, 5), (1, 6)])
@pytest.mark.parametrize("slopes", ["standard", "head", "batch"])
def test_mask_types(kind, queries, keys, slopes, path, device):
    module = build(device, H, D, G, attn_mask_type=kind)
    lengths = [(max(queries - 2, 1), keys - 1), (queries, keys)]
    mask = padding_masks(queries, keys, lengths) if "padding" in kind else None
    hidden = hides(kind, None, queries, keys, lengths)
    if kind == "arbitrary":
        mask = hidden = torch.rand(B, H, queries, keys) < 0.4
    given = {"standard": None, "head": torch.rand(H), "batch": torch.rand(B, H)}[slopes]
    known = torch.tensor(paper_slopes(H)) if given is None else given
    constant = bias_of(kind, known, queries, keys, lengths)
    more = {} if given is None else {"alibi_slopes": given.to(device)}
    check(
        module,
        tensors(queries, keys),
        hidden,
        "sbhd",
        mask=mask,
        constant=constant,
        **more,
        **ALIBI,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [G, H])
def test_half_precision(dtype, groups, path, device):
    """The bias is rounded to the dtype of the scores, as given biases are."""
    module = build(device, H, D, groups)
    constant = bias_of("causal", torch.tensor(paper_slopes(H)), 33, 33, None).to(dtype)
    hidden = hides("causal", None, 33, 33, None)
    check(module, tensors(33, 33, groups, dtype), hidden, "bshd", constant=constant, **ALIBI)


def test_window(path, device):
    module = build(device, H, D, G, window_size=(3, 0))
    constant = bias_of("causal", torch.tensor(paper_slopes(H)), 9, 9, None)
    hidden = hides("causal", (3, 0), 9, 9, None)
    check(module, tensors(9, 9), hidden, "bshd", constant=constant, **ALIBI)


@pytest.mark.parametrize("kind", ["causal", "padding", "padding_causal_bottom_right"])
@pytest.mark.parametrize("slopes", ["standard", "batch"])
def test_packed_sequences_are_as_alone(kind, slopes, device):
    lengths = [(3, 5), (6, 2)] if kind != "causal" else [(3, 3), (6, 6)]
    module = DotProductAttention(H, D, G, qkv_format="thd", attn_mask_type=kind)
    q = torch.randn(9, H, D, device=device)
    k = torch.randn(sum(n for _, n in lengths), G, D, device=device)
    counts = [[pair[i] for pair in lengths] for i in range(2)]
    cu = [torch.tensor([0, a, a + b], dtype=torch.int32, device=device) for a, b in counts]
    given = torch.rand(2, H, device=device) if slopes == "batch" else None
    out = module(q, k, k, None, None, *cu, alibi_slopes=given, **ALIBI)
    known = torch.tensor(paper_slopes(H)) if given is None else given.cpu()
    expected = []
    for i, (a, b) in enumerate(zip(q.split(counts[0]), k.split(counts[1]), strict=True)):
        heads = [t.cpu().double().transpose(0, 1)[None].expand(B, -1, -1, -1) for t in (a, b, b)]
        pair = (a.shape[0], b.shape[0])
        hidden = hides(kind, None, *pair, [pair] * B)
        of_sequence = known if known.dim() == 1 else known[i]
        bias = bias_of(kind, of_sequence, *pair, [pair] * B)
        exact = exact_attention(*heads, hidden, None, bias)[0]
        expected.append(exact.transpose(0, 1).flatten(1))
    assert_close(out.cpu(), torch.cat(expected).float(), **TOLERANCE)


@pytest.mark.parametrize("groups", [G, H])
@pytest.mark.parametrize("alone", [True, False])
def test_slopes_learn(device, groups, alone):
    """Slopes that require a gradient get one, with and without recomputing; also they alone."""
    slopes = torch.rand(H, dtype=torch.float64, requires_grad=True)
    q, k, v = (t.double() for t in tensors(7, 7))
    k, v = (t[:, :1].expand(-1, groups, -1, -1) for t in (k, v))
    constant = bias_of("causal", torch.ones(H), 7, 7, None)
    hidden = hides("causal", None, 7, 7, None)
    out = exact_attention(q, k, v, hidden, None, constant * slopes[:, None, None])
    (expected,) = torch.autograd.grad(out.square().sum(), slopes)
    module = DotProductAttention(H, D, groups, qkv_format="bshd")
    for again in (False, True):
        own = slopes.detach().float().to(device).requires_grad_()
        heads = [t.transpose(1, 2).float().to(device) for t in (q, k, v)]
        heads[0].requires_grad_(not alone)
        found = module(*heads, alibi_slopes=own, checkpoint_core_attention=again, **ALIBI)
        (grad,) = torch.autograd.grad(found.square().sum(), own)
        assert_close(grad.cpu(), expected.float(), rtol=1e-4, atol=1e-5)


def test_layer_and_cache(device):
    """Token by token with kept keys and values as all at once; not as without ALiBi."""
    layer = build_layer(layer_number=1, device=device).eval()
    x = torch.randn(5, 2, HIDDEN, device=device)
    out = layer(x, **ALIBI)
    assert not torch.allclose(out, layer(x))
    slopes = torch.tensor(paper_slopes(4), device=device)
    assert_close(layer(x, alibi_slopes=slopes, **ALIBI), out, **TOLERANCE)
    params, steps = InferenceParams(2, 5), []
    with torch.no_grad():
        for token in x.split(1):
            steps.append(layer(token, inference_params=params, **ALIBI))
            params.sequence_len_offset += 1
    assert_close(torch.cat(steps), out, **TOLERANCE)


@pytest.mark.long
def test_compiles():
    module = build_attention(qkv_format="bshd")
    x = torch.randn(2, 7, HIDDEN, requires_grad=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found = []
    for each in (module, compiled):
        out = each(x, **ALIBI)
        found.append((out, *torch.autograd.grad(out.square().sum(), x)))
    for a, b in zip(*found, strict=True):
        assert_close(a, b, **TOLERANCE)


def test_refusals():
    x = torch.randn(4, 2, H, D)
    module = DotProductAttention(H, D)
    slopes = torch.rand(H)
    with pytest.raises(ValueError, match="alibi_slopes must be None unless"):
        module(x, x, x, alibi_slopes=slopes)
    with pytest.raises(ValueError, match="core_attention_bias must be given unless"):
        module(x, x, x, core_attention_bias=torch.zeros(1, 1, 4, 4), **ALIBI)
    with pytest.raises(ValueError, match=r"must have shape \[4\] or \[2, 4\], got \[3\]"):
        module(x, x, x, alibi_slopes=slopes[:3], **ALIBI)
    with pytest.raises(TypeError, match=r"must be a floating-point tensor, got torch.int64"):
        module(x, x, x, alibi_slopes=slopes.long(), **ALIBI)
    with pytest.raises(TypeError, match="must be a floating-point tensor, got list"):
        module(x, x, x, alibi_slopes=[0.5] * H, **ALIBI)
    split = DotProductAttention(2 * H, D, tp_size=2)
    with pytest.raises(ValueError, match="alibi_slopes must be given with heads split over 2"):
        split(x, x, x, **ALIBI)
    assert split(x, x, x, alibi_slopes=slopes, **ALIBI).shape == (4, 2, H * D)
