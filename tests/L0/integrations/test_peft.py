"""PEFT on converted layers of every type: merging gives the plain model's logits."""

import copy
import warnings

import pytest
import torch
from families import IDS, build, class_of, logits

from apex_te import fp8_autocast
from apex_te.integrations import conversion_summary, from_torch
from apex_te.integrations.conv1d import Conv1DLinear
from apex_te.integrations.experts import StackedExperts
from apex_te.module.layer_norm import LayerNorm
from apex_te.module.linear import Linear
from apex_te.module.rms_norm import RMSNorm
from apex_te.recipe import CurrentScaling

peft = pytest.importorskip("peft", reason="peft is not installed")

# By type of the converted layers: a family that has it, and names of such layers.
TYPES = {
    "Linear": ("qwen2", Linear, ["q_proj", "o_proj", "down_proj"]),
    "Conv1DLinear": ("gpt2", Conv1DLinear, ["c_attn", "c_proj", "c_fc"]),
    "RMSNorm": ("llama", RMSNorm, ["input_layernorm", "norm"]),
    "zero-centered RMSNorm": ("gemma2", RMSNorm, ["pre_feedforward_layernorm"]),
    "LayerNorm": ("gpt_neox", LayerNorm, ["input_layernorm"]),
    "StackedExperts": ("mixtral", StackedExperts, ["gate_up_proj", "down_proj"]),
}
LINEAR = ("Linear", "Conv1DLinear")


def lora(targets, name, **options):
    which = "target_parameters" if name == "StackedExperts" else "target_modules"
    return peft.LoraConfig(r=4, init_lora_weights=False, **{which: targets}, **options)


def ia3(targets, name):
    second = [t for t in targets if t in ("down_proj", "c_proj")]
    return peft.IA3Config(
        target_modules=targets, feedforward_modules=second, init_ia3_weights=False,
    )  # fmt: skip


METHODS = {
    "lora": (lora, ("Linear", "Conv1DLinear", "StackedExperts")),
    "rslora": (lambda t, n: lora(t, n, use_rslora=True), LINEAR),
    "dora": (lambda t, n: lora(t, n, use_dora=True), LINEAR),
    "ia3": (ia3, LINEAR),
    "ln_tuning": (
        lambda t, n: peft.LNTuningConfig(target_modules=t),
        ("RMSNorm", "zero-centered RMSNorm", "LayerNorm"),
    ),
}
CASES = [(method, name) for method, (_, names) in METHODS.items() for name in names]


def adapted(model, method, name):
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out|Unsupported layer type")
        return peft.get_peft_model(model, METHODS[method][0](TYPES[name][2], name)).eval()


def moved(model):
    """Adds the same noise to the trainable parameters of equal models."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("first", ["from_torch", "adapters"])
@pytest.mark.parametrize(("method", "name"), CASES)
def test_merged(method, name, first):
    """Adapted, merged and unloaded logits are those of the plain model with the same adapters."""
    family, kind, targets = TYPES[name]
    plain = build(family)
    if first == "from_torch":
        model = adapted(from_torch(copy.deepcopy(plain)), method, name)
    else:
        model = from_torch(adapted(copy.deepcopy(plain), method, name))
    plain = moved(adapted(plain, method, name))
    model = moved(model)
    found = [
        m for k, m in model.named_modules()
        if isinstance(m, kind) and (name == "StackedExperts" or any(f".{t}" in k for t in targets))
    ]  # fmt: skip
    assert found
    close = {"rtol": 0, "atol": 1e-6}
    with torch.no_grad():
        before = logits(build(family), family)
        expected = logits(plain, family)
        assert (expected - before).abs().max() > 1e-3
        torch.testing.assert_close(logits(model, family), expected, **close)
        with fp8_autocast(True, CurrentScaling()):
            in_fp8 = logits(model, family)
        assert not torch.equal(in_fp8, expected)
        merged, plain = model.merge_and_unload(), plain.merge_and_unload()
        assert type(merged) is class_of(family)
        torch.testing.assert_close(logits(merged, family), logits(plain, family), **close)
        assert list(merged.state_dict()) == list(build(family).state_dict())
        for (key, value), other in zip(
            merged.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(value, other, **close, msg=key)
        assert sum(isinstance(m, kind) for m in merged.modules()) == sum(
            isinstance(m, kind) for m in from_torch(build(family)).modules()
        )


@pytest.mark.parametrize(("method", "name"), [c for c in CASES if c[0] != "ln_tuning"])
def test_adapters_train_in_fp8_over_frozen_layers(method, name):
    family = TYPES[name][0]
    model = adapted(from_torch(build(family)), method, name).train()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with fp8_autocast(True, CurrentScaling()):
        loss = torch.nn.functional.cross_entropy(
            logits(model, family)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()
        )
    loss.backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, before[key]) == (not parameter.requires_grad), key


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4,
                                 encoder_hidden_size=32),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4,
                                encoder_hidden_size=32, prefix_projection=True),
    ],
    ids=["p_tuning", "prefix_tuning"],
)  # fmt: skip
def test_prompt_encoders_stay(config):
    """The layers that make PEFT's prompts stay in high precision, and the summary says so."""
    model = peft.get_peft_model(build("llama"), config)
    from_torch(model)
    layers = [(k, m) for k, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    inside = [m for key, m in layers if key.startswith("prompt_encoder")]
    assert inside
    assert not any(isinstance(m, Linear) for m in inside)
    assert any(isinstance(m, Linear) for _, m in layers)
    kept = [layer for layer in conversion_summary(model).kept if layer.name.startswith("prompt")]
    assert any(layer.reason == "an adapter of PEFT" for layer in kept)


def test_summary_looks_through_the_wrapper():
    model = from_torch(build("llama"))
    names = [layer.name for layer in conversion_summary(model).converted]
    found = conversion_summary(peft.get_peft_model(model, lora(["q_proj"], "Linear")))
    assert names
    assert [layer.name for layer in found.converted] == [f"base_model.model.{n}" for n in names]


def test_tuning_of_a_joined_norm_is_refused():
    """LN tuning would train a copy of the norm that the joined layer does not read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = from_torch(build("llama"), fuse=True)
    with pytest.raises(TypeError, match="adapters need fuse=False"):
        peft.get_peft_model(model, peft.LNTuningConfig(target_modules=["input_layernorm"]))
