"""TransformerLayer: dropouts, checkpoints, KV cache, state, compilation, errors."""

import copy

import pytest
import torch
from plain_transformer import FFN, HEADS, HIDDEN, SHAPES, SIZE
from plain_transformer import build_layer as build
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from apex_te import fp8_autocast
from apex_te.distributed import CudaRNGStatesTracker, checkpoint
from apex_te.module.attention.inference_params import InferenceParams
from apex_te.module.transformer_layer import TransformerLayer
from apex_te.recipe import DelayedScaling

POST = {"apply_residual_connection_post_layernorm": True}
BERT = {**POST, "output_layernorm": True}
LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
RECIPE = DelayedScaling(amax_history_len=4)


class TestDropout:
    def test_hidden_dropout(self, device):
        """The result is the residual where an element of the MLP's result was dropped."""
        torch.manual_seed(0)
        layer = build(hidden_dropout=0.25, device=device)
        with torch.no_grad():
            layer.self_attention.proj.weight.zero_()
            layer.self_attention.proj.bias.zero_()
        x = torch.randn(64, 8, HIDDEN, device=device)
        branch = layer.eval()(x) - x
        added = layer.train()(x) - x
        dropped = added.abs() < 1e-6
        assert abs(dropped.float().mean().item() - 0.25) < 0.02
        torch.testing.assert_close(added[~dropped], branch[~dropped] / 0.75, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
    @pytest.mark.parametrize("rate", [0.5, 1.0])
    def test_drop_path_is_per_sample(self, layout, rate, device):
        """Each sample skips a branch as a whole: 4 results are possible for each."""
        torch.manual_seed(1)
        layer = build(drop_path_rate=rate, attn_input_format=layout, device=device)
        if layout == "thd":
            x = torch.randn(4 * 16, HIDDEN, device=device)
            kwargs = {"cu_seqlens_q": torch.arange(0, 65, 4, dtype=torch.int32, device=device)}
        else:
            x = torch.randn((4, 16, HIDDEN) if layout == "sbhd" else (16, 4, HIDDEN), device=device)
            kwargs = {}

        def samples(t):
            if layout == "sbhd":
                return t.transpose(0, 1)
            return t.view(16, 4, HIDDEN)

        out = samples(layer(x, **kwargs))
        if rate == 1.0:
            assert torch.equal(out, samples(x))
            return
        wanted = []
        for attention in (0.0, 2.0):
            y = layer.self_attention(x, **kwargs)
            y = x + attention * sum(y)
            mlp = sum(layer.layernorm_mlp(y))
            wanted += [samples(y + factor * mlp) for factor in (0.0, 2.0)]
        seen = set()
        for i in range(16):
            close = [torch.allclose(out[i], w[i], rtol=1e-4, atol=1e-4) for w in wanted]
            assert any(close)
            seen.add(close.index(True))
        assert len(seen) == 4
        plainly = build(attn_input_format=layout, device=device)
        plainly.load_state_dict(layer.state_dict())
        expected = plainly(x, **kwargs)
        torch.testing.assert_close(layer.eval()(x, **kwargs), expected, rtol=1e-4, atol=1e-4)

    def test_cross_attention_is_dropped_too(self):
        layer = build(drop_path_rate=1.0, layer_type="decoder")
        x = torch.randn(SHAPES["sbhd"])
        assert torch.equal(layer(x, encoder_output=torch.randn(7, 2, HIDDEN)), x)

    def test_attention_dropout_draws_from_the_tracker(self):
        if torch.cuda.is_available():
            pytest.skip("the tracker follows the GPU's generator where there is one")
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 3)
        layer = build(attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
        x, before = torch.randn(SHAPES["sbhd"]), torch.get_rng_state()
        first = layer(x)
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.equal(layer(x), first)


@pytest.mark.parametrize("which", ["ours", True, False, "core"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("options", [{}, {**LLAMA, "drop_path_rate": 0.2}], ids=str)
def test_checkpoint_is_bitwise(which, fp8, options):
    """Of the layer or of core attention, with dropouts; ours and PyTorch's."""
    start = build(hidden_dropout=0.2, attention_dropout=0.2, **options)

    def run(which):
        layer = copy.deepcopy(start)
        found = []
        for step in range(2):
            torch.manual_seed(step)
            x = torch.randn(16, 2, HIDDEN, requires_grad=True)
            with fp8_autocast(fp8, RECIPE):
                if which is None:
                    out = layer(x)
                elif which == "core":
                    out = layer(x, checkpoint_core_attention=True)
                elif which == "ours":
                    out = checkpoint(layer, x)
                else:
                    out = torch_checkpoint(layer, x, use_reentrant=which)
            out.square().mean().backward()
            found += [out, x.grad, *(p.grad.clone() for p in layer.parameters())]
        return [*found, *layer.state_dict().values()]

    for a, b in zip(run(None), run(which), strict=True):
        assert torch.equal(a, b)


class TestInference:
    @pytest.mark.parametrize("layout", ["sbhd", "bshd"])
    @pytest.mark.parametrize("steps", [(1,) * 6, (4, 2)])
    def test_layers_share_the_parameters(self, layout, steps, device):
        layers = [
            build(attn_input_format=layout, layer_number=i, device=device).eval() for i in (1, 2)
        ]
        time = layout.index("s")
        x = torch.randn((6, 2, HIDDEN) if layout == "sbhd" else (2, 6, HIDDEN), device=device)
        freqs = torch.rand(9, 1, 1, SIZE // 2, device=device)
        expected = x
        for layer in layers:
            expected = layer(expected, rotary_pos_emb=freqs)
        params, out, at = InferenceParams(2, 6), [], 0
        with torch.no_grad():
            for step in steps:
                y = x.narrow(time, at, step)
                for layer in layers:
                    y = layer(y, inference_params=params, rotary_pos_emb=freqs)
                out.append(y)
                at += step
                params.sequence_len_offset += step
        torch.testing.assert_close(torch.cat(out, time), expected, rtol=1.3e-6, atol=1e-5)
        assert sorted(params.key_value_memory_dict) == [1, 2]


def test_keys_hints_and_initialisation():
    layer = TransformerLayer(
        HIDDEN, FFN, HEADS, layernorm_epsilon=0.5, init_method=torch.nn.init.ones_,
        output_layer_init_method=torch.nn.init.zeros_, params_dtype=torch.bfloat16,
        kv_channels=16, seq_length=8, micro_batch_size=2, attention_softmax_in_fp32=True,
        output_layernorm=True, layer_type="decoder", name="layer",
    )  # fmt: skip
    keys = {key.split(".")[0] for key in layer.state_dict()}
    assert keys == {"self_attention", "inter_attention", "layernorm_mlp", "layernorm"}
    assert layer.self_attention.qkv.query_weight.eq(1).all()
    assert layer.self_attention.proj.weight.eq(0).all()
    assert layer.layernorm_mlp.fc1_weight.eq(1).all()
    assert layer.layernorm_mlp.fc2_weight.eq(0).all()
    assert layer.self_attention.proj.weight.shape == (HIDDEN, HEADS * 16)
    assert layer.layernorm.eps == layer.layernorm_mlp.eps == 0.5
    assert layer.inter_attention.layernorm_query.eps == 0.5
    assert all(p.dtype == torch.bfloat16 for p in layer.parameters())
    assert layer.self_attention.proj.name == "layer.self_attention.proj"
    meta = build(device="meta")
    assert all(p.is_meta for p in meta.parameters())
    meta.to_empty(device="cpu")
    for module in meta.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert torch.isfinite(meta(torch.randn(SHAPES["sbhd"]))).all()


def test_torch_autocast():
    for dropout in (0.0, 0.1):
        layer, x = build(hidden_dropout=dropout), torch.randn(SHAPES["sbhd"], requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
        high, low = layer.eval()(x), None
        with torch.autocast("cpu", torch.bfloat16):
            low = layer(x)
        torch.testing.assert_close(low.float(), high, rtol=5e-2, atol=5e-2)


def test_frozen_parts():
    layer, x = build(), torch.randn(SHAPES["sbhd"])
    layer.requires_grad_(False)
    layer.layernorm_mlp.fc2_weight.requires_grad_(True)
    layer(x).sum().backward()
    assert [n for n, p in layer.named_parameters() if p.grad is not None] == [
        "layernorm_mlp.fc2_weight"
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"layer_type": "decoder", **LLAMA},
        *(pytest.param(options, marks=pytest.mark.long) for options in ({}, BERT)),
    ],
    ids=str,
)
def test_compiles(options):
    layer, x = build(**options), torch.randn(SHAPES["sbhd"])
    other = torch.randn(7, 2, HIDDEN) if "layer_type" in options else None
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for each in (layer, compiled):
        t = x.clone().requires_grad_()
        out = each(t, encoder_output=other)
        found.append([out, *torch.autograd.grad(out.square().mean(), [t, *layer.parameters()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"set_parallel_mode": True, "tp_size": 3}, ValueError, "must be a multiple of the 3"),
        ({"hidden_dropout": 1.5}, ValueError, "hidden_dropout must be from 0 to 1, got 1.5"),
        ({"drop_path_rate": -0.5}, ValueError, "drop_path_rate must be from 0 to 1"),
        ({"parallel_attention_mlp": True, **POST}, ValueError, "parallel_attention_mlp must be"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, ValueError,
         "parallel_attention_mlp must be False with layer_type 'decoder'"),
    ],
)  # fmt: skip
def test_rejects_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        build(**kwargs)


def test_rejects_inputs():
    x = torch.randn(SHAPES["sbhd"])
    with pytest.raises(ValueError, match="encoder_output and what begins with enc_dec must be"):
        build()(x, encoder_output=x)
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"must be a tuple \(queries, keys\) .* got \[2, 1, 1, 4\]"
    ):
        build(layer_type="decoder")(x, encoder_output=x, enc_dec_attn_mask=mask[..., 1:])
    build().set_tensor_parallel_group(None)
