"""MultiheadAttention: KV cache, FP8, state, compilation, errors."""

import copy

import pytest
import torch
from plain_transformer import GROUPS, HEADS, HIDDEN, SHAPES, SIZE
from plain_transformer import build_attention as build

from apex_te import fp8_autocast
from apex_te.module.attention.inference_params import InferenceParams
from apex_te.module.attention.multihead import MultiheadAttention
from apex_te.recipe import DelayedScaling


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
        with pytest.raises(ValueError, match="must be None where gradients are recorded"):
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


def test_state_and_deferred_initialisation():
    module, x = build(input_layernorm=True), torch.randn(SHAPES["sbhd"])
    other = MultiheadAttention(
        HIDDEN, HEADS, num_gqa_groups=GROUPS, input_layernorm=True, attention_dropout=0.0,
        device="meta",
    )  # fmt: skip
    assert all(p.is_meta for p in other.parameters())
    other.to_empty(device="cpu").load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))
    assert torch.equal(copy.deepcopy(module)(x), module(x))


def test_main_grad():
    module, x = build(fuse_qkv_params=True), torch.randn(SHAPES["sbhd"])
    expected = torch.autograd.grad(module(x).sum(), [module.qkv.weight, module.proj.weight])
    fused = build(fuse_qkv_params=True, fuse_wgrad_accumulation=True)
    fused.load_state_dict(module.state_dict())
    for linear in (fused.qkv, fused.proj):
        linear.weight.main_grad = torch.ones_like(linear.weight)
    fused(x).sum().backward()
    for linear, grad in zip((fused.qkv, fused.proj), expected, strict=True):
        torch.testing.assert_close(linear.weight.main_grad, grad + 1)
    with pytest.raises(ValueError, match="fuse_qkv_params must be True with fuse_wgrad"):
        build(fuse_wgrad_accumulation=True)


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


@pytest.mark.long
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


def test_without_gradients():
    module, x = build(input_layernorm=True), torch.randn(SHAPES["sbhd"])
    expected = module(x)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"tp_size": 2.5, "set_parallel_mode": True}, TypeError, "tp_size must be an int"),
        ({"set_parallel_mode": True, "tp_size": 3}, ValueError, "must be a multiple of the 3"),
        ({"sequence_parallel": 1}, TypeError, "sequence_parallel must be a bool, got int"),
        ({"tp_group": object()}, TypeError, "tp_group must be a .*ProcessGroup"),
        ({"normalization": "Batch", "input_layernorm": True}, ValueError, "normalization must be"),
    ],
)
def test_rejects_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        build(**kwargs)


def test_rejects_inputs():
    x = torch.randn(SHAPES["sbhd"])
    with pytest.raises(ValueError, match="num_attention_heads must divide hidden_size=32, got 5"):
        MultiheadAttention(HIDDEN, 5)
    with pytest.raises(ValueError, match="encoder_output must be given in cross attention"):
        build(attention_type="cross")(x)
    with pytest.raises(ValueError, match="encoder_output must be given in cross attention"):
        build()(x, None, x)
    with pytest.raises(TypeError, match=r"rotary_pos_emb must be a tensor of angles or two .* int"):
        build()(x, rotary_pos_emb=3)
    with pytest.raises(TypeError, match=r"tp_group must be a .*ProcessGroup"):
        build().set_tensor_parallel_group(object())
