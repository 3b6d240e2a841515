"""``fuse_latent_attention``: models are the plain ones but for rounding, in files bit for bit."""

import copy
import importlib
import io
import pickle

import pytest
import torch
from checks import assert_same_bits, each_of, sqnr
from schemes import chosen
from tiny_models import tiny, transformers
from torch import nn

import apex_te
from apex_te import fp8_autocast, from_torch, fuse_latent_attention
from apex_te.integrations.latent_attention import FusedLatentAttention

pytestmark = pytest.mark.filterwarnings("ignore")
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
# By name: family, class, and what its configuration has; "V2" rotates complex numbers.
MODELS = {
    "V3": ("DeepseekV3", {"rope_interleave": True, "rope_parameters": YARN}),
    "V3 half": ("DeepseekV3", {"rope_interleave": False, "attention_bias": True}),
    "V3 q_proj": ("DeepseekV3", {"q_lora_rank": None}),
    "V2": ("DeepseekV2", {"num_experts_per_tok": 2}),
    "V2 q_proj": ("DeepseekV2", {"num_experts_per_tok": 2, "q_lora_rank": None}),
    "GLM": ("Glm4MoeLite", {}),
    "MiniCPM3": ("MiniCPM3", {}),
    "Youtu": ("Youtu", {}),
    "AXK1": ("AXK1", {}),
    "LongCat": ("LongcatFlash", {}),
}
ROTATIONS = {"V3 half": "half", "MiniCPM3": "half", "V2": "complex", "V2 q_proj": "complex"}
IDS = torch.arange(24).view(2, 12) % 37 + 2
PADDED = torch.ones(2, 12, dtype=torch.int64)
PADDED[0, :4] = 0


def build(name, implementation="sdpa", dtype=torch.float32):
    """A model of two layers in evaluation, whose vectors have values that tell them apart."""
    family, values = MODELS[name]
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = tiny(kind.config_class)
    config.update(values)
    config._attn_implementation = implementation
    torch.manual_seed(4)
    model = kind(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "self_attn" in key:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    return model.to(dtype)


def fused(plain, convert=True, **options):
    model = copy.deepcopy(plain)
    model = from_torch(model, fuse=True) if convert else model
    assert fuse_latent_attention(model, **options) is model
    return model


def converted(model):
    return [m for m in model.modules() if isinstance(m, FusedLatentAttention)]


def step(model, mask=None, ids=IDS):
    """Logits, and the gradient of each parameter under its original name."""
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask).logits
    logits.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), apex_te.integrations.key_map(model).to_original(grads)


@each_of(
    name=MODELS,
    implementation=["sdpa", "eager"],
    convert=[False, True],
    recompute=[False, True],
    padded=[False, True],
)
def test_logits_and_gradients_are_the_plain_models(
    name, implementation, convert, recompute, padded
):
    mask = PADDED if padded else None
    plain = build(name, implementation)
    model = fused(plain, convert, recompute_up_proj=recompute)
    rotation = ROTATIONS.get(name, "interleaved")
    assert [m.rotation for m in converted(model)] == [rotation] * len(converted(model)) != []
    expected, found = step(plain, mask), step(model, mask)
    seen = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(found[0][seen], expected[0][seen], rtol=1e-5, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for key, grad in expected[1].items():
        error = (found[1][key] - grad).abs().max()
        assert error <= 2e-5 * grad.abs().max() + 1e-9, (key, error)


@pytest.mark.parametrize("name", MODELS)
def test_files_are_the_plain_models(name, tmp_path):
    """Bit for bit, and of a kind that a plain model loads."""
    plain = build(name)
    model = fused(plain)
    expected, found = plain.state_dict(), model.state_dict()
    assert expected.keys() <= found.keys()
    assert_same_bits([found[key] for key in expected], [*expected.values()])
    model.save_pretrained(tmp_path)
    again, info = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_bits([again(input_ids=IDS).logits], [plain(input_ids=IDS).logits])


def test_down_projections_are_one_product():
    """With ``fuse=True`` the norm before it, too, and the norm of the queries' latent."""
    model = fused(build("V3"))
    attention = converted(model)[0]
    kinds = {name: type(m).__name__ for name, m in attention.named_children()}
    joined = [name for name, kind in kinds.items() if kind == "JoinedLinear"]
    assert len(joined) == 2
    assert kinds["q_a_proj"] == kinds["kv_a_proj_with_mqa"] == "JointPart"
    rows = model.config.q_lora_rank + model.config.kv_lora_rank + model.config.qk_rope_head_dim
    assert rows in [getattr(attention, name).out_features for name in joined]


def generated(model, **options):
    out = model.generate(
        IDS, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True,
        **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


@each_of(
    name=MODELS,
    implementation=["sdpa", "eager"],
    padded=[False, True],
    cache=["dynamic", "static", "beams"],
)
def test_generation_is_the_plain_models(name, implementation, padded, cache, monkeypatch):
    """By the latents, except where each weight of attention may be asked for."""
    import apex_te.integrations.latent_attention as latent

    calls, to_latents = [], latent._to_latents

    def seen(*args):
        calls.append(args)
        return to_latents(*args)

    monkeypatch.setattr(latent, "_to_latents", seen)
    options = {"attention_mask": PADDED} if padded else {}
    if cache == "static":
        options["cache_implementation"] = "static"
        options["disable_compile"] = True
    elif cache == "beams":
        options["num_beams"] = 2
    plain = build(name, implementation)
    model = fused(plain)
    expected, found = generated(plain, **options), generated(model, **options)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    # The mask of a static cache says from the first tokens on which of all its places are theirs.
    steps = 6 if padded and cache == "static" else 5
    assert len(calls) == (steps * len(converted(model)) if implementation == "sdpa" else 0)


@pytest.mark.parametrize("tokens", [1, 3])
@torch.no_grad()
def test_a_later_chunk_attends_to_the_cached_latents(tokens):
    """Chunks of several tokens equal a forward of all; positions may differ by sequence."""
    plain = build("V3")
    model = fused(plain)
    positions = torch.stack((torch.arange(12), torch.arange(12) + 3))
    expected = plain(input_ids=IDS, position_ids=positions).logits
    cache, found = transformers.DynamicCache(config=model.config), []
    for ids, at in zip(
        IDS.split([6, *[tokens] * (6 // tokens)], 1),
        positions.split([6, *[tokens] * (6 // tokens)], 1),
        strict=True,
    ):
        found.append(model(input_ids=ids, position_ids=at, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-5, atol=1e-5)
    kept = cache.layers[0].keys, cache.layers[0].values
    assert [x.shape[1:] for x in kept] == [(1, 12, 16), (1, 12, 8)]


@pytest.mark.parametrize("name", ["V3", "V2 q_proj"])
@pytest.mark.parametrize("scheme", chosen("delayed", "tensorwise", "blockwise", "mxfp8"))
def test_recomputed_heads_in_fp8(scheme, name):
    """Training steps give the same bits with recompute, near the plain model's."""
    recipe, plain, found = chosen(scheme)[scheme], build(name), []
    for recompute in (False, True):
        model = fused(plain, recompute_up_proj=recompute).train()
        seen = []
        for _ in range(2):
            flying = []
            for ids in (IDS, IDS.flip(1)):  # both in flight, so that scales move before backward
                with fp8_autocast(True, recipe):
                    flying.append(model(input_ids=ids).logits)
            for logits in flying:
                logits.square().mean().backward()
                seen.append(logits.detach())
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append(seen)
    assert_same_bits(*found)
    assert sqnr(plain(input_ids=IDS).logits, found[0][len(found[0]) // 2]) > 15


@pytest.mark.parametrize("use_cache", [False, True])  # transformers' default while training
def test_recomputed_heads_are_not_saved(use_cache, monkeypatch):
    import apex_te.integrations.latent_attention as latent

    alive, heads = [], latent.latent_heads

    def seen(*args):
        made = heads(*args)
        alive.extend(x.untyped_storage()._weak_ref() for x in made)
        return made

    monkeypatch.setattr(latent, "latent_heads", seen)
    plain = build("V3")
    for layer in plain.model.layers:  # values of the keys' size, for a fused kernel
        attention = layer.self_attn
        attention.v_head_dim = size = attention.qk_head_dim
        kv_rows = attention.num_heads * (attention.qk_nope_head_dim + size)
        attention.kv_b_proj = nn.Linear(attention.kv_lora_rank, kv_rows, bias=False)
        attention.o_proj = nn.Linear(attention.num_heads * size, attention.hidden_size)
    for recompute in (False, True):
        model = fused(plain, recompute_up_proj=recompute)
        alive.clear()
        loss = model(input_ids=IDS, use_cache=use_cache).logits.sum()
        living = sum(not torch.UntypedStorage._expired(ref) for ref in alive)
        assert (len(alive), living) == (6, 0 if recompute else 6)
        loss.backward()


def test_adapters_and_hooks_of_the_up_projection_are_called():
    """Then keys and values are computed, by the layer."""
    model = fused(build("V3"))
    expected, calls = generated(model), []
    for attention in converted(model):
        attention.kv_b_proj.register_forward_hook(lambda *args: calls.append(args) or args[2] * 1.0)
    found = generated(model)
    assert len(calls) == 6 * len(converted(model))
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_batch_invariant():
    """A sequence has the same bits alone and among others; a cache is refused."""
    model = fused(build("V3"))
    model.set_attn_implementation("apex_te")
    attention, x = converted(model)[0], torch.randn(2, 12, model.config.hidden_size)
    tables = model.model.rotary_emb(x, torch.arange(12)[None])
    with apex_te.batch_invariant():
        together = attention(x, tables)[0]
        assert_same_bits([attention(x[1:], tables)[0]], [together[1:]])
        with pytest.raises(NotImplementedError, match="past_key_values must be None under batch_"):
            attention(x, tables, past_key_values=transformers.DynamicCache())


def test_copies_pickles_and_a_second_call():
    model = fused(build("V3"))
    expected = model(input_ids=IDS).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits([twin(input_ids=IDS).logits], [expected])
    buffer = io.BytesIO()
    torch.save(converted(model)[0], buffer)
    buffer.seek(0)
    assert isinstance(torch.load(buffer, weights_only=False), FusedLatentAttention)
    kinds = [type(m) for m in converted(model)]
    fuse_latent_attention(model, recompute_up_proj=True)
    assert kinds == [type(m) for m in converted(model)]
    assert all(m.recompute_up_proj for m in converted(model))


def test_compiles_in_one_graph():
    model = fused(build("V3").train(), recompute_up_proj=True)
    attention = converted(model)[0]
    x = torch.randn(2, 6, model.config.hidden_size, requires_grad=True)
    angles = torch.rand(1, 6, 8)
    call = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    results = []
    for run in (attention, compiled):
        out = run(hidden_states=x, **call)[0]
        results.append((out, *torch.autograd.grad(out.sum(), x)))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_module_loads_the_plain_models_names():
    """``MultiLatentAttention`` takes the state of DeepSeek's attention, and computes the same."""
    plain = build("V3")
    config, attention = plain.config, plain.model.layers[0].self_attn
    module = apex_te.MultiLatentAttention(
        config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank,
        config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, qkv_format="bshd",
        rotary_scaling_factor=YARN["factor"], mscale=0.7, mscale_all_dim=1.0,
    )  # fmt: skip
    state = {f"0.{key}": value for key, value in attention.state_dict().items()}
    nn.Sequential(module).load_state_dict(state)
    x = torch.randn(2, 12, config.hidden_size)
    angles = apex_te.YarnRotaryEmbedding(
        config.qk_rope_head_dim, interleaved=True, scaling_factor=YARN["factor"],
        original_max_position_embeddings=YARN["original_max_position_embeddings"],
    )(12)  # fmt: skip
    causal = torch.full((12, 12), -torch.inf).triu(1)[None, None]
    expected = attention(x, plain.model.rotary_emb(x, torch.arange(12)[None]), causal)[0]
    torch.testing.assert_close(module(x, rotary_pos_emb=angles), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [1.0, 40.0])
@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (4.0, 4.0), (1e6, 1e-6)])
@pytest.mark.parametrize(("dim", "length"), [(64, 4096), (8, 16)])
def test_yarn_angles_are_transformers(factor, fast, slow, dim, length):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.DeepseekV3Config(head_dim=dim, qk_rope_head_dim=dim)
    config.rope_parameters = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": factor, "beta_fast": fast,
        "beta_slow": slow, "original_max_position_embeddings": length,
    }  # fmt: skip
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    module = apex_te.YarnRotaryEmbedding(
        dim, scaling_factor=factor, original_max_position_embeddings=length, beta_fast=fast,
        beta_slow=slow,
    )  # fmt: skip
    torch.testing.assert_close(module.inv_freq, expected, rtol=1e-6, atol=0)
    assert module(3).shape == (3, 1, 1, dim)


def attention_of(family, **values):
    """One attention module of a family that is not converted, or not by a whole model here."""
    name = f"transformers.models.{family[0]}.modeling_{family[0]}"
    config = tiny(getattr(transformers, f"{family[1]}Config"))
    config.update({"_attn_implementation": "eager", **values})
    return getattr(importlib.import_module(name), f"{family[1]}{family[2]}")(config, 0).eval()


def test_attention_without_rotation():
    module = attention_of(("kimi_linear", "KimiLinear", "Attention"))
    twin = fuse_latent_attention(nn.Sequential(copy.deepcopy(module)))[0]
    assert twin.rotation == "none"
    x = torch.randn(2, 6, module.hidden_size)
    mask = torch.full((6, 6), -torch.inf).triu(1)[None, None]
    torch.testing.assert_close(
        twin(x, attention_mask=mask)[0], module(x, attention_mask=mask)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "family",
    [("mistral4", "Mistral4", "Attention"), ("deepseek_v32", "DeepseekV32", "Attention")],
    ids=lambda family: family[0],
)
def test_other_formulas_are_refused(family):
    """Queries that are scaled by position, and attention to chosen tokens."""
    module = attention_of(family)
    with pytest.raises(ValueError, match=r"model must have attention with the formula of DeepSe.*"
                       rf"got others \({type(module).__name__}\)"):  # fmt: skip
        fuse_latent_attention(nn.Sequential(module))
    assert type(module).__name__ == f"{family[1]}Attention"


def test_replaced_forwards_are_refused():
    model = build("V3")
    for layer in model.model.layers:
        layer.self_attn.forward = layer.self_attn.forward
    with pytest.raises(ValueError, match=r"got others \(DeepseekV3Attention\)"):
        fuse_latent_attention(model)
