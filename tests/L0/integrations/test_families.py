"""from_torch on families of Hugging Face: equal logits and tokens, files, FP8, what is said."""

import copy
import importlib
import io
import re
import warnings

import pytest
import torch
from families import APART, FAMILIES, IDS, build, inputs, load, logits

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.integrations import conversion_summary, from_torch, key_map, register_experts
from apex_te.module._core.fp8_module import FP8Module
from apex_te.module.rms_norm import RMSNorm
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
FUSE = pytest.mark.parametrize("fuse", [False, True], ids=["converted", "fused"])
NAMES = pytest.mark.parametrize("name", FAMILIES)
RECIPES = pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(amax_history_len=4), CurrentScaling(), BlockScaling()],
    ids=["delayed", "tensorwise", "blockwise"],
)
MOE = ("mixtral", "qwen2_moe", "qwen3_moe")


def converted(model, name, fuse=False, **options):
    """The model after from_torch, which must not warn; its summary says what stays apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = from_torch(model, fuse, **options)
    kept = [layer.reason for layer in conversion_summary(model).kept]
    apart = {reason for reason in kept if reason.startswith("not fused")}
    expected = APART.get(name) if fuse else None
    assert bool(apart) == (expected is not None), apart
    assert all(re.fullmatch(f"not fused: {expected}", reason) for reason in apart)
    return model


def backward(model, name, ids=IDS):
    model.zero_grad()
    out = logits(model, name, ids)
    out.square().mean().backward()
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return out.detach(), key_map(model).to_original(grads)


@FUSE
@NAMES
def test_equal_logits_gradients_files_and_tokens(name, fuse, tmp_path):
    plain = build(name)
    model = converted(copy.deepcopy(plain), name, fuse)
    expected, grads = backward(plain, name)
    actual, actual_grads = backward(model, name)
    torch.testing.assert_close(actual, expected, **CLOSE)
    assert actual_grads.keys() == grads.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(actual_grads[key], grad, **CLOSE, msg=key)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path / "a")
    again = load(name, tmp_path / "a")
    for (key, value), saved in zip(
        plain.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(value, saved), key
    if name == "bert":
        return
    options = {
        "attention_mask": torch.ones_like(IDS[:, :4]), "max_new_tokens": 6, "do_sample": False
    }  # fmt: skip
    expected = plain.generate(IDS[:, :4], **options)
    assert torch.equal(model.generate(IDS[:, :4], **options), expected)


@pytest.mark.cuda
@FUSE
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_on_a_gpu(name, fuse):
    """Logits and gradients of the plain model, and FP8 within its rounding."""
    plain, ids = build(name).cuda(), IDS.cuda()
    model = converted(copy.deepcopy(plain), name, fuse)
    expected, actual = backward(plain, name, ids), backward(model, name, ids)
    torch.testing.assert_close(actual, expected, **CLOSE)
    for _ in range(2):
        with fp8_autocast(True, DelayedScaling(amax_history_len=4)):
            out, grads = backward(model, name, ids)
    assert not torch.equal(out, actual[0])
    assert (out - actual[0]).norm() < 0.15 * actual[0].norm()
    assert all(grad.isfinite().all() and grad.any() for grad in grads.values())


@FUSE
@NAMES
def test_every_gemm_is_fp8_and_tied_weights_stay(name, fuse):
    plain = build(name)
    heads = {id(plain.get_output_embeddings())} if name != "bert" else {id(plain.classifier)}
    routers = {
        id(m.shared_expert_gate) for m in plain.modules() if hasattr(m, "shared_expert_gate")
    }
    tied = name != "bert" and plain.config.tie_word_embeddings
    model = converted(plain, name, fuse)
    left = [m for m in model.modules() if type(m) is torch.nn.Linear]
    assert {id(m) for m in left} == heads | routers
    kinds = [type(m) for m in model.modules() if "Norm" in type(m).__name__]
    assert all(kind.__module__.startswith("apex_te.") for kind in kinds)
    if name != "bert":
        out = model.get_output_embeddings().weight
        assert (out is model.get_input_embeddings().weight) == tied
    for norm in model.modules():
        if isinstance(norm, RMSNorm):
            assert norm.zero_centered_gamma == name.startswith("gemma")


@RECIPES
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "phi3", "gpt_neox_fast", "t5_gated", *MOE])
def test_fp8(name, recipe):
    """Logits differ by FP8's rounding; gradients reach every weight; a recompute is the same."""
    model = converted(build(name), name, fuse=True)
    expected, grads = backward(model, name)
    for _ in range(2):
        with fp8_autocast(True, recipe):
            actual, found = backward(model, name)
    assert not torch.equal(actual, expected)
    # A router may choose another expert where its logits are close.
    assert (actual - expected).norm() < (0.5 if name in MOE else 0.15) * expected.norm()
    assert found.keys() == grads.keys()
    assert all(grad.isfinite().all() for grad in found.values())
    assert all(found[key].any() == grad.any() for key, grad in grads.items())
    if name == "t5_gated":  # SDPA takes another kernel for its bias under checkpointing
        model.set_attn_implementation("eager")
    again = copy.deepcopy(model)
    again.train().gradient_checkpointing_enable()
    model.train()
    results = []
    for one in (model, again):
        with fp8_autocast(True, recipe):
            out = logits(one, name)
        one.zero_grad()
        out.square().mean().backward()
        results.append([out, *(p.grad for p in one.parameters() if p.grad is not None)])
    # Checkpointing adds up gradients of T5's encoder in another order, in the plain model, too.
    assert all(map(torch.equal, *([r[:1] for r in results] if name == "t5_gated" else results)))


@pytest.mark.parametrize("name", MOE)
def test_experts(name, tmp_path):
    """Experts keep their FP8 state in files, copies and pickles, and record while calibrating."""
    recipe = DelayedScaling(amax_history_len=4)
    model = converted(build(name), name)
    plain = logits(model, name)
    with torch.no_grad(), fp8_autocast(False, calibrating=True, fp8_recipe=recipe):
        torch.testing.assert_close(logits(model, name), plain, **CLOSE)
    experts = model.model.layers[0].mlp.experts
    assert type(experts).__name__ == "StackedExperts"
    assert isinstance(experts, type(build(name).model.layers[0].mlp.experts))
    state = [key for key in model.state_dict() if "experts.gate_up_gemm.fp8_state" in key]
    assert state
    with torch.no_grad(), fp8_autocast(True, recipe):
        expected = logits(model, name)
        assert not torch.equal(expected, plain)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    again = converted(build(name), name)
    again.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False), again):
        assert type(other.model.layers[0].mlp.experts) is type(experts)
        with torch.no_grad(), fp8_autocast(True, recipe):
            assert torch.equal(logits(other, name), expected)
    assert torch.equal(logits(model, name), plain)


def test_state_of_experts_is_loaded_where_they_are(device):
    """Loaded state follows the input's device: the GEMMs of experts are without parameters."""
    x, index = torch.randn(6, 32).to(device), torch.tensor([[0, 3]] * 6).to(device)
    weights = torch.rand(6, 2).to(device)
    models = [converted(build("qwen3_moe"), "qwen3_moe").to(device) for _ in range(2)]
    experts = [model.model.layers[0].mlp.experts for model in models]
    with fp8_autocast(True, DelayedScaling(amax_history_len=4)):
        experts[0](4 * x, index, weights)
    flush_fp8_state()
    models[1].load_state_dict(models[0].state_dict())
    for is_training in (True, False):
        found = []
        for each in experts:
            with fp8_autocast(True, DelayedScaling(amax_history_len=4)):
                found.append(each.train(is_training)(x, index, weights))
        assert torch.equal(*found)


def test_experts_after_fp8_recompute_in_high_precision():
    """A checkpointed forward outside of FP8 is repeated outside of FP8."""
    model = converted(build("mixtral"), "mixtral").train()
    model.gradient_checkpointing_enable()
    expected = backward(model, "mixtral")
    with fp8_autocast(True, CurrentScaling()):
        backward(model, "mixtral")
    actual = backward(model, "mixtral")
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(actual[1][key], grad) for key, grad in expected[1].items())


@pytest.mark.long
@pytest.mark.cover(0)
@RECIPES
def test_experts_that_are_not_chosen_and_compiled_code(recipe):
    model = converted(build("qwen3_moe"), "qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    x, index = torch.randn(3, 32), torch.tensor([[0, 3]] * 3)
    weights = torch.rand(3, 2)
    expected = experts(x, index, weights)
    with fp8_autocast(True, recipe):
        actual = experts(x, index, weights)
        none = experts(x[:0], index[:0], weights[:0])
    assert (actual - expected).norm() < 0.1 * expected.norm()
    assert none.shape == (0, 32)
    torch._dynamo.reset()
    compiled = torch.compile(experts, backend="aot_eager")
    with fp8_autocast(True, recipe):
        actual = compiled(x, index, weights)
    assert (actual - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("recipe", [None, CurrentScaling(), DelayedScaling(amax_history_len=4)])
def test_experts_as_an_implementation_of_transformers(name, recipe):
    """Unconverted experts compute as converted ones; the state dict keeps its keys."""
    register_experts()
    model, plain = build(name), build(name)
    keys = list(model.state_dict())
    model.set_experts_implementation("apex_te")
    other = converted(build(name), name)
    experts = [m.model.layers[0].mlp.experts for m in (model, other, plain)]
    x, index = torch.randn(12, 32), torch.stack([torch.randperm(4)[:2] for _ in range(12)])
    weights, results = torch.rand(12, 2), []
    for each in experts:
        inp = x.clone().requires_grad_()
        for _ in range(2):
            with fp8_autocast(recipe is not None and each is not experts[2], recipe):
                out = each(inp, index, weights)
        out.sum().backward()
        results.append((out, inp.grad))
    if recipe is None:
        torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-5)
    else:
        assert all(map(torch.equal, *results[:2]))
        for value, wanted in zip(results[0], results[2], strict=True):
            assert 0 < (value - wanted).norm() < 0.1 * wanted.norm()
    assert list(model.state_dict()) == keys
    again = copy.deepcopy(model).model.layers[0].mlp.experts
    with fp8_autocast(recipe is not None, recipe):
        assert torch.equal(again(x, index, weights), experts[0](x, index, weights))


@pytest.mark.parametrize(
    ("attribute", "value", "what"),
    [
        ("has_gate", False, "no gate"),
        ("has_post_expert_norm", True, "a norm"),
        ("is_concatenated", False, "interleaved weights and a gate of their own"),
        ("_is_expert_parallel", True, "weights spread over ranks"),
    ],
)
def test_experts_that_the_implementation_refuses(attribute, value, what):
    register_experts("suite")
    model = build("mixtral")
    model.set_experts_implementation("suite")
    experts = model.model.layers[0].mlp.experts
    setattr(experts, attribute, value)
    if attribute == "is_concatenated":
        experts._apply_gate = lambda x: x[..., ::2] * x[..., 1::2]
    with pytest.raises(NotImplementedError, match=f"for experts with {what}"):
        experts(torch.randn(2, 32), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))


def test_experts_spread_over_ranks_are_refused():
    experts = converted(build("mixtral"), "mixtral").model.layers[0].mlp.experts
    experts._is_expert_parallel = True
    with (
        fp8_autocast(True, CurrentScaling()),
        pytest.raises(NotImplementedError, match="StackedExperts: experts must be on one rank"),
    ):
        experts(torch.randn(2, 32), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))


@pytest.mark.parametrize("fuse", [False, True])
def test_t5_with_its_second_layers_in_fp32(fuse):
    """T5 in fp16 as transformers loads it: residuals are fp32, the norms' weights fp16."""
    plain = build("t5", torch.bfloat16)
    for module in plain.modules():
        if hasattr(module, "wo"):
            module.wo.float()
    with torch.no_grad():
        expected = logits(plain, "t5")
        if fuse:
            with pytest.warns(UserWarning, match=r"residuals have another dtype"):
                model = from_torch(plain, fuse=True)
        else:
            model = converted(plain, "t5")
        actual = logits(model, "t5")
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["gemma3", "qwen2", "t5", "phi3"])
def test_bf16(name):
    plain = build(name, torch.bfloat16)
    with torch.no_grad():
        exact = logits(copy.deepcopy(plain).float(), name)
        expected = logits(plain, name).float()
        for fuse in (False, True):
            model = converted(copy.deepcopy(plain), name, fuse)
            actual = logits(model, name).float()
            # No further from the exact logits than the plain model, but for the order of rounding.
            assert (actual - exact).norm() < 1.5 * (expected - exact).norm() + 1e-3


def test_dropout_inside_of_an_mlp_keeps_its_second_layer_apart():
    model = build("t5", dropout_rate=0.1)
    plain = copy.deepcopy(model)
    converted(model, "t5", fuse=True)
    layers = {layer.name for layer in conversion_summary(model).converted}
    assert {"decoder.block.0.layer.0.SelfAttention.qkv",
            "decoder.block.0.layer.2.DenseReluDense.wi"} <= layers  # fmt: skip
    outs = []
    for one in (model, plain):
        torch.manual_seed(3)
        outs.append(logits(one.train(), "t5"))
    torch.testing.assert_close(*outs, **CLOSE)


def test_norms_that_are_not_known_are_named():
    class LlamaOtherNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(32))

        def forward(self, x):
            return x * self.weight

    LlamaOtherNorm.__module__ = "transformers.models.llama.modeling_llama"
    model = build("llama")
    for layer in model.model.layers:
        layer.input_layernorm = LlamaOtherNorm()
    expected = r"2 of model.layers.\*.input_layernorm \(from_torch does not know LlamaOtherNorm\)"
    with pytest.warns(UserWarning, match=expected):
        from_torch(copy.deepcopy(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_torch(model, exclude="input_layernorm")


@pytest.mark.parametrize("name", ["llama", "t5", "mixtral"])
def test_excluded_layers_stay(name):
    model = converted(build(name), name, exclude=lambda key, module: "mlp" in key or "Dense" in key)
    for key, module in model.named_modules():
        if "mlp" in key or "Dense" in key:
            assert not isinstance(module, FP8Module)
    torch.testing.assert_close(logits(model, name), logits(build(name), name), **CLOSE)
    assert inputs(name)


@RECIPES
@pytest.mark.parametrize(
    "kind", ["minimax_m3_vl.MiniMaxM3VL", "deepseek_v4.DeepseekV4", "glm5_next.Glm5NextText"]
)
def test_experts_with_a_gate_of_their_own(kind, recipe):
    """Experts whose class defines its gate, with or without an ``act_fn``, compute it in FP8."""
    family, _, prefix = kind.partition(".")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, f"{prefix}Config")().get_text_config()
    experts = ("num_local_experts", "n_routed_experts", "num_experts")
    for name in experts:
        if hasattr(config, name):
            setattr(config, name, 4)
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 32, 48, 48
    config._experts_implementation = "eager"
    module = getattr(modeling, f"{prefix}Experts")(config)
    assert "_apply_gate" in vars(type(module))
    for p in module.parameters():
        torch.nn.init.normal_(p, 0, 0.2)
    x, index, weights = torch.randn(6, 32), torch.tensor([[0, 3]] * 6), torch.rand(6, 2)
    expected = module(x, index, weights)
    from_torch(module)
    assert torch.equal(module(x, index, weights), expected)
    with fp8_autocast(True, recipe):
        actual = module(x, index, weights)
    assert (actual - expected).norm() < 0.12 * expected.norm()
    assert not torch.equal(actual, expected)


NORM_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("given", NORM_DTYPES)
@pytest.mark.parametrize("dtype", NORM_DTYPES)
@pytest.mark.parametrize(
    "kind", ["llama.LlamaRMSNorm", "qwen3.Qwen3RMSNorm", "gemma.GemmaRMSNorm", "t5.T5LayerNorm"]
)
def test_norms_mix_dtypes_as_the_models_own(kind, dtype, given):
    """A converted norm takes any input beside any weight, with the plain norm's result."""
    family, _, name = kind.partition(".")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    plain = getattr(modeling, name)(32).to(given)
    torch.nn.init.normal_(plain.weight, 1, 0.1)
    module = from_torch(copy.deepcopy(plain))
    assert isinstance(module, RMSNorm)
    assert isinstance(module, type(plain))
    x = torch.randn(5, 32).to(dtype).requires_grad_()
    expected, actual = plain(x), module(x)
    assert actual.dtype is expected.dtype
    if dtype is not given:
        assert torch.equal(actual, expected)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(y.float().sum(), (x, m.weight)) for y, m in
             ((expected, plain), (actual, module))]  # fmt: skip
    for a, b in zip(*grads, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(b, a, rtol=0.03, atol=0.03)


@FUSE
def test_fp32_norm_and_head_in_a_bf16_model(fuse):
    """A bf16 model whose final norm and head are in fp32 gives the plain model's logits."""
    plain = build("llama", torch.bfloat16)
    plain.model.norm.float()
    plain.lm_head.float()
    model = converted(copy.deepcopy(plain), "llama", fuse)
    with torch.no_grad():
        expected, actual = logits(plain, "llama"), logits(model, "llama")
    assert actual.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


def test_fp32_norms_in_a_bf16_vit():
    """A bf16 ViT whose norms are in fp32 runs as the plain one."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(2)
    plain = transformers.ViTModel(config, add_pooling_layer=False).bfloat16().eval()
    for module in plain.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.float()
    model = from_torch(copy.deepcopy(plain))
    x = torch.randn(2, 3, 16, 16).bfloat16()
    with torch.no_grad():
        expected, actual = plain(x).last_hidden_state, model(x).last_hidden_state
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)


def test_t5_norms_that_an_earlier_release_has_pickled():
    """A pickle that names the former class loads as a converted norm of T5."""
    from apex_te.integrations.t5_norm import T5RMSNorm

    former = T5RMSNorm(32, 1e-6)
    state = io.BytesIO()
    torch.save(former, state)
    state.seek(0)
    norm = torch.load(state, weights_only=False)
    x = torch.randn(3, 32)
    assert torch.equal(norm(x), former(x))
    assert norm.bfloat16()(x).dtype is torch.bfloat16
