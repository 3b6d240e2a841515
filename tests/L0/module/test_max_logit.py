"""``return_max_logit`` of DotProductAttention against scores written out in float64."""

import pytest
import torch
from attention_cases import B, D, H, hides, padding_masks, tensors
from checks import in_pairs

import apex_te
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


@pytest.mark.cover(0)
@pytest.mark.parametrize("kind", ["padding", "causal"])
def test_compiles(kind):
    module = DotProductAttention(2, D, attn_mask_type=kind, return_max_logit=True)
    q = torch.randn(5, 1, 2, D)
    mask = torch.tensor([[[[False, False, True, False, True]]]]) if kind == "padding" else None
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for x, y in zip(compiled(q, q, q, mask), module(q, q, q, mask), strict=True):
        torch.testing.assert_close(x, y)


W = 16  # width of the layers


def _of_core(module, run):
    """Returns what ``run()`` does, and the largest logits of each core attention in it."""
    cores = [m for m in module.modules() if isinstance(m, DotProductAttention)]
    found = []
    hooks = [m.register_forward_hook(lambda m, args, out: found.append(out[1])) for m in cores]
    try:
        return run(), found
    finally:
        for hook in hooks:
            hook.remove()


def _pair(make, device):
    """A module that returns the largest logits, and one that does not, of the same weights."""
    modules = [make(return_max_logit=value, device=device) for value in (True, False)]
    modules[1].load_state_dict(modules[0].state_dict())
    assert [m.return_max_logit for m in modules if hasattr(m, "return_max_logit")] != [False, True]
    return modules


@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("norm", [None, "input", "returned"])
@pytest.mark.parametrize("attention_type", ["self", "cross"])
def test_multihead(return_bias, norm, attention_type, device):
    """The largest logits are last, and other results and gradients are those without them."""
    module, plain = _pair(
        lambda **options: apex_te.MultiheadAttention(
            W, 4, num_gqa_groups=2, return_bias=return_bias, input_layernorm=norm is not None,
            return_layernorm_output=norm == "returned", attention_type=attention_type,
            qk_norm_type="RMSNorm", attention_dropout=0.0, **options,
        ),
        device,
    )  # fmt: skip
    x = torch.randn(6, 2, W, device=device, requires_grad=True)
    given = {"encoder_output": x.detach() * 2} if attention_type == "cross" else {}
    (*found, largest), cores = _of_core(module, lambda: module(x, **given))
    expected = plain(x, **given)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert torch.equal(largest, cores[0])
    assert len(found) == len(expected) == 1 + return_bias + (norm == "returned")
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    again, other = module(x, **given), plain(x, **given)
    assert torch.equal(again[-1], largest)
    grads = [
        torch.autograd.grad((y[0] if isinstance(y, tuple) else y).sum(), x) for y in (again, other)
    ]
    assert torch.equal(*(g[0] for g in grads))


@pytest.mark.parametrize("kind", ["layer", "bias", "post", "parallel", "decoder", "latent"])
@pytest.mark.parametrize("watched", [False, True])
def test_layer(kind, watched, device):
    options = {
        "layer": {"bias": False}, "bias": {"hidden_dropout": 0.0},
        "post": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
        "parallel": {"parallel_attention_mlp": True}, "decoder": {"layer_type": "decoder"},
        "latent": {},
    }[kind]  # fmt: skip

    def make(return_max_logit, device):
        given = dict(options)
        if kind == "latent":
            given["self_attention"] = apex_te.MultiLatentAttention(
                W, 4, kv_lora_rank=8, qk_head_dim=4, qk_pos_emb_head_dim=4, v_head_dim=4,
                input_layernorm=True, return_max_logit=return_max_logit, device=device,
            )  # fmt: skip
        given = {"hidden_dropout": 0.0, "attention_dropout": 0.0} | given
        return apex_te.TransformerLayer(
            W, 2 * W, 4, return_max_logit=return_max_logit, device=device, **given
        )

    module, plain = _pair(make, device)
    x = torch.randn(6, 2, W, device=device)
    given = {"encoder_output": x * 2} if kind == "decoder" else {}
    if watched:  # the layer then calls the module of attention itself
        module.self_attention.register_forward_hook(lambda *args: None)
    (out, *largest), cores = _of_core(module, lambda: module(x, **given))
    assert torch.equal(out, plain(x, **given))
    assert len(largest) == len(cores) == 1 + (kind == "decoder")
    assert all(map(torch.equal, largest, cores))


def test_layer_refuses_an_attention_that_returns_another_number():
    inner = apex_te.MultiheadAttention(W, 4, input_layernorm=True, return_max_logit=True)
    with pytest.raises(ValueError, match="self_attention must have return_max_logit False with"):
        apex_te.TransformerLayer(W, W, 4, self_attention=inner)


@pytest.mark.parametrize("recompute", [False, True])
def test_latent_attention_with_and_without_a_cache(recompute, device):
    """Tokens that attend to latents report the logits of the keys made from these latents."""
    torch.manual_seed(0)
    module = apex_te.MultiLatentAttention(
        W, 2, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8, layer_number=1,
        return_max_logit=True, recompute_up_proj=recompute, device=device,
    )  # fmt: skip
    x = torch.randn(5, 2, W, device=device)
    out, largest = module(x)
    out.sum().backward()
    _, cores = _of_core(module, lambda: module(x))
    torch.testing.assert_close(largest, cores[0])
    module.eval()
    params = apex_te.InferenceParams(2, 8)
    found = []
    with torch.no_grad():
        for i in range(5):
            found.append(module(x[i : i + 1], inference_params=params)[1])
            params.sequence_len_offset += 1
    torch.testing.assert_close(torch.stack(found).amax(0), largest)
