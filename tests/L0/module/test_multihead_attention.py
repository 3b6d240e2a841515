"""MultiheadAttention against plain PyTorch, and its use."""

import copy

import pytest
import torch
from checks import DTYPES
from plain_transformer import GROUPS, HEADS, HIDDEN, SHAPES, SIZE, Plain, compare
from plain_transformer import build_attention as build
from torch.nn import functional as F

from apex_te import fp8_autocast
from apex_te.module.attention.inference_params import InferenceParams
from apex_te.module.attention.multihead import MultiheadAttention
from apex_te.ops.rope import rope
from apex_te.recipe import DelayedScaling


def plain(options, **arguments):
    """The function of (parameters, x, other) for ``options``."""
    options = dict(options)
    layout = options.pop("qkv_format", "sbhd")
    groups = options.pop("num_gqa_groups", GROUPS)

    def run(parameters, x, other=None):
        return Plain(parameters, HEADS, groups, SIZE, layout, **options).attention(
            x, other=other, **arguments
        )[0]

    return run


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("fused", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("rope", [False, True])
def test_layouts_of_the_projection(layout, fused, groups, rope, device):
    options = {
        "qkv_format": layout,
        "fuse_qkv_params": fused[0],
        "qkv_weight_interleaved": fused[1],
        "num_gqa_groups": groups,
    }
    freqs = torch.rand(9, 1, 1, SIZE // 2) if rope else None
    on_device = None if freqs is None else freqs.to(device)
    compare(
        build(device=device, **options),
        lambda module, x: module(x, rotary_pos_emb=on_device),
        plain(options, freqs=freqs),
        torch.randn(SHAPES[layout]),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"normalization": "LayerNorm"},
        {"normalization": "RMSNorm", "bias": False},
        {"normalization": "RMSNorm", "zero_centered_gamma": True},
        {"normalization": "LayerNorm", "zero_centered_gamma": True, "fuse_qkv_params": True},
    ],
    ids=str,
)
def test_norm_in_front(options):
    compare(build(input_layernorm=True, **options), lambda m, x: m(x), plain(options),
            torch.randn(SHAPES["sbhd"]))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_dtypes(dtype, layout, device):
    options = {"qkv_format": layout}
    freqs = torch.rand(9, 1, 1, SIZE // 2)
    module = build(device=device, params_dtype=dtype, input_layernorm=True, **options)
    compare(
        module,
        lambda m, x: m(x, rotary_pos_emb=freqs.to(device)),
        plain(options, freqs=freqs),
        torch.randn(SHAPES[layout]).to(dtype),
    )


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("fused", [(False, True), (True, True), (True, False)])
def test_cross_attention(layout, norm, fused, device):
    options = {
        "qkv_format": layout,
        "fuse_qkv_params": fused[0],
        "qkv_weight_interleaved": fused[1],
    }
    module = build(
        attention_type="cross",
        input_layernorm=norm,
        attn_mask_type="padding",
        device=device,
        **options,
    )
    other = torch.randn((7, 2, HIDDEN) if layout == "sbhd" else (2, 7, HIDDEN))
    masks = torch.zeros(2, 1, 1, 5, dtype=torch.bool), torch.zeros(2, 1, 1, 7, dtype=torch.bool)
    masks[0][0, ..., 4:], masks[1][1, ..., 3:] = True, True
    hidden = masks[0].transpose(-1, -2) | masks[1]
    on_device = tuple(m.to(device) for m in masks)
    compare(
        module,
        lambda m, x, y: m(x, on_device, y),
        plain(options, hidden=hidden),
        torch.randn(SHAPES[layout]),
        other,
    )


NORMS = {
    "RMSNorm": lambda p: lambda x, key: F.rms_norm(x, (SIZE,), p[f"{key}weight"], 1e-6),
    "LayerNorm": lambda p: lambda x, key: F.layer_norm(
        x, (SIZE,), p[f"{key}weight"], p[f"{key}bias"], 1e-6
    ),
    "L2Normalization": lambda p: lambda x, key: x
    / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("neighbours", [False, True])
def test_qk_norm_and_rotation(kind, before, neighbours):
    options = {"qk_norm_before_rope": before, "rotary_pos_interleaved": neighbours}
    freqs = torch.rand(9, 1, 1, SIZE // 2)

    def run(parameters, x):
        return Plain(parameters, HEADS, GROUPS, SIZE, **options).attention(
            x, freqs=freqs, qk_norm=NORMS[kind](parameters)
        )[0]

    compare(build(qk_norm_type=kind, **options), lambda m, x: m(x, rotary_pos_emb=freqs), run,
            torch.randn(SHAPES["sbhd"]))  # fmt: skip


def test_qk_norm_eps_and_unknown_kind():
    module = build(qk_norm_type="RMSNorm", qk_norm_eps=0.25)
    assert module.q_norm.eps == module.k_norm.eps == 0.25
    with pytest.raises(ValueError, match=r"qk_norm_type must be None, 'RMSNorm'.* got 'batch'"):
        build(qk_norm_type="batch")


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("options", [{}, {"fuse_qkv_params": True}, {"qk_norm_type": "RMSNorm",
                         "qk_norm_before_rope": True}], ids=str)  # fmt: skip
def test_packed_sequences_are_as_alone(cross, options, device):
    """thd, with rotation, against each sequence by itself in bshd."""
    kind = "padding" if cross else "padding_causal"
    options = {**options, "attention_type": "cross" if cross else "self"}
    packed = build(qkv_format="thd", attn_mask_type=kind, device=device, **options)
    alone = MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, num_gqa_groups=GROUPS, qkv_format="bshd",
        attn_mask_type="no_mask" if cross else "causal", device=device, **options,
    )  # fmt: skip
    alone.load_state_dict(packed.state_dict())
    freqs = torch.rand(9, 1, 1, SIZE // 2, device=device)
    lengths, key_lengths = [3, 5], [6, 2] if cross else [3, 5]
    x = torch.randn(8, HIDDEN, device=device)
    y = torch.randn(8, HIDDEN, device=device) if cross else None
    cu, key_cu = (
        torch.tensor([0, a, 8], dtype=torch.int32, device=device)
        for a in (lengths[0], key_lengths[0])
    )
    out = packed(
        x, None, y, rotary_pos_emb=freqs, cu_seqlens_q=cu, cu_seqlens_kv=key_cu if cross else None
    )
    parts = zip(x.split(lengths), y.split(key_lengths) if cross else [None, None], strict=True)
    expected = [
        alone(a[None], None, None if b is None else b[None], rotary_pos_emb=freqs)[0]
        for a, b in parts
    ]
    torch.testing.assert_close(out, torch.cat(expected), rtol=1.3e-6, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(out.square().mean(), packed.parameters()),
        torch.autograd.grad(torch.cat(expected).square().mean(), alone.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1.3e-6, atol=1e-5)


def test_options_of_a_call_reach_attention():
    x = torch.randn(SHAPES["sbhd"])
    module = build()
    windowed = build(window_size=(1, 0))
    windowed.load_state_dict(module.state_dict())
    assert torch.equal(module(x, window_size=(1, 0)), windowed(x))
    assert not torch.allclose(module(x), windowed(x))
    free = build(attn_mask_type="no_mask", softmax_scale=0.1)
    free.load_state_dict(module.state_dict())
    assert not torch.allclose(module(x, attn_mask_type="no_mask"), free(x))
    bias = torch.randn(1, HEADS, 5, 5)
    biased = module(x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    assert not torch.allclose(biased, module(x))
    mask = torch.rand(1, 1, 5, 5) < 0.5
    compare(
        module,
        lambda m, x: m(x, mask, attn_mask_type="arbitrary", checkpoint_core_attention=True),
        plain({}, hidden=mask),
        x,
    )


def test_angles_of_queries_and_of_keys(device):
    angles = [torch.rand(9, 1, 1, SIZE // 2) for _ in range(2)]
    module = build(device=device)
    both = tuple(a.to(device) for a in angles)
    x = torch.randn(SHAPES["sbhd"], device=device)
    out = module(x, rotary_pos_emb=both)
    q, k, v = (module.qkv(x)).split([HIDDEN, GROUPS * SIZE, GROUPS * SIZE], -1)
    q, k, v = (t.unflatten(-1, (-1, SIZE)) for t in (q, k, v))
    q, k = rope(q, both[0]), rope(k, both[1])
    torch.testing.assert_close(out, module.proj(module.core_attention(q, k, v)))
    assert not torch.allclose(out, module(x, rotary_pos_emb=both[0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True}])
def test_angles_in_half_precision(dtype, options, device):
    module = build(device=device, **options)
    x = torch.randn(SHAPES["sbhd"], device=device)
    angles = torch.rand(9, 1, 1, SIZE, device=device).to(dtype)
    out = module(x, rotary_pos_emb=angles)
    assert torch.equal(out, module(x, rotary_pos_emb=angles.float()))
    assert torch.equal(out, module(x, rotary_pos_emb=(angles, angles.float())))
    assert not torch.allclose(out, module(x))


def test_one_l2_norm_serves_queries_and_keys():
    shared, own = build(qk_norm_type="L2Normalization"), build(qk_norm_type="RMSNorm")
    assert shared.q_norm is shared.k_norm
    assert not [key for key in shared.state_dict() if "norm" in key]
    assert own.q_norm is not own.k_norm
    assert build().q_norm is build().k_norm is None
    again = copy.deepcopy(shared)
    assert again.q_norm is again.k_norm
    x = torch.randn(SHAPES["sbhd"])
    assert torch.equal(again(x), shared(x))


def test_options_of_a_call_reach_the_projections():
    module, x = build(input_layernorm=True), torch.randn(16, 2, HIDDEN, requires_grad=True)
    linears = module.layernorm_qkv, module.proj
    with fp8_autocast(True, DelayedScaling()):
        module(x)
        assert not any(linear._modes.weight_cache for linear in linears)
        module(x, is_first_microbatch=True)
        assert all(linear._modes.weight_cache for linear in linears)
    core, seen = module.core_attention, []
    core.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["checkpoint_core_attention"]), with_kwargs=True
    )
    module(x, checkpoint_core_attention=True)
    module(x)
    assert seen == [True, False]


def test_returns():
    x = torch.randn(SHAPES["sbhd"])
    module = build(return_bias=True, return_layernorm_output=True, input_layernorm=True)
    out, bias, norm = module(x)
    plainly = build(input_layernorm=True)
    plainly.load_state_dict(module.state_dict())
    torch.testing.assert_close(out + bias, plainly(x))
    layer = module.layernorm_qkv
    expected = F.layer_norm(x, (HIDDEN,), layer.layer_norm_weight, layer.layer_norm_bias, 1e-5)
    torch.testing.assert_close(norm, expected)
    _, norm = build(return_layernorm_output=True, input_layernorm=True)(x)
    assert norm.shape == x.shape
    assert isinstance(build(return_layernorm_output=True)(x), torch.Tensor)
    _, bias = build(return_bias=True, bias=False)(x)
    assert bias.numel() == 0


class TestInference:
    def generate(self, module, x, layout, steps, **kwargs):
        params, out, at = InferenceParams(2, 16), [], 0
        time = layout.index("s")
        with torch.no_grad():
            for step in steps:
                part = x.narrow(time, at, step)
                out.append(module(part, inference_params=params, **kwargs))
                params.sequence_len_offset += step
                at += step
        return torch.cat(out, time)

    @pytest.mark.parametrize("layout", ["sbhd", "bshd"])
    @pytest.mark.parametrize("steps", [(1,) * 6, (4, 1, 1), (2, 3, 1)])
    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("window", [None, (2, 0)])
    def test_equals_the_whole_sequence(self, layout, steps, fused, window, device):
        module = build(
            window_size=window,
            qkv_format=layout,
            layer_number=3,
            fuse_qkv_params=fused,
            device=device,
        )
        x = torch.randn((6, 2, HIDDEN) if layout == "sbhd" else (2, 6, HIDDEN), device=device)
        freqs = torch.rand(9, 1, 1, SIZE // 2, device=device)
        actual = self.generate(module, x, layout, steps, rotary_pos_emb=freqs)
        expected = module(x, rotary_pos_emb=freqs)
        torch.testing.assert_close(actual, expected, rtol=1.3e-6, atol=1e-5)

    def test_part_of_a_batch_and_another_generation(self):
        module, x = build(layer_number=1), torch.randn(4, 2, HIDDEN)
        params, expected = InferenceParams(2, 4), module(x)
        with torch.no_grad():
            for _ in range(2):
                for i in range(4):
                    for b in range(2):
                        params.batch_size_offset = b
                        out = module(x[i : i + 1, b : b + 1], inference_params=params)
                        torch.testing.assert_close(
                            out, expected[i : i + 1, b : b + 1], rtol=1.3e-6, atol=1e-5
                        )
                    params.sequence_len_offset += 1
                params.reset()
        keys, values = params.key_value_memory_dict[1]
        assert keys.shape == values.shape == (4, 2, GROUPS, SIZE)

    def test_rejects(self):
        x = torch.randn(4, 2, HIDDEN)
        with torch.no_grad():
            with pytest.raises(ValueError, match="layer_number must be given"):
                build()(x, inference_params=InferenceParams(2, 4))
            for sizes, name, need in (((2, 3), "max_sequence_length", 4), ((1, 4), "max_batch", 2)):
                with pytest.raises(ValueError, match=f"{name}.* must be at least {need}"):
                    build(layer_number=1)(x, inference_params=InferenceParams(*sizes))
            thd = build(layer_number=1, qkv_format="thd")
            with pytest.raises(ValueError, match="must be None with qkv_format 'thd'"):
                thd(x[:, 0], cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32),
                    inference_params=InferenceParams(2, 4))  # fmt: skip
        with pytest.raises(ValueError, match="must be None if gradients are recorded"):
            build(layer_number=1)(x, inference_params=InferenceParams(2, 4))


class TestFP8:
    recipe = DelayedScaling(amax_history_len=4)

    def run(self, module, x, **kwargs):
        for _ in range(2):
            module.zero_grad()
            x.grad = None
            with fp8_autocast(True, self.recipe):
                out = module(x, **kwargs)
            out.square().mean().backward()
        return [out, x.grad, *(p.grad for p in module.parameters())]

    def test_close_to_high_precision(self, device):
        module = build(input_layernorm=True, device=device)
        x = torch.randn(16, 2, HIDDEN, device=device).requires_grad_()
        low = [t.clone() for t in self.run(module, x)]
        module.zero_grad()
        x.grad = None
        out = module(x)
        out.square().mean().backward()
        high = [out, x.grad, *(p.grad for p in module.parameters())]
        for (name, _), a, b in zip(
            [("out", 0), ("x", 0), *module.named_parameters()], low, high, strict=True
        ):
            if "key_bias" in name:  # its true gradient is zero
                continue
            sqnr = 20 * torch.log10(b.norm() / (a - b).norm())
            assert sqnr >= 14, f"{name}: {sqnr}"
            assert not torch.equal(a, b)

    def test_checkpoint_and_microbatch(self):
        module = build(input_layernorm=True)
        x = torch.randn(16, 2, HIDDEN).requires_grad_()
        module._modules["layernorm_qkv"].fp8_state.reset()
        start = copy.deepcopy(module.state_dict())
        found = []
        for kwargs in ({}, {"checkpoint_core_attention": True}, {"is_first_microbatch": True}):
            module.load_state_dict(start)
            found.append([t.clone() for t in self.run(module, x, **kwargs)])
        for a, b, c in zip(*found, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


def test_keys_and_initialisation():
    module = MultiheadAttention(
        HIDDEN,
        HEADS,
        kv_channels=16,
        num_gqa_groups=GROUPS,
        input_layernorm=True,
        init_method=torch.nn.init.ones_,
        output_layer_init_method=torch.nn.init.zeros_,
        params_dtype=torch.bfloat16,
        layernorm_epsilon=0.5,
    )
    shapes = {key: tuple(value.shape) for key, value in module.named_parameters()}
    assert shapes == {
        "layernorm_qkv.layer_norm_weight": (32,),
        "layernorm_qkv.layer_norm_bias": (32,),
        "layernorm_qkv.query_weight": (64, 32),
        "layernorm_qkv.query_bias": (64,),
        "layernorm_qkv.key_weight": (32, 32),
        "layernorm_qkv.key_bias": (32,),
        "layernorm_qkv.value_weight": (32, 32),
        "layernorm_qkv.value_bias": (32,),
        "proj.weight": (32, 64),
        "proj.bias": (32,),
    }
    assert module.layernorm_qkv.eps == 0.5
    assert module.layernorm_qkv.key_weight.eq(1).all()
    assert module.proj.weight.eq(0).all()
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())
    fused = build(attention_type="cross", fuse_qkv_params=True)
    assert sorted(dict(fused.named_parameters())) == sorted(
        f"{name}.{kind}"
        for name in ("query_layer", "key_value", "proj")
        for kind in ("weight", "bias")
    )
    normed = build(attention_type="cross", input_layernorm=True)
    assert "layernorm_query.query_weight" in dict(normed.named_parameters())


def test_heads_are_views_of_the_projection(monkeypatch):
    """Nothing is copied between the projection and attention, nor after it in bshd."""
    module = build(fuse_qkv_params=True, qkv_weight_interleaved=False, qkv_format="bshd")
    seen, core = [], module.core_attention
    monkeypatch.setattr(
        core,
        "forward",
        lambda *args, **more: seen.append(args[:3]) or type(core).forward(core, *args, **more),
    )
    module(torch.randn(SHAPES["bshd"]))
    q, k, v = seen[0]
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    module(torch.randn(SHAPES["bshd"]), rotary_pos_emb=torch.rand(9, 1, 1, SIZE))
    q, k, v = seen[1]  # the projection is not kept alive by the values
    assert all(t.untyped_storage().nbytes() == t.numel() * 4 for t in (q, k, v))


def test_torch_autocast():
    module, x = build(input_layernorm=True), torch.randn(SHAPES["sbhd"], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, rotary_pos_emb=torch.rand(9, 1, 1, SIZE))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"attention_type": "cross", "attn_mask_type": "no_mask"},
        *(pytest.param(o, marks=pytest.mark.long) for o in ({}, {"fuse_qkv_params": True})),
    ],
    ids=str,
)
def test_compiles(options):
    module, x = build(input_layernorm=True, **options), torch.randn(SHAPES["sbhd"])
    other = torch.randn(7, 2, HIDDEN) if "attention_type" in options else None
    freqs = torch.rand(9, 1, 1, SIZE // 2)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found = []
    for each in (module, compiled):
        t = x.clone().requires_grad_()
        out = each(t, None, other, rotary_pos_emb=freqs)
        found.append([out, *torch.autograd.grad(out.square().sum(), [t, *module.parameters()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1.3e-6, atol=1e-5)
