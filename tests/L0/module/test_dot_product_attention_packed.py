"""DotProductAttention over packed sequences (thd): each as if it were alone."""

import pytest
import torch
from attention_cases import assert_matches, exact_attention
from checks import DTYPES, needs_cuda

from apex_te.module.attention.candidates import Options, Path
from apex_te.module.attention.dot_product import DotProductAttention
from apex_te.module.attention.masks import MASK_TYPES
from apex_te.module.attention.packed import attend_packed, packing

H, G, D = 4, 2, 8
KINDS = ["no_mask", "padding", "causal", "padding_causal", "causal_bottom_right"]
KINDS += ["padding_causal_bottom_right"]


def starts(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def alone(q, k, v, lengths, key_lengths, kind, window, bias=None):
    """The packed result from one sequence at a time."""
    out, at, key_at = [], 0, 0
    for index, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
        i, j = torch.arange(n)[:, None], torch.arange(m)
        offset = 0 if kind in ("causal", "padding_causal") else m - n
        hidden = torch.zeros(n, m, dtype=torch.bool)
        if "causal" in kind:
            hidden |= j > i + offset
        if window:
            hidden |= j < i + offset - window[0]
        parts = (q[at : at + n], k[key_at : key_at + m], v[key_at : key_at + m])
        heads = (t.transpose(0, 1)[None] for t in parts)
        added = None if bias is None else bias[index : index + 1, :, :n, :m]
        out.append(exact_attention(*heads, hidden[None, None], bias=added)[0].transpose(0, 1))
        at, key_at = at + n, key_at + m
    return torch.cat([*out, q.new_zeros(len(q) - at, H, v.shape[-1])]).flatten(1)


def check(device, lengths, key_lengths, kind, *, dtype=torch.float32, groups=G, window=None,
          head=D, rest=0, bias=None, **kwargs):  # fmt: skip
    module = DotProductAttention(
        H, head, groups, qkv_format="thd", attn_mask_type=kind, window_size=window
    )
    q = torch.randn(sum(lengths) + rest, H, head).to(dtype)
    k, v = (torch.randn(sum(key_lengths) + rest, groups, head).to(dtype) for _ in range(2))
    grad = torch.randn(len(q), H * head).to(dtype)

    def run(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        added = None if bias is None else bias.to(dtype)
        out = alone(*leaves, lengths, key_lengths, kind, window, added)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    leaves = [t.to(device).requires_grad_() for t in (q, k, v)]
    if bias is not None:
        kwargs["core_attention_bias_type"] = "post_scale_bias"
        kwargs["core_attention_bias"] = bias.to(device).to(dtype)
    kwargs["cu_seqlens_q"] = starts(lengths, device)
    if key_lengths is not lengths:
        kwargs["cu_seqlens_kv"] = starts(key_lengths, device)
    out = module(*leaves, **kwargs)
    actual = [out, *torch.autograd.grad(out, leaves, grad.to(device))]
    for triple in zip(actual, run(torch.float64), run(dtype), strict=True):
        assert_matches(*triple)
    return module.explain(*leaves, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_self_attention(kind, window, dtype, device):
    if window and "causal" not in kind:
        window = (2, -1)
    lengths = [5, 1, 9]
    options = {"window": window, "dtype": dtype}
    check(device, lengths, lengths, kind, **options)
    check(device, lengths, lengths, kind, **options, max_seqlen_q=16, max_seqlen_kv=16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_attention(kind, dtype, device):
    check(device, [5, 1, 7], [3, 4, 9], kind, dtype=dtype, max_seqlen_q=7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
def test_dtypes_and_groups(dtype, groups, kind, device):
    lengths = [33, 17]
    path = check(device, lengths, lengths, kind, dtype=dtype, groups=groups, head=16)
    fused = device.type == "cuda" and dtype is not torch.float32
    assert path.startswith("varlen: " if fused else "padded: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_sequences_and_tokens_of_none(dtype, device):
    lengths = [0, 5, 0, 3]
    for kind in ("padding", "padding_causal"):
        check(device, lengths, lengths, kind, rest=2, dtype=dtype)
    check(device, [2, 0], [0, 3], "padding", rest=1, dtype=dtype)
    check(device, [0, 0], [0, 0], "padding", dtype=dtype)
    check(device, [0, 0], [2, 1], "padding", dtype=dtype)


def test_bias(device):
    lengths = [5, 3]
    check(device, lengths, lengths, "causal", bias=torch.randn(2, H, 5, 5))


def test_dropout_and_checkpoint(device):
    module = DotProductAttention(H, D, G, attention_dropout=0.3, qkv_format="thd")
    q = torch.randn(8, H, D, device=device, requires_grad=True)
    k = torch.randn(8, G, D, device=device, requires_grad=True)
    found = []
    for again in (False, True):
        torch.manual_seed(3)
        out = module(q, k, k, cu_seqlens_q=starts([5, 3], device), checkpoint_core_attention=again)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    module.eval()
    assert not torch.allclose(module(q, k, k, cu_seqlens_q=starts([5, 3], device)), found[0][0])


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 3])}, TypeError,
         r"cu_seqlens_q must be an int32 tensor, got torch.int64"),
        ({"cu_seqlens_q": torch.zeros(1, dtype=torch.int32)}, ValueError, r"got \[1\]"),
        ({"cu_seqlens_q": starts([3], "cpu"), "cu_seqlens_kv": starts([2, 1], "cpu")}, ValueError,
         r"cu_seqlens_kv must have shape \[sequences \+ 1\].* got \[3\]"),
        (
            {
                "cu_seqlens_q": starts([3], "cpu"),
                "cu_seqlens_kv": starts([4], "cpu"),
                "max_seqlen_q": 3,
                "max_seqlen_kv": 4,
            },
            ValueError,
            "cu_seqlens_kv must end at or before the 3 tokens, got 4",
        ),
        ({"cu_seqlens_q": torch.tensor([0, 3, 1, 3], dtype=torch.int32)}, ValueError,
         "cu_seqlens_q must ascend from 0, got a first element of 0 and a sequence of -2 tokens"),
        ({"cu_seqlens_q": torch.tensor([-5, 3], dtype=torch.int32), "max_seqlen_q": 9}, ValueError,
         "cu_seqlens_q must ascend from 0, got a first element of -5"),
        ({"cu_seqlens_q": starts([3], "cpu"), "attention_mask": torch.zeros(1)}, ValueError,
         "attention_mask must be None with qkv_format 'thd'"),
        ({"cu_seqlens_q": starts([3], "cpu"), "attn_mask_type": "arbitrary"}, ValueError,
         "attn_mask_type must not be 'arbitrary'"),
    ],
)  # fmt: skip
def test_rejects(kwargs, error, message):
    q = torch.zeros(3, H, D)
    with pytest.raises(error, match=message):
        DotProductAttention(H, D, qkv_format="thd")(q, q, q, **kwargs)


@pytest.mark.cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cu", [[0, 900, 2000], [-70, 3, 8], [0, 8, 2], [5, 5, 4000], [0, 8, 8]])
def test_sequences_of_another_tensor_stay_on_the_gpu(dtype, cu):
    """Lengths that only the GPU knows are cut to the tokens: nothing is read or written beyond."""
    buffer = torch.full((3, 8, H, D), float("nan"), dtype=dtype, device="cuda")
    q = buffer[1].normal_().requires_grad_()
    module = DotProductAttention(H, D, qkv_format="thd")
    where = torch.tensor(cu, dtype=torch.int32, device="cuda")
    out = module(q, q, q, cu_seqlens_q=where, max_seqlen_q=8)
    out.sum().backward()
    torch.cuda.synchronize()
    assert buffer[0].isnan().all()
    assert buffer[2].isnan().all()
    assert out.shape == (8, H * D)


@pytest.mark.parametrize("lengths", [[16, 16, 16], [16, 3, 0], [0, 0, 0], [40, 4, 4], [13, 16, 16]])
def test_sequences_moved_apart(lengths, device):
    """Three packed sequences, padded to 16 tokens; a longer one's other tokens give zeros."""
    q, k, v = (torch.randn(48, heads, D, dtype=torch.float64) for heads in (H, H, H))
    leaves = [x.float().to(device).requires_grad_() for x in (q, k, v)]
    cut, first = [], 0
    for length in lengths:
        cut.append(slice(first, first + min(length, 16)))
        first += length
    doubles = [x.requires_grad_() for x in (q, k, v)]
    wanted = torch.zeros(48, H, D, dtype=torch.float64)
    for part in cut:
        heads = [x[part].transpose(0, 1) for x in doubles]
        found = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        wanted = torch.cat((wanted[: part.start], found.transpose(0, 1), wanted[part.stop :]))
    where = packing("test", starts(lengths, device), None, 64, None)._replace(
        longest_query=16, longest_key=16, ends=(None, None)
    )
    path = Path("filled", "", Path("sdpa", "", kernel="cpu" if device == "cpu" else "efficient"))
    options = Options(D**-0.5)
    out = attend_packed(
        *leaves, None, path, "test", where, MASK_TYPES["causal"], None, options, None, False, False
    )
    grad = torch.randn(48, H, D, dtype=torch.float64)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out, leaves, grad.float().to(device))
    for ours, theirs in zip(found, torch.autograd.grad(wanted, doubles, grad), strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("sizes", [(2, 64, 64), (4, 192, 128)])
@pytest.mark.parametrize("lengths", [[512, 512], [512, 300], [1024]])
def test_cudnn_has_filled_sequences(sizes, lengths):
    """The kernel of padded sequences, where a batch has as many tokens, with the bits of each."""
    groups, *sizes = sizes
    longest = max(lengths)
    module = DotProductAttention(
        4, tuple(sizes), groups, qkv_format="thd", attn_mask_type="causal", device="cuda"
    )
    tokens = longest * len(lengths)
    given = {"device": "cuda", "dtype": torch.bfloat16}
    leaves = [
        torch.randn(tokens, heads, size, **given).requires_grad_()
        for heads, size in ((4, sizes[0]), (groups, sizes[0]), (groups, sizes[1]))
    ]
    call = {"cu_seqlens_q": starts(lengths, "cuda"), "max_seqlen_q": longest}
    if not torch.backends.cuda.cudnn_sdp_enabled() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's attention is the choice on sm_90 and later")
    assert module.explain(*leaves, **call).startswith("filled")
    out = module(*leaves, **call)
    out.sum().backward()
    padded = DotProductAttention(
        4, tuple(sizes), groups, qkv_format="bshd", attn_mask_type="causal", device="cuda"
    )
    first = 0
    for length in lengths:
        part = [x.detach()[None, first : first + length] for x in leaves]
        part = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, longest - length)) for x in part]
        torch.testing.assert_close(padded(*part)[0, :length], out[first : first + length])
        first += length
    assert out[first:].eq(0).all()
    for x in leaves:
        assert x.grad.isfinite().all()
        assert x.grad[first:].eq(0).all()
    other = {"cu_seqlens_q": starts([*lengths, 1], "cuda"), "max_seqlen_q": longest}
    more = [torch.cat((x.detach(), x.detach()[:1])) for x in leaves]
    assert not module.explain(*more, **other).startswith("filled")
