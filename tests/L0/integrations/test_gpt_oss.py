"""Experts of gpt-oss and of others with a clamped gate, against their own forward."""

import copy
import importlib

import pytest
import torch

from apex_te import fp8_autocast
from apex_te.integrations import from_torch, register_experts
from apex_te.module.grouped import experts as fused
from apex_te.ops.swiglu import ClampedSwiglu
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling
from tests.checks import assert_same_bits, sqnr

transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:apex_te")
HIDDEN, FFN, EXPERTS, TOKENS = 32, 128, 4, 24
RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "tensorwise": CurrentScaling(),
    "blockwise": BlockScaling(),
}
IMPLEMENTATIONS = ("converted", "registered")
SIZES = {
    "vocab_size": 40, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip


def experts_of(name="gpt_oss.GptOss", dtype=torch.float32, limit=3.0):
    family, _, prefix = name.partition(".")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, f"{prefix}Config")().get_text_config()
    for key in ("num_local_experts", "n_routed_experts", "num_experts"):
        if hasattr(config, key):
            setattr(config, key, EXPERTS)
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = HIDDEN, FFN, FFN
    config.swiglu_limit = limit
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    module = getattr(modeling, f"{prefix}Experts")(config).to(dtype)
    for value in module.parameters():
        torch.nn.init.normal_(value, std=0.3)
    return module


def served(module, implementation):
    module = copy.deepcopy(module)
    if implementation == "converted":
        return from_torch(module)
    register_experts()
    module.config = copy.deepcopy(module.config)
    module.config._experts_implementation = "apex_te"
    return module


def run(module, recipe=None, dtype=torch.float32):
    torch.manual_seed(2)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype).requires_grad_()
    index = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, 2, dtype=dtype).requires_grad_()
    dy = torch.randn(TOKENS, HIDDEN, dtype=dtype)
    module.zero_grad()
    with fp8_autocast(recipe is not None, recipe):
        out = module(x, index, weights)
    out.backward(dy)
    grads = {name: value.grad for name, value in module.named_parameters()}
    return {"out": out, "x": x.grad, "weights": weights.grad, **grads}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_eager_experts(implementation):
    module = experts_of()
    wanted = run(module)
    other = served(module, implementation)
    assert other.state_dict().keys() == module.state_dict().keys()
    for name, value in run(other).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [*RECIPES, "mxfp8"])
def test_recipes(implementation, name):
    recipe = RECIPES.get(name, MXFP8Scaling())
    module = experts_of(limit=7.0)  # the derivative jumps where the noise passes a limit
    wanted, other = run(module), served(module, implementation)
    for key, value in run(other, recipe).items():
        assert sqnr(wanted[key], value) > 17, key


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", RECIPES)
def test_same_bits_as_one_op_at_a_time(monkeypatch, implementation, name):
    """The fused function reads gates and ups that alternate, and transposed weights."""
    results, module = [], experts_of()
    for is_fused in (True, False):
        calls, apply = [], fused.ExpertsFunction.apply

        def spy(*args, calls=calls, apply=apply):
            calls.append(args)
            return apply(*args)

        with monkeypatch.context() as patch:
            patch.setattr(fused.ExpertsFunction, "apply", spy)
            if not is_fused:
                patch.setattr(fused, "_fused_calls", lambda *args, **options: None)
            patch.setattr(torch, "rand", lambda *shape, **kw: torch.full(shape, 0.5, **kw))
            other = served(module, implementation)
            results.append([run(other, RECIPES[name]) for _ in range(3)][-1])
        assert bool(calls) == is_fused
        assert all(ClampedSwiglu(3.0) in each for each in calls)
    weights = [each.pop("weights") for each in results]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)
    for key, value in results[0].items():
        assert_same_bits(value, results[1][key])


@pytest.mark.parametrize(
    ("name", "alpha", "offset"),
    [
        ("gpt_oss.GptOss", 1.702, 1.0),
        ("minimax_m3_vl.MiniMaxM3VL", 1.702, 1.0),
        ("deepseek_v4.DeepseekV4", 1.0, 0.0),
        ("glm5_next.Glm5NextText", 1.0, 0.0),
    ],
)
def test_clamped_gates_are_known(monkeypatch, name, alpha, offset):
    module = experts_of(name)
    seen, of = [], fused.run_experts
    monkeypatch.setattr(
        "apex_te.integrations.experts.run_experts",
        lambda *args, **options: seen.append(args[5]) or of(*args, **options),
    )
    wanted, other = run(module), served(module, "registered")
    for key, value in run(other).items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-4, atol=1e-4, msg=key)
    assert len(seen) == 1
    limit = seen[0].limit
    assert seen == [ClampedSwiglu(limit, alpha, offset)]
    assert limit == getattr(module, "limit", None) or limit == module.swiglu_limit
    if other.is_concatenated:  # what is another function stays the experts' own
        other._apply_gate = lambda x: x.chunk(2, -1)[0]
        run(other)
        assert seen[1] is other._apply_gate


def test_models_save_in_their_own_format(tmp_path):
    """A converted model computes as before outside of FP8, trains in it, and saves its own keys."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES, layer_types=["full_attention"] * 2)
    model = transformers.GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        for value in layer.mlp.experts.parameters():
            torch.nn.init.normal_(value, std=0.1)
        torch.nn.init.normal_(layer.mlp.router.weight)  # the noise changes few choices
    ids = torch.arange(24).view(2, 12) % 37 + 2
    expected, state = model(ids).logits, model.state_dict()
    from_torch(model)
    experts = model.model.layers[0].mlp.experts
    assert type(experts).__name__ == "StackedExperts"
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    with fp8_autocast(True, CurrentScaling()):
        logits = model(ids).logits
    assert 17 < sqnr(expected, logits) < 60
    logits.square().mean().backward()
    assert all(value.grad.is_contiguous() for value in experts.parameters())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    model.save_pretrained(tmp_path)
    again = transformers.GptOssForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids).logits, expected)
