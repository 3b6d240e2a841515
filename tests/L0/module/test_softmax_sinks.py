"""Softmax sinks of DotProductAttention and the layers around it, against float64."""

import copy

import pytest
import torch
from attention_cases import (
    PATHS,
    TO_HEADS,
    B,
    D,
    H,
    assert_matches,
    exact_attention,
    hides,
    take_path,
)
from checks import DTYPES, in_pairs, needs_cuda

import apex_te
from apex_te.module.attention.dot_product import DotProductAttention

path = pytest.fixture(params=PATHS)(take_path)
SINKS = ["off-by-one", "learnable"]
MASKS = {
    "no_mask": ("no_mask", None),
    "causal": ("causal", None),
    "window": ("causal", (3, 0)),
    "window of both sides": ("no_mask", (2, 4)),
    "padding": ("padding_causal", None),
    "padding and window": ("padding_causal", (3, 0)),
    "arbitrary": ("arbitrary", None),
}


def exact(q, k, v, sink, hidden, bias=None):
    """Attention with a column for the sink [h], in the dtype of q; see ``exact_attention``."""
    pad = torch.nn.functional.pad
    scale, repeats = q.shape[3] ** -0.5, q.shape[1] // k.shape[1]
    # One more key, of value 0, whose score is the sink: it alone has a last element besides 0.
    key = pad((sink / scale)[:, None, None], (q.shape[3], 0)).expand(q.shape[0], -1, -1, -1)
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    q, k, v = pad(q, (0, 1), value=1.0), torch.cat((pad(k, (0, 1)), key), 2), pad(v, (0, 0, 0, 1))
    hidden = pad(hidden.expand(*hidden.shape[:3], k.shape[2] - 1), (0, 1))
    bias = None if bias is None else pad(bias, (0, 1))
    return exact_attention(q, k, v, hidden, scale, bias)


def module_of(device, kind, window, groups, fmt, softmax_type, **more):
    module = DotProductAttention(
        H, more.pop("size", D), groups, attn_mask_type=kind, window_size=window, qkv_format=fmt,
        softmax_type=softmax_type, device=device, **more,
    )  # fmt: skip
    if softmax_type == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(torch.linspace(-2.0, 3.0, H))
    return module


def compare(module, inputs, hidden, fmt, device, *, packed=None, **kwargs):
    """Output and gradients, that of the sink too, for inputs [b, h, s, d] on the CPU."""
    parameters = list(module.parameters())
    sink = parameters[0].detach().cpu() if parameters else torch.zeros(H)
    grad = torch.randn(*inputs[0].shape[:3], inputs[2].shape[3]).to(inputs[0].dtype)
    bias = kwargs.get("core_attention_bias")
    visible = torch.ones(B, inputs[0].shape[2], dtype=torch.bool) if packed is None else packed

    def run(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (*inputs, sink)]
        given = leaves[3].to(dtype), hidden, None if bias is None else bias.cpu().to(dtype)
        out = exact(*leaves[:3], *given)
        found = torch.autograd.grad(out, leaves, grad.to(dtype) * visible[:, None, :, None])
        return [out, *found]

    def lay(x):
        x = x.permute([TO_HEADS[fmt].index(i) for i in range(4)]) if fmt != "thd" else x.mT
        if fmt == "thd":
            x = x.permute(0, 3, 1, 2)[visible]
        return x.contiguous().to(device)

    def back(x):
        if fmt != "thd":
            return x.permute(TO_HEADS[fmt]).cpu()
        full = x.new_zeros(*visible.shape, *x.shape[1:])
        full[visible.to(device)] = x
        return full.transpose(1, 2).cpu()

    leaves = [lay(x).requires_grad_() for x in inputs]
    out = module(*leaves, **kwargs)
    found = torch.autograd.grad(out, [*leaves, *parameters], lay(grad).flatten(-2))
    assert out.dtype == inputs[0].dtype
    actual = [back(out.unflatten(-1, (H, -1))), *(back(x) for x in found[:3]), *found[3:]]
    for x, wanted, same_dtype in zip(actual, run(torch.float64), run(grad.dtype), strict=False):
        if x.dim() == 1 and grad.dtype is not torch.float32:
            # A sum over all queries, in float32 of rounded addends.
            error = (x.cpu() - wanted).norm() / wanted.norm()
            assert error < 2e-2, error
            continue
        assert_matches(x.detach(), wanted.detach(), same_dtype.detach())


@in_pairs(
    mask=MASKS, groups=[1, 2, H], fmt=["sbhd", "bshd", "thd"], softmax_type=SINKS, dtype=DTYPES,
    size=[D, 64],
)  # fmt: skip
def test_against_float64(mask, groups, fmt, softmax_type, dtype, size, path, device):
    kind, window = MASKS[mask]
    length = 17
    module = module_of(device, kind, window, groups, fmt, softmax_type, size=size)
    inputs = [torch.randn(B, n, length, size).to(dtype) for n in (H, groups, groups)]
    lengths = [(length, length), (6, 6)]
    hidden = hides(kind, window, length, length, lengths)
    given, packed = {}, None
    if fmt == "thd":
        if kind == "arbitrary":
            kind = module.attn_mask_type = "padding"
        packed = torch.arange(length) < torch.tensor([[length], [6]])
        cu = torch.tensor([0, length, length + 6], dtype=torch.int32, device=device)
        given = {"cu_seqlens_q": cu, "max_seqlen_q": length, "max_seqlen_kv": length}
        named = kind if "padding" in kind else {"no_mask": "padding"}.get(kind, f"padding_{kind}")
        hidden = hides(named, window, length, length, lengths)
    elif "padding" in kind:  # with holes, and a sequence of nothing else
        padded = torch.rand(B, 1, 1, length) < 0.4
        padded[1] = True
        hidden = hides(kind.removeprefix("padding_"), window, length, length, None)
        hidden = hidden | padded | padded.mT
        given = {"attention_mask": padded.to(device)}
    elif kind == "arbitrary":
        hidden = torch.rand(B, H, length, length) < 0.5
        hidden[:, :, 3] = True  # a query that sees no key
        given = {"attention_mask": hidden.to(device)}
    compare(module, inputs, hidden, fmt, device, packed=packed, **given)


@pytest.mark.parametrize(("queries", "keys"), [(9, 5), (5, 9), (5, 0), (0, 5)])
@pytest.mark.parametrize("kind", ["causal_bottom_right", "causal", "no_mask"])
def test_other_lengths(queries, keys, kind, path, device):
    """The first queries see no key with bottom_right."""
    module = module_of(device, kind, None, 2, "bshd", "learnable")
    inputs = [torch.randn(B, n, s, D) for n, s in ((H, queries), (2, keys), (2, keys))]
    if not queries * keys:
        q, k, v = (x.to(device).transpose(1, 2).requires_grad_() for x in inputs)
        out = module(q, k, v)
        out.sum().backward()
        assert out.shape == (B, queries, H * D)
        assert out.eq(0).all()
        assert all(x.grad.eq(0).all() for x in (q, k, v, module.softmax_offset))
        return
    hidden = hides(kind, None, queries, keys, None)
    compare(module, inputs, hidden, "bshd", device)


@pytest.mark.parametrize("softmax_type", SINKS)
def test_bias_and_values_of_another_size(softmax_type, path, device):
    module = module_of(device, "causal", None, 2, "sbhd", softmax_type, size=(D, 12))
    inputs = [torch.randn(B, n, 7, size) for n, size in ((H, D), (2, D), (2, 12))]
    bias = torch.randn(1, H, 7, 7, device=device)
    given = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    compare(module, inputs, hides("causal", None, 7, 7, None), "sbhd", device, **given)


@pytest.mark.parametrize("softmax_type", SINKS)
def test_double_precision(softmax_type):
    module = module_of("cpu", "causal", None, 2, "bshd", softmax_type).double()
    inputs = [torch.randn(B, n, 7, D, dtype=torch.float64) for n in (H, 2, 2)]
    sink = next(iter(module.parameters()), torch.zeros(H)).detach().double()
    expected = exact(*inputs, sink, hides("causal", None, 7, 7, None))
    actual = module(*(x.transpose(1, 2) for x in inputs)).unflatten(2, (H, D))
    torch.testing.assert_close(actual.transpose(1, 2), expected)


def test_dropout(path, device):
    """Dropped weights are those after the sink; equal scores and values of 1 tell the rate."""
    module = module_of(device, "no_mask", None, 2, "sbhd", "off-by-one", attention_dropout=0.25)
    x = torch.zeros(63, 64, H, D, device=device)
    ones = torch.ones(63, 64, 2, D, device=device)
    out = module(x, x[:, :, :2], ones)
    assert abs(out.mean().item() - 63 / 64) < 0.02
    assert abs(out.var().item() - 63 / 64**2 * 0.25 / 0.75) < 0.002
    torch.testing.assert_close(module.eval()(x, x[:, :, :2], ones), torch.full_like(out, 63 / 64))


@pytest.mark.cover(0)
@pytest.mark.parametrize("kind", ["padding_causal", "causal"])
def test_compiled_recomputed_and_repeated(kind, path, device):
    module = module_of(device, kind, None, 2, "sbhd", "learnable")
    q, k, v = (torch.randn(9, B, n, D, device=device, requires_grad=True) for n in (H, 2, 2))
    mask = None if kind == "causal" else torch.rand(B, 1, 1, 9, device=device) < 0.3
    grad = torch.randn(9, B, H * D, device=device)

    def run(call, **more):
        out = call(q, k, v, mask, **more)
        return [out, *torch.autograd.grad(out, (q, k, v, module.softmax_offset), grad)]

    expected = run(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for found in (run(compiled), run(module, checkpoint_core_attention=True), run(module)):
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("window", [None, (127, 0)])
@pytest.mark.parametrize("kind", ["causal", "padding_causal"])
@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
def test_long_sequences_on_a_gpu(window, kind, fmt):
    """gpt-oss's heads, with cuDNN's kernel, the flash kernel with a window, and moved tokens."""
    module = module_of("cuda", kind, window, 2, fmt, "learnable", size=64)
    inputs = [torch.randn(B, n, 600, 64).bfloat16() for n in (H, 2, 2)]
    hidden = torch.ones(600, 600, dtype=torch.bool).triu(1)[None, None]
    if window:
        hidden = hidden | torch.ones(600, 600, dtype=torch.bool).tril(-128)
    mask = None
    if kind == "padding_causal":
        mask = torch.arange(600) >= torch.tensor([600, 200])[:, None, None, None]
        hidden = hidden | mask | mask.mT
        mask = mask.cuda()
    compare(module, inputs, hidden.expand(B, -1, -1, -1), fmt, "cuda", attention_mask=mask)


@pytest.mark.cuda
@needs_cuda
def test_captured_and_deterministic():
    module = module_of("cuda", "causal", (127, 0), 2, "bshd", "learnable", size=64)
    q, k, v = (
        torch.randn(B, 600, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (H, 2, 2)
    )
    leaves = (q, k, v, module.softmax_offset)

    def run():
        return torch.autograd.grad(module(q, k, v).square().sum(), leaves)

    torch.use_deterministic_algorithms(True)
    try:
        expected = run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        graph.replay()
    finally:
        torch.use_deterministic_algorithms(False)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_without_sinks_nothing_changes():
    module = DotProductAttention(H, D, 2)
    assert (module.softmax_type, module.softmax_offset) == ("vanilla", None)
    assert not module.state_dict()
    assert not DotProductAttention(H, D, softmax_type="off-by-one").state_dict()


def test_parameter_of_layers():
    """Its name is Transformer Engine's; it is float32, 0, made anew on a real device, copied."""
    layer = apex_te.TransformerLayer(
        32, 64, 4, softmax_type="learnable", params_dtype=torch.bfloat16, device="meta"
    )
    key = "self_attention.core_attention.softmax_offset"
    assert key in layer.state_dict()
    layer.reset_parameters()
    parameter = layer.get_parameter(key)
    assert (parameter.dtype, parameter.shape) == (torch.float32, (4,))
    assert parameter.eq(0).all()
    with torch.no_grad():
        parameter.fill_(2.0)
    assert copy.deepcopy(layer).get_parameter(key).eq(2).all()
    decoder = apex_te.TransformerLayer(
        32, 64, 4, softmax_type="learnable", layer_type="decoder", device="meta"
    )
    assert "inter_attention.core_attention.softmax_offset" in decoder.state_dict()
    split = apex_te.MultiheadAttention(32, 4, softmax_type="learnable", tp_size=2,
                                       set_parallel_mode=True)  # fmt: skip
    own = split.core_attention.softmax_offset
    assert own.shape == (2,)
    assert (own.tensor_model_parallel, own.partition_dim, own.partition_stride) == (True, 0, 1)


def test_explains_and_refuses():
    x = torch.randn(8, 2, 2, 4)
    module = DotProductAttention(2, 4, attention_dropout=0.1, softmax_type="learnable")
    assert module.explain(x, x, x).endswith(
        "dropout; the softmax sink is one more column of scores"
    )
    assert module.eval().explain(x, x, x).endswith("; the softmax sink rescales its output")
    with pytest.raises(ValueError, match=r"softmax_type must be .* got 'learned'; did you mean"):
        DotProductAttention(2, 4, softmax_type="learned")
