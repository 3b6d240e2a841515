"""DotProductAttention against attention written out in float64, on every path and layout."""

import pytest
import torch
from attention_cases import (
    PATHS,
    TO_HEADS,
    B,
    D,
    G,
    H,
    assert_matches,
    build,
    check,
    exact_attention,
    hides,
    padding_masks,
    take_path,
    tensors,
)
from checks import DTYPES, needs_cuda

from apex_te.module.attention.dot_product import DotProductAttention

path = pytest.fixture(params=PATHS)(take_path)
KINDS = ["no_mask", "padding", "causal", "padding_causal", "causal_bottom_right"]
KINDS += ["padding_causal_bottom_right", "arbitrary"]


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    ("kind", "window"),
    [
        (kind, window)
        for kind in KINDS
        for window in (None, (2, 0), (1, -1), (0, 2))
        if "causal" not in kind or window != (0, 2)
    ],
)
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 9), (9, 5)])
@pytest.mark.parametrize("groups", [G, H])
def test_mask_types(kind, queries, keys, window, groups, path, device):
    fmt = "sbhd" if window else "bshd"
    module = build(device, H, D, groups, attn_mask_type=kind, window_size=window)
    lengths = [(queries - 2, keys - 1), (queries, keys)]
    mask = None
    if "padding" in kind:
        mask = padding_masks(queries, keys, lengths)
    hidden = hides(kind, window, queries, keys, lengths)
    if kind == "arbitrary":
        mask = torch.rand(B, H, queries, keys) < 0.4
        mask[0, :, 1] = True
        hidden = hidden | mask
    check(module, tensors(queries, keys, groups), hidden, fmt, mask=mask)


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
@pytest.mark.parametrize(
    ("kind", "window"),
    [("causal", None), ("padding", None), ("causal", (3, 0)), ("no_mask", (2, 4))],
)
def test_dtypes_groups_and_layouts(dtype, groups, fmt, kind, window, path, device):
    module = build(device, H, D, groups, attn_mask_type=kind, qkv_format=fmt, window_size=window)
    lengths = [(17, 17), (3, 3)]
    mask = padding_masks(17, 17, lengths)[0] if kind == "padding" else None
    hidden = hides(kind, window, 17, 17, lengths)
    check(module, tensors(17, 17, groups, dtype), hidden, fmt, mask=mask)


def test_views_of_one_projection(path, device):
    """Strided heads, as a fused projection gives them."""
    qkv = torch.randn(5, B, H + 2 * G, D, device=device, requires_grad=True)
    parts = qkv.narrow(2, 0, H), qkv.narrow(2, H, G), qkv.narrow(2, H + G, G)
    module = DotProductAttention(H, D, G)
    (actual,) = torch.autograd.grad(module(*parts).square().sum(), qkv)
    (expected,) = torch.autograd.grad(module(*(p.contiguous() for p in parts)).square().sum(), qkv)
    torch.testing.assert_close(actual, expected, rtol=1.3e-6, atol=1e-5)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
@pytest.mark.parametrize("groups", [1, 2])
def test_long_sequences_on_a_gpu(fmt, groups):
    """The sizes for which cuDNN computes, with views of one projection as inputs."""
    shape = (600, 2) if fmt == "sbhd" else (2, 600)
    leaf = torch.randn(*shape, 2 + 2 * groups, 64, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(*shape, 128).bfloat16()
    order = TO_HEADS[fmt]

    def run(dtype):
        x = leaf.detach().to(dtype).requires_grad_()
        heads = (t.permute(order) for t in x.split([2, groups, groups], 2))
        out = exact_attention(*heads, torch.ones(600, 600, dtype=torch.bool).triu(1))
        out = out.permute([order.index(i) for i in range(4)]).flatten(2)
        return [out, *torch.autograd.grad(out, x, grad.to(dtype))]

    module = DotProductAttention(2, 64, groups, qkv_format=fmt)
    x = leaf.detach().cuda().requires_grad_()
    parts = x.split([2, groups, groups], 2)
    out = module(*parts)
    actual = [out, *torch.autograd.grad(out, x, grad.cuda())]
    for triple in zip(actual, run(torch.float64), run(torch.bfloat16), strict=True):
        assert_matches(*triple)
    if torch.cuda.get_device_capability() >= (9, 0):
        assert module.explain(*parts).startswith("sdpa_cudnn: ")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*parts), out)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("sizes", [(64, 64), (256, 256), (192, 128)])
@pytest.mark.parametrize("kind", ["causal", "no_mask", "padding_causal"])
@pytest.mark.parametrize(("fmt", "length"), [("sbhd", 512), ("bshd", 600), ("bshd", 1033)])
def test_sizes_of_long_sequences(sizes, kind, fmt, length):
    """cuDNN's kernels of larger and of two head sizes, and padded tokens put behind others."""
    module = build(torch.device("cuda"), H, sizes, G, attn_mask_type=kind)
    shapes = ((H, length, sizes[0]), (G, length, sizes[0]), (G, length, sizes[1]))
    inputs = [torch.randn(B, *shape).bfloat16() for shape in shapes]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None] & (kind != "no_mask")
    mask = None
    if kind == "padding_causal":
        mask = torch.rand(B, 1, 1, length) < 0.3
        hidden = hidden | mask | mask.mT
    check(module, inputs, hidden, fmt, mask=mask)
    if torch.cuda.get_device_capability() == (9, 0):
        given = [x.cuda().permute(0, 2, 1, 3) for x in inputs]
        found = module.explain(*given, None if mask is None else mask.cuda(), qkv_format="bshd")
        assert "sdpa_cudnn: " in found


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize(
    ("kind", "cross"),
    [("padding_causal", False), ("padding", False), ("padding_causal_bottom_right", True)],
)
def test_padding_without_a_host_wait(kind, cross):
    """In a graph, too, whose mask changes between replays; forward and backward."""
    module = DotProductAttention(4, 64, 2, qkv_format="bshd", attn_mask_type=kind)
    q, k, v = (
        torch.randn(2, 600, n, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for n in (4, 2, 2)
    )
    keys = torch.rand(2, 1, 1, 600, device="cuda") < 0.5
    masks = [torch.rand(2, 1, 1, 600, device="cuda") < part for part in (0.2, 0.6)]
    mask = masks[0].clone()

    def run(mask):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]  # of the stream that captures
        out = module(*leaves, (mask, keys) if cross else mask)
        return [out, *torch.autograd.grad(out, leaves, out)]

    run(mask)
    torch.cuda.set_sync_debug_mode("error")
    torch.use_deterministic_algorithms(True)
    try:
        wanted = [run(each) for each in masks]
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    for each, expected in zip(masks, wanted, strict=True):
        mask.copy_(each)
        graph.replay()
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("window", [None, (100, 0)])
def test_repeatable_on_request(window):
    """Under torch.use_deterministic_algorithms the gradients are the same bits each time."""
    module = DotProductAttention(4, 64, 2, window_size=window)
    q = torch.randn(600, 2, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    k = torch.randn(600, 2, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        found = [torch.autograd.grad(module(q, k, k).square().sum(), (q, k)) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b, c in zip(*found, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_one_padding_mask_for_self_attention(path):
    """Padded queries give zeros and send no gradient; left padding too."""
    module = build("cpu", H, D, G, attn_mask_type="padding_causal_bottom_right")
    mask = torch.zeros(B, 1, 1, 6, dtype=torch.bool)
    mask[0, ..., :2] = True
    hidden = mask | mask.transpose(-1, -2) | hides("causal", None, 6, 6, None)
    check(module, tensors(6, 6), hidden, "bshd", mask=mask)


def test_a_sequence_of_padding_only(path, device):
    module = build(device, H, D, G, attn_mask_type="padding")
    lengths = [(0, 0), (6, 6)]
    mask = padding_masks(6, 6, lengths)[0]
    check(module, tensors(6, 6), hides("padding", None, 6, 6, lengths), "sbhd", mask=mask)


@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
def test_lengths_instead_of_a_mask(kind, path, device):
    module = build(device, H, D, G, attn_mask_type=kind)
    lengths = [(3, 7), (5, 2)]
    cu = [torch.tensor([0, a, b], dtype=torch.int32, device=device) for a, b in ((3, 8), (7, 9))]
    hidden = hides(kind, None, 5, 7, lengths)
    inputs = tensors(5, 7)
    check(module, inputs, hidden, "sbhd", cu_seqlens_q=cu[0], cu_seqlens_kv=cu[1])


@pytest.mark.parametrize("shape", [(B, H, 7, 7), (1, H, 7, 7), (B, 1, 1, 7)])
@pytest.mark.parametrize("kind", ["no_mask", "causal", "padding"])
def test_bias(shape, kind, path, device):
    module = build(device, H, D, G, attn_mask_type=kind)
    lengths = [(5, 5), (7, 7)]
    mask = padding_masks(7, 7, lengths)[0] if kind == "padding" else None
    hidden = hides(kind, None, 7, 7, lengths)
    check(module, tensors(7, 7), hidden, "sbhd", mask=mask, bias=torch.randn(shape))


def test_bias_before_the_scale_and_without_gradient(path):
    module = DotProductAttention(H, D, G, softmax_scale=0.5, attn_mask_type="no_mask")
    q, k, v = (t.transpose(1, 2) for t in tensors(7, 7))
    bias = torch.randn(1, 1, 7, 7)
    before = module(q, k, v, None, "bshd", core_attention_bias_type="pre_scale_bias",
                    core_attention_bias=bias)  # fmt: skip
    after = module(q, k, v, qkv_format="bshd", core_attention_bias_type="post_scale_bias",
                   core_attention_bias=0.5 * bias)  # fmt: skip
    torch.testing.assert_close(before, after)
    assert not torch.allclose(before, module(q, k, v, qkv_format="bshd"))


def test_scale_and_sizes(path, device):
    """A value of another size than the key, and a scale of one's own."""
    module = build(device, H, (D, 12), G, softmax_scale=0.3, attn_mask_type="no_mask")
    hidden = hides("no_mask", None, 7, 7, None)
    check(module, tensors(7, 7, value=12), hidden, "sbhd", scale=0.3)


def test_double_precision():
    module = DotProductAttention(H, D, G, qkv_format="bshd").double()
    q, k, v = tensors(7, 7, dtype=torch.float64)
    expected = exact_attention(q, k, v, hides("causal", None, 7, 7, None))
    actual = module(*(t.transpose(1, 2) for t in (q, k, v))).unflatten(2, (H, D))
    torch.testing.assert_close(actual.transpose(1, 2), expected)


def test_layer_scaling_is_neutral_and_prevents_overflow(path):
    q, k, v = (t.transpose(1, 2) for t in tensors(7, 7, dtype=torch.float16))
    plain = DotProductAttention(H, D, G, qkv_format="bshd")
    scaled = DotProductAttention(
        H, D, G, qkv_format="bshd", layer_number=8, apply_query_key_layer_scaling=True
    )
    torch.testing.assert_close(scaled(q, k, v), plain(q, k, v), rtol=1e-3, atol=1e-3)
    large = torch.full_like(q, 160.0)  # scores of 160 * 160 * 8 / sqrt(8) = 72,408
    assert torch.isfinite(scaled(large, large[:, :, :G], v)).all()


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens(queries, keys, dtype, path, device):
    module = build(device, H, D, G, attn_mask_type="no_mask")
    hidden = torch.zeros(1, 1, queries, keys, dtype=torch.bool)
    if keys:
        check(module, tensors(queries, keys, dtype=dtype), hidden, "sbhd")
        return
    q, k, v = (t.to(device).transpose(1, 2).requires_grad_() for t in tensors(queries, 0))
    out = module(q, k, v, qkv_format="bshd")
    out.sum().backward()
    assert out.shape == (B, queries, H * D)
    assert out.eq(0).all()
    assert q.grad.eq(0).all()
