"""TransformerLayer against the same layer in plain PyTorch: every architecture, all gradients."""

import pytest
import torch
from checks import DTYPES
from plain_transformer import GROUPS, HEADS, HIDDEN, SHAPES, SIZE, Plain, compare
from plain_transformer import build_layer as build

from apex_te import fp8_autocast
from apex_te.recipe import DelayedScaling

POST = {"apply_residual_connection_post_layernorm": True}
BERT = {**POST, "output_layernorm": True}
LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
RECIPE = DelayedScaling(amax_history_len=4)


def plain(options, **arguments):
    """The function of (parameters, x, encoder output) for ``options``."""

    def run(parameters, x, other=None):
        layout = options.get("attn_input_format", "sbhd")
        model = Plain(parameters, HEADS, GROUPS, SIZE, layout, **options)
        return model.layer(x, other=other, **arguments)

    return run


ARCHITECTURES = {
    "GPT": {},
    "Llama": LLAMA,
    "BERT": BERT,
    "post-LN residual": POST,
    "output norm": {"output_layernorm": True, "normalization": "RMSNorm"},
    "parallel": {"parallel_attention_mlp": True},
    "fused": {"fuse_qkv_params": True, "zero_centered_gamma": True, "activation": "geglu"},
    "blocks": {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "activation": "relu"},
}
architectures = pytest.mark.parametrize("options", ARCHITECTURES.values(), ids=ARCHITECTURES)


@architectures
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_architectures(options, dropout, device):
    """With a dropout in evaluation mode the biases and residuals take another way."""
    layer = build(hidden_dropout=dropout, device=device, **options).eval()
    compare(layer, lambda m, x: m(x), plain(options), torch.randn(SHAPES["sbhd"]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_dtypes_and_layouts(dtype, layout, device):
    options = {**LLAMA, "attn_input_format": layout}
    layer = build(params_dtype=dtype, device=device, **options)
    freqs = torch.rand(9, 1, 1, SIZE // 2)
    compare(
        layer,
        lambda m, x: m(x, rotary_pos_emb=freqs.to(device)),
        plain(options, freqs=freqs),
        torch.randn(SHAPES[layout]).to(dtype),
    )


@pytest.mark.parametrize("options", [{}, POST, LLAMA], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_decoder(options, dropout, masked, device):
    layer = build(layer_type="decoder", hidden_dropout=dropout, device=device, **options).eval()
    masks, hidden = None, None
    if masked:
        masks = tuple(torch.zeros(2, 1, 1, n, dtype=torch.bool) for n in (5, 7))
        masks[0][0, ..., 4:], masks[1][1, ..., 3:] = True, True
        hidden = masks[0].transpose(-1, -2) | masks[1]
        masks = tuple(m.to(device) for m in masks)
    compare(
        layer,
        lambda m, x, y: m(x, encoder_output=y, enc_dec_attn_mask=masks),
        plain(options, other_hidden=hidden),
        torch.randn(SHAPES["sbhd"]),
        torch.randn(7, 2, HIDDEN),
    )


def test_padding_mask():
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., 3:] = True
    hidden = mask | mask.transpose(-1, -2)
    layer = build(self_attn_mask_type="padding", **BERT)
    run = plain(BERT, hidden=hidden)
    compare(layer, lambda m, x: m(x, mask), run, torch.randn(SHAPES["sbhd"]))
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    compare(
        layer,
        lambda m, x: m(x, mask, self_attn_mask_type="padding_causal"),
        plain(BERT, hidden=hidden | causal),
        torch.randn(SHAPES["sbhd"]),
    )


def test_options_of_a_call_reach_attention():
    layer, x = build(), torch.randn(SHAPES["sbhd"])
    windowed = build(window_size=(1, 0))
    windowed.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, window_size=(1, 0)), windowed(x))
    assert not torch.allclose(layer(x), windowed(x))
    bias = torch.randn(1, HEADS, 5, 5)
    biased = layer(x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    assert not torch.allclose(biased, layer(x))
    normed = build(qk_norm_type="RMSNorm", qk_norm_eps=0.5, qk_norm_before_rope=True)
    assert normed.self_attention.q_norm.eps == 0.5
    assert normed.self_attention.qk_norm_before_rope
    freqs = torch.rand(9, 1, 1, SIZE // 2)
    turned = build(rotary_pos_interleaved=True)
    turned.load_state_dict(layer.state_dict())
    assert not torch.allclose(turned(x, rotary_pos_emb=freqs), layer(x, rotary_pos_emb=freqs))


@pytest.mark.parametrize("decoder", [False, True])
def test_packed_sequences_are_as_alone(decoder, device):
    options = {"layer_type": "decoder"} if decoder else {}
    packed = build(
        attn_input_format="thd", self_attn_mask_type="padding_causal", device=device, **options
    )
    alone = build(attn_input_format="bshd", device=device, **options)
    alone.load_state_dict(packed.state_dict())
    x, y = torch.randn(8, HIDDEN, device=device), torch.randn(9, HIDDEN, device=device)
    lengths, key_lengths = [3, 5], [7, 2]
    cu = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    key_cu = torch.tensor([0, 7, 9], dtype=torch.int32, device=device)
    more = {"encoder_output": y, "cu_seqlens_kv": key_cu} if decoder else {}
    out = packed(x, cu_seqlens_q=cu, max_seqlen_q=5, **more)
    expected = []
    for a, b in zip(x.split(lengths), y.split(key_lengths), strict=True):
        expected.append(alone(a[None], encoder_output=b[None] if decoder else None)[0])
    torch.testing.assert_close(out, torch.cat(expected), rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 2, HIDDEN), (5, 0, HIDDEN)])
@pytest.mark.parametrize("fp8", [False, True])
def test_zero_tokens(shape, fp8, device):
    layer, x = build(device=device), torch.randn(shape, device=device, requires_grad=True)
    freqs = torch.rand(9, 1, 1, SIZE // 2, device=device)
    with fp8_autocast(fp8, RECIPE):
        out = layer(x, rotary_pos_emb=freqs)
    out.sum().backward()
    assert out.shape == x.grad.shape == shape
    assert layer.self_attention.proj.weight.grad.eq(0).all()


@pytest.mark.parametrize(
    ("options", "decoder"),
    [
        pytest.param(options, decoder, id=f"{name}{' decoder' if decoder else ''}")
        for name, options in ARCHITECTURES.items()
        for decoder in (False, True)
        if not (decoder and name == "parallel")
    ],
)
def test_fp8(options, decoder, device):
    """Close to high precision, and every gradient there."""
    layer = build(layer_type="decoder" if decoder else "encoder", device=device, **options)
    other = torch.randn(16, 2, HIDDEN, device=device) if decoder else None
    x = torch.randn(16, 2, HIDDEN, device=device).requires_grad_()
    found = []
    for fp8 in (True, True, False):
        layer.zero_grad()
        x.grad = None
        with fp8_autocast(fp8, RECIPE):
            out = layer(x, encoder_output=other)
        out.square().mean().backward()
        found.append([out, x.grad, *(p.grad for p in layer.parameters())])
        found[-1] = [t.detach().clone() for t in found[-1]]
    names = ["output", "input", *(name for name, _ in layer.named_parameters())]
    for name, low, high in zip(names, found[1], found[2], strict=True):
        if name.endswith("key_bias") or (name.endswith("qkv.bias")):  # zero for keys
            continue
        sqnr = 20 * torch.log10(high.norm() / (low - high).norm())
        assert sqnr >= 12, f"{name}: {sqnr}"
        assert not torch.equal(low, high) or name.endswith("proj.bias")


def test_layer_scaling_is_neutral():
    x = torch.randn(SHAPES["sbhd"])
    layer = build(layer_number=4, apply_query_key_layer_scaling=True, attention_dropout=0.1).eval()
    other = build(layer_number=4, apply_query_key_layer_scaling=False, attention_dropout=0.1).eval()
    other.load_state_dict(layer.state_dict())
    assert layer.self_attention.core_attention._training.layer_scale == 4.0
    assert other.self_attention.core_attention._training.layer_scale == 1.0
    torch.testing.assert_close(layer(x), other(x))
    torch.manual_seed(0)
    scaled = layer.train()(x)  # dropout takes the path that stores scores
    torch.manual_seed(0)
    torch.testing.assert_close(scaled, other.train()(x), rtol=1.3e-6, atol=1e-5)


def test_options_of_a_call_reach_the_projections():
    layer = build(layer_type="decoder")
    x = torch.randn(16, 2, HIDDEN)
    with fp8_autocast(True, RECIPE):
        layer(x, encoder_output=x)
        caches = [m._modes.weight_cache for m in layer.modules() if hasattr(m, "_modes")]
        assert len(caches) == 6
        assert not any(caches)
        layer(x, encoder_output=x, is_first_microbatch=True)
        assert all(caches)
    seen = []
    for attention in (layer.self_attention, layer.inter_attention):
        attention.core_attention.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["checkpoint_core_attention"]),
            with_kwargs=True,
        )
    layer(x, encoder_output=x, checkpoint_core_attention=True)
    assert seen == [True, True]
