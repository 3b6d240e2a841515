"""MultiLatentAttention against plain PyTorch, with and without a cache, and recomputed."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from checks import assert_same_bits, each_of, in_pairs, sqnr
from graph_models import count_replays
from graph_stand_in import graphs_on_cpu  # noqa: F401
from latent_cases import BATCH, HIDDEN, KV, SHAPES, TOKENS, YARN, N, P, Q, V, build, plain
from layer_kinds import dtype_on, repeatable
from plain_transformer import Plain, compare
from schemes import SCHEMES, chosen
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import apex_te
import apex_te.module.attention.latent as latent
from apex_te import InferenceParams, fp8_autocast, fp8_model_init, make_graphed_callables

NORMS = {
    "rms": {},
    "layer": {"normalization": "LayerNorm"},
    "zero-centred": {"zero_centered_gamma": True},
}
PAIRS = torch.rand(48, 1, 1, P // 2) * 3
FREQS = PAIRS.repeat_interleave(2, -1)


@in_pairs(
    layout=["sbhd", "bshd"],
    q_lora_rank=[None, Q],
    norm=NORMS,
    input_layernorm=[False, True],
    bias=[False, True],
    rope=["none", "interleaved", "half"],
    yarn=[False, True],
    dtype=[torch.float32, torch.bfloat16],
)
def test_equals_plain_pytorch(
    layout, q_lora_rank, norm, input_layernorm, bias, rope, yarn, dtype, device
):
    options = {
        "qkv_format": layout, "input_layernorm": input_layernorm, "bias": bias,
        "rotary_pos_interleaved": rope == "interleaved", **NORMS[norm], **(YARN if yarn else {}),
    }  # fmt: skip
    module = build(q_lora_rank, params_dtype=dtype, device=device, **options)
    freqs = {"none": None, "interleaved": FREQS, "half": torch.cat((PAIRS, PAIRS), -1)}[rope]
    on_device = None if freqs is None else freqs.to(device)
    compare(
        module,
        lambda m, x: m(x, rotary_pos_emb=on_device),
        lambda p, x: plain(p, x, freqs, device=Plain.device, **options),
        torch.randn(SHAPES[layout]).to(dtype),
    )


def train(module, recipe, device, layout="sbhd", steps=2, mask=None, **call):
    """Outputs and all gradients of steps of two microbatches, both in flight."""
    torch.manual_seed(5)
    found = []
    freqs = FREQS.to(device)
    for _ in range(steps):
        data = torch.randn(2, 2, *SHAPES[layout]).to(device, dtype_on(device))
        pairs = []
        for index, x in enumerate(data[0]):
            with fp8_autocast(recipe is not None, recipe):
                x = x.clone().requires_grad_()
                more = {key: value and index == 0 for key, value in call.items()}
                pairs.append((x, module(x, mask, rotary_pos_emb=freqs, **more)))
        for (x, out), dy in zip(pairs, data[1], strict=True):
            out.backward(dy)
            found += [out.detach(), x.grad]
        found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return found


RECIPES = {"bf16 or fp32": None, **SCHEMES}


@each_of(
    name=RECIPES,
    q_lora_rank=[None, Q],
    layout=["sbhd", "bshd"],
    mask=["causal", "no_mask", "padding_causal"],
    cached=[False, True],
)
def test_recomputed_projections_give_the_same_bits(name, q_lora_rank, layout, mask, cached, device):
    """In FP8, too, with scales that have moved before the backward, and cached weights."""
    call = {"is_first_microbatch": True} if cached else {}
    if mask == "padding_causal":
        call["mask"] = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.bool, device=device)
        call["mask"][0, ..., 3:] = True
    found = []
    for recompute in (False, True):
        module = build(
            q_lora_rank, qkv_format=layout, recompute_up_proj=recompute, attn_mask_type=mask,
            params_dtype=dtype_on(device), device=device,
        )  # fmt: skip
        with repeatable(device):
            found.append(train(module, RECIPES[name], device, layout, **call))
    assert all(torch.isfinite(x.float()).all() for x in found[0])
    assert_same_bits(*found)


def test_recomputed_projections_are_not_saved(device, monkeypatch):
    """No memory of queries, keys and values lives between forward and backward."""
    heads, alive = apex_te.MultiLatentAttention.heads, []

    def seen(self, *args):
        made = heads(self, *args)
        alive.extend(x.untyped_storage()._weak_ref() for x in made)
        return made

    def living():
        return sum(not torch.UntypedStorage._expired(ref) for ref in alive)

    monkeypatch.setattr(apex_te.MultiLatentAttention, "heads", seen)
    size = {"dtype": dtype_on(device), "device": device}
    for recompute in (False, True):
        module = apex_te.MultiLatentAttention(
            HIDDEN, 2, Q, KV, 16, 8, 24, qkv_format="bshd", recompute_up_proj=recompute,
            params_dtype=size["dtype"], device=device,
        )  # fmt: skip
        alive.clear()
        x = torch.randn(2, 6, HIDDEN, **size).requires_grad_()
        out = module(x)
        assert (len(alive), living()) == (3, 0 if recompute else 3)
        first = torch.autograd.grad(out.sum(), x, retain_graph=True)
        assert len(alive) == (6 if recompute else 3)
        assert_same_bits(first, torch.autograd.grad(out.sum(), x))


@each_of(name=SCHEMES, q_lora_rank=[None, Q], bias=[False, True], recompute=[False, True])
def test_projections_run_in_fp8(name, q_lora_rank, bias, recompute, device):
    """Results and gradients have the noise of FP8, a layer's (18 and 12 dB), and not more."""
    module = build(
        q_lora_rank, input_layernorm=True, bias=bias, recompute_up_proj=recompute,
        params_dtype=dtype_on(device), device=device,
    )  # fmt: skip
    exact = train(copy.deepcopy(module), None, device)
    noisy = train(module, SCHEMES[name], device)
    half = len(exact) // 2  # in the second step delayed scales fit
    for index, (want, got) in enumerate(zip(exact[half:], noisy[half:], strict=True)):
        is_output = index in (0, 2)
        assert sqnr(want, got) > (18 if is_output else 12), (want.shape, sqnr(want, got))
        assert not is_output or sqnr(want, got) < 40


def split_rows(x, layout):
    return x if layout == "thd" else x.unbind(layout.index("b"))


@in_pairs(
    layout=["sbhd", "bshd"],
    q_lora_rank=[None, Q],
    window=[None, (3, 0)],
    rope=[False, True],
    yarn=[False, True],
    weights=["plain", "fp8"],
)
@torch.no_grad()
def test_cached_latents(layout, q_lora_rank, window, rope, yarn, weights, device, monkeypatch):
    """Chunks of one to many tokens equal a forward of all; the cache has latents only."""
    absorbed, attend = [], latent.attend_to_latents

    def seen(*args):
        absorbed.append(args[1].shape[time])
        return attend(*args)

    monkeypatch.setattr(latent, "attend_to_latents", seen)
    options = {"qkv_format": layout, "window_size": window, **(YARN if yarn else {})}
    with fp8_model_init(weights == "fp8", "tensorwise"):
        module = build(q_lora_rank, layer_number=3, device=device, **options)
    freqs = FREQS.to(device) if rope else None
    time, chunks = layout.index("s"), [4, 1, 1, 6, 30, 2]
    shape = [BATCH, BATCH, HIDDEN]
    shape[time] = sum(chunks)
    x = torch.randn(shape, device=device)
    expected = module.eval()(x, rotary_pos_emb=freqs)
    params, found = InferenceParams(BATCH, 48), []
    for part in x.split(chunks, time):
        found.append(module(part, rotary_pos_emb=freqs, inference_params=params))
        params.sequence_len_offset += part.shape[time]
    torch.testing.assert_close(torch.cat(found, time), expected, rtol=1e-5, atol=1e-5)
    kept = params.key_value_memory_dict[3]
    assert sum(x.numel() for x in kept) == BATCH * 48 * (KV + P)
    assert absorbed == [1, 1, 6, 2]  # the prompt and 30 tokens have keys and values


STEPS = ({"a": 4, "b": 2}, {"a": 1, "b": 1}, {"b": 3, "c": 5}, {"c": 1, "b": 1, "a": 6}, {"a": 1})


@in_pairs(
    layout=["sbhd", "bshd", "thd"],
    q_lora_rank=[None, Q],
    kind=["causal", "padding_causal"],
    absorbs=[True, False],
)
@torch.no_grad()
def test_cached_latents_of_sequences_of_several_lengths(
    layout, q_lora_rank, kind, absorbs, device, monkeypatch
):
    monkeypatch.setattr(latent, "is_absorbing_faster", lambda *sizes: absorbs)
    module = build(
        q_lora_rank, qkv_format=layout, layer_number=1, attn_mask_type=kind, device=device
    ).eval()
    whole = build(q_lora_rank, qkv_format="bshd", device=device).eval()
    freqs = FREQS.to(device)
    texts = {name: torch.randn(12, HIDDEN, device=device) for name in "abc"}
    expected = {n: whole(x[None], rotary_pos_emb=freqs)[0] for n, x in texts.items()}
    params, at = InferenceParams(3, 12), {}
    for step in STEPS:
        at = {name: at.get(name, 0) for name in step}
        params.pre_step(OrderedDict(step))
        parts = [texts[name][at[name] : at[name] + count] for name, count in step.items()]
        x = torch.cat(parts)
        if layout != "thd":
            x = torch.nn.utils.rnn.pad_sequence(parts, layout == "bshd", 7.0)
        out = module(x, rotary_pos_emb=freqs, inference_params=params)
        rows = out.split([*step.values()]) if layout == "thd" else split_rows(out, layout)
        for (name, count), row in zip(step.items(), rows, strict=True):
            want = expected[name][at[name] : at[name] + count]
            torch.testing.assert_close(row[:count], want, rtol=1e-5, atol=1e-5)
            at[name] += count


@torch.no_grad()
def test_first_tokens_attend_in_fp8_and_others_to_latents(device):
    """A prompt gives the bits of a call without a cache; later tokens are within FP8's noise."""
    module = build(layer_number=1, params_dtype=dtype_on(device), device=device).eval()
    x = torch.randn(12, BATCH, HIDDEN).to(device, dtype_on(device))
    params = InferenceParams(BATCH, 16)
    with fp8_autocast(True, chosen("tensorwise")["tensorwise"]):
        prompt = module(x[:11], inference_params=params)
        assert_same_bits([prompt], [module(x[:11])])
        params.sequence_len_offset = 11
        last = module(x[11:], inference_params=params)
        assert 18 < sqnr(module(x)[11:], last) < 60


@pytest.mark.parametrize("kind", ["padding_causal", "padding", "arbitrary"])
def test_masks(kind, device):
    options = {"qkv_format": "bshd", "attn_mask_type": kind}
    mask = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.bool)
    mask[0, ..., 3:] = True
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    if kind == "arbitrary":
        mask = hidden = causal.roll(1, 1) & ~torch.eye(TOKENS, dtype=torch.bool)
        mask = mask[None, None]
    else:
        hidden = mask | mask.transpose(-1, -2)
        hidden = hidden | causal if kind == "padding_causal" else hidden
    compare(
        build(device=device, **options),
        lambda m, x: m(x, mask.to(device), rotary_pos_emb=FREQS.to(device)),
        lambda p, x: plain(p, x, FREQS, hidden, **options),
        torch.randn(SHAPES["bshd"]),
    )


def test_packed_sequences(device):
    """Positions begin anew in each sequence, and no token sees another sequence."""
    lengths = [3, 1, 6]
    starts = torch.tensor([0, 3, 4, 10], dtype=torch.int32, device=device)
    packed, alone = (build(qkv_format=form, device=device) for form in ("thd", "bshd"))
    x, freqs = torch.randn(10, HIDDEN, device=device), FREQS.to(device)
    out = packed(x, rotary_pos_emb=freqs, cu_seqlens_q=starts, max_seqlen_q=6, max_seqlen_kv=6)
    for part, got in zip(x.split(lengths), out.split(lengths), strict=True):
        want = alone(part[None], rotary_pos_emb=freqs)[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.cover(0)
@pytest.mark.parametrize(
    ("name", "recompute"), [("bf16 or fp32", True), ("bf16 or fp32", False), ("tensorwise", True)]
)
def test_compiles_in_one_graph(name, recompute, device):
    recipe = RECIPES[name]
    eager = build(params_dtype=dtype_on(device), device=device)
    module = build(recompute_up_proj=recompute, params_dtype=dtype_on(device), device=device)

    def call(*args, **options):
        with fp8_autocast(recipe is not None, recipe):
            return module(*args, **options)

    call.parameters = module.parameters
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    compiled.parameters = module.parameters
    with repeatable(device):
        expected = train(eager, recipe, device, steps=1)
        found = train(compiled, None, device, steps=1)
    for want, got in zip(expected, found, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2 if recipe else 1e-5, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bf16 or fp32", "delayed", "blockwise"])
def test_checkpoint_of_the_module(name, reentrant, device):
    found = []
    for way in ("plain", "checkpoint", "recompute in checkpoint"):
        recompute = way.startswith("recompute")
        module = build(recompute_up_proj=recompute, params_dtype=dtype_on(device), device=device)

        def call(*args, module=module, **options):
            return apex_te.checkpoint(module, *args, use_reentrant=reentrant, **options)

        call.parameters = module.parameters
        with repeatable(device):
            found.append(train(module if way == "plain" else call, RECIPES[name], device))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["bf16 or fp32", "delayed", "blockwise"])
def test_steps_by_a_cuda_graph(name, recompute, device, request):
    """Replays give the bits of eager steps; on the CPU a stand-in replaces CUDA graphs."""
    if device.type == "cpu":
        request.getfixturevalue("graphs_on_cpu")
    recipe, found, freqs = RECIPES[name], [], FREQS.to(device)
    with repeatable(device):
        for graphed in (False, True):
            module = build(
                recompute_up_proj=recompute, params_dtype=dtype_on(device), device=device
            )
            if graphed:
                x = torch.randn(SHAPES["sbhd"]).to(device, dtype_on(device)).requires_grad_()
                region = {} if recipe is None else {"fp8_enabled": True, "fp8_recipe": recipe}
                make_graphed_callables(
                    module, (x,), sample_kwargs={"rotary_pos_emb": freqs}, **region
                )
            seen = []
            for index in range(3):
                torch.manual_seed(index)
                x, dy = torch.randn(2, *SHAPES["sbhd"]).to(device, dtype_on(device))
                x.requires_grad_()
                with fp8_autocast(recipe is not None, recipe):
                    out = module(x, rotary_pos_emb=freqs)
                out.backward(dy)
                seen += [out.detach().clone(), x.grad.clone()]
            found.append([*seen, *[p.grad.clone() for p in module.parameters()]])
            assert not graphed or count_replays(module) == 3
    assert_same_bits(*found)


def test_recomputed_under_autocast(device):
    """Backward runs outside of the region, and repeats its dtype."""
    found = []
    for recompute in (False, True):
        module = build(recompute_up_proj=recompute, device=device)
        torch.manual_seed(1)
        x = torch.randn(SHAPES["sbhd"]).to(device).requires_grad_()
        with repeatable(device):
            with torch.autocast(device.type, torch.bfloat16):
                out = module(x, rotary_pos_emb=FREQS.to(device))
            out.float().square().sum().backward()
        assert out.dtype is torch.bfloat16
        found.append([out, x.grad, *[p.grad for p in module.parameters()]])
    assert_same_bits(*found)


@pytest.mark.parametrize("recompute", [False, True])
def test_traced_copied_and_without_memory(recompute):
    module, x = build(recompute_up_proj=recompute), torch.randn(SHAPES["sbhd"])
    expected = module(x, rotary_pos_emb=FREQS)
    graph = make_fx(lambda x: module(x, rotary_pos_emb=FREQS))(x)
    program = torch.export.export(module, (x,), {"rotary_pos_emb": FREQS}).module()
    found = [
        graph(x), program(x, rotary_pos_emb=FREQS),
        copy.deepcopy(module)(x, rotary_pos_emb=FREQS),
        pickle.loads(pickle.dumps(module))(x, rotary_pos_emb=FREQS),
    ]  # fmt: skip
    assert_same_bits(found, [expected] * 4)
    for size in (SHAPES["sbhd"], (0, BATCH, HIDDEN)):
        where = "meta" if size[0] else "cpu"
        leaf = torch.empty(size, device=where, requires_grad=True)
        copy.deepcopy(module).to(where)(leaf, rotary_pos_emb=FREQS.to(where)).sum().backward()
        assert leaf.grad.shape == leaf.shape
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert module(mode.from_tensor(x)).shape == x.shape


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["bf16 or fp32", "blockwise"])
def test_batch_invariant(name, recompute, device):
    """A sequence has the same bits alone and among others, and refuses what differs."""
    module = build(
        recompute_up_proj=recompute, layer_number=1, params_dtype=dtype_on(device), device=device
    )
    x, freqs = torch.randn(12, 3, HIDDEN).to(device, dtype_on(device)), FREQS.to(device)

    def call(x, **options):
        with fp8_autocast(RECIPES[name] is not None, RECIPES[name]):
            return module(x, rotary_pos_emb=freqs, **options)

    with apex_te.batch_invariant():
        together = call(x)
        assert_same_bits([call(x[:, 1:2]), call(x[:5])], [together[:, 1:2], together[:5]])
        with pytest.raises(NotImplementedError, match="inference_params must be None under batch"):
            call(x, inference_params=InferenceParams(3, 16))


def test_in_a_transformer_layer(device):
    """The layer takes the module for its attention, and adds the residual."""
    attention = build(input_layernorm=True, layer_number=1, device=device)
    layer = apex_te.TransformerLayer(
        HIDDEN, 48, 4, hidden_dropout=0.0, normalization="RMSNorm", self_attention=attention,
        device=device,
    )  # fmt: skip
    assert layer.self_attention is attention
    x, freqs = torch.randn(SHAPES["sbhd"], device=device), FREQS.to(device)
    found = layer(x, rotary_pos_emb=freqs)
    hidden = x + attention(x, rotary_pos_emb=freqs)
    torch.testing.assert_close(found, hidden + layer.layernorm_mlp(hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"apply_residual_connection_post_layernorm": True}])
def test_a_layer_takes_an_attention_module(options, device):
    """It equals the layer that makes one with the same options."""
    module = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": device}
    made = apex_te.TransformerLayer(HIDDEN, 48, 4, **module, **options)
    attention = apex_te.MultiheadAttention(
        HIDDEN, 4, attention_dropout=0.0, input_layernorm=True, device=device,
        return_layernorm_output=bool(options),
    )  # fmt: skip
    given = apex_te.TransformerLayer(HIDDEN, 48, 4, **module, **options, self_attention=attention)
    given.load_state_dict(made.state_dict())
    x = torch.randn(SHAPES["sbhd"], device=device)
    torch.testing.assert_close(given(x), made(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "attention", "message"),
    [
        ({}, {"input_layernorm": False}, "input_layernorm True with the layer's options, got F"),
        ({"output_layernorm": True}, {}, "input_layernorm False with the layer's options, got T"),
        ({"attn_input_format": "bshd"}, {}, "qkv_format 'bshd' with .* got 'sbhd'"),
        (
            {"apply_residual_connection_post_layernorm": True}, {},
            "return_layernorm_output True with .* got False",
        ),
    ],
)  # fmt: skip
def test_a_layer_refuses_an_attention_module(options, attention, message):
    module = build(**{"input_layernorm": True, **attention})
    with pytest.raises(ValueError, match=f"^TransformerLayer: self_attention must have {message}"):
        apex_te.TransformerLayer(HIDDEN, 48, 4, self_attention=module, **options)
    with pytest.raises(TypeError, match=r"self_attention must be a MultiLatentAttention.* got Lin"):
        apex_te.TransformerLayer(HIDDEN, 48, 4, self_attention=torch.nn.Linear(2, 2))


def test_loads_megatrons_separate_down_projections():
    module = build(bias=True)
    state = module.state_dict()
    for kind in ("weight", "bias"):
        joined = state.pop(f"linear_qkv_down_proj.{kind}")
        state[f"linear_q_down_proj.{kind}"], state[f"linear_kv_down_proj.{kind}"] = joined.split(
            [Q, KV + P]
        )
    other = apex_te.MultiLatentAttention(HIDDEN, 4, Q, KV, N, P, V, bias=True)
    other.load_state_dict(state)
    assert_same_bits([*other.parameters()], [*module.parameters()])
    assert "linear_q_down_proj.weight" in state  # the caller's own is as it was


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_pos_emb_head_dim": 7}, "qk_pos_emb_head_dim must be even, got 7"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be at least 1, got 0"),
        ({"q_lora_rank": 0}, "q_lora_rank must be at least 1, got 0"),
        ({"normalization": "rms"}, "normalization must be one of LayerNorm, RMSNorm, got 'rms'"),
        ({"set_parallel_mode": True, "tp_size": 3}, "multiple of the 3 tensor-parallel ranks"),
        ({"qkv_format": "hsbd"}, "qkv_format must be"),
        ({"layernorm_epsilon": -1.0}, "layernorm_epsilon must be"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=f"^MultiLatentAttention: .*{message}"):
        apex_te.MultiLatentAttention(HIDDEN, 4, **options)


def test_bad_calls():
    module = build(layer_number=1).eval()
    x = torch.randn(SHAPES["sbhd"])
    for call, message in (
        ({"rotary_pos_emb": torch.rand(16, 1, 1, 2 * P)}, "must be one tensor of angles with 8"),
        ({"rotary_pos_emb": (FREQS, FREQS + 1)}, "rotary_pos_emb must be one tensor"),
        ({"attention_mask": x}, "attention_mask"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            module(x, **call)
    with pytest.raises(ValueError, match=r"MultiLatentAttention: hidden_states must have shape"):
        module(x[0])
    out = module(x.requires_grad_(), inference_params=InferenceParams(BATCH, 16))
    with pytest.raises(RuntimeError, match="inference_params must be None for a backward"):
        out.sum().backward()
    with pytest.raises(ValueError, match="layer_number must be given"):
        build()(x, inference_params=InferenceParams(BATCH, 16))
