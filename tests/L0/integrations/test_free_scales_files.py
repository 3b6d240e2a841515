"""Models of Hugging Face whose FP8 weights have scales of their own: files, joins, training."""

import copy
import warnings

import pytest
import torch
from families import build, logits

from apex_te import fp8_autocast, fp8_model_init, fuse_lora
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.integrations import export_fp8, from_torch, key_map
from apex_te.recipe import BlockScaling
from tests.checks import sqnr
from tests.free_scale_cases import FORMS, assert_holds, decoded, release

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
IDS = torch.arange(24).view(2, 12) % 64
FILES = ["block fp32", "block pow2", "tensor"]
# Whole blocks; keys and values of 64 rows, which share a block; an MLP that ends within a block.
SIZES = {"whole": (256, 128, 384), "short": (256, 64, 384), "edge": (256, 128, 576)}


def plain(size):
    hidden, kv, inner = SIZES[size]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1,
        num_attention_heads=hidden // 64, num_key_value_heads=kv // 64, head_dim=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def released(size, form):
    """A model whose projections hold a release, and the release's tensors by their keys."""
    model, file = plain(size), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            data, scale_inv = release(FORMS[form], module.weight.shape)
            scale_inv *= 0.1
            file[f"{name}.weight"], file[f"{name}.weight_scale_inv"] = data, scale_inv
            held = FP8Parameter.from_codes(data.clone(), scale_inv, FORMS[form], torch.float32)
            module.weight = torch.nn.Parameter(held)
    return model, file


def bits(file):
    return {k: v.reshape(v.shape or (1,)).contiguous().view(torch.uint8) for k, v in file.items()}


def assert_has(found, file):
    found = bits({k: found[k] for k in file})
    for key, value in bits(file).items():
        assert torch.equal(found[key], value), key


def step(model, recipe):
    model.zero_grad()
    with fp8_autocast(True, recipe):
        out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return out.logits.detach(), model.model.embed_tokens.weight.grad.clone()


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FILES)
def test_files_have_what_was_read(form, size, fuse, tmp_path):
    model, file = released(size, form)
    model.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    model.lm_head.requires_grad_(False)
    apart = from_torch(copy.deepcopy(model))
    with warnings.catch_warnings(record=True) as told:
        from_torch(model, fuse=fuse)
    reason = "have a scale each" if form == "tensor" else r"rows, which cut blocks of 128"
    is_apart = fuse and (form == "tensor" or size != "whole")
    assert any(reason in str(each.message) for each in told) is is_apart
    kept = {k for k, p in model.named_parameters() if type(p) is FP8Parameter}
    joined = {e.key for e in key_map(model).entries if len(e.parts) > 1 and "weight" in e.key}
    if not fuse or form == "tensor":
        assert not joined
    else:
        assert ("model.layers.0.self_attn.qkv" in str(joined)) is (size != "short")
        assert ("model.layers.0.mlp.fc1_weight" in joined) is (size != "edge")
    assert len(kept) == 7 - (2 if any("qkv" in j for j in joined) else 0) - (
        1 if any("fc1" in j for j in joined) else 0
    )
    assert_has(model.state_dict(), file)
    for found, wanted in zip(step(model, FORMS[form]), step(apart, FORMS[form]), strict=True):
        assert sqnr(wanted, found) > (30 if fuse else 5999)
    model.save_pretrained(tmp_path / "saved")
    assert not hasattr(model.config, "quantization_config")
    assert_has(safetensors.load_file(tmp_path / "saved" / "model.safetensors"), file)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "saved").quantization_config
    assert config["quant_method"] == "fp8"
    assert config["weight_block_size"] == (None if form == "tensor" else [128, 128])
    assert config["modules_to_not_convert"] == ["lm_head"]
    weights = "tensor" if form == "tensor" else "block"
    export_fp8(model, tmp_path / "exported", quant_method="fp8", weights=weights)
    exported = safetensors.load_file(tmp_path / "exported" / "model.safetensors")
    if form == "tensor":
        exported = {k.replace("weight_scale", "weight_scale_inv"): v for k, v in exported.items()}
    assert_has(exported, file)
    with fp8_model_init(recipe=FORMS[form]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # joined layers that stay in high precision
        other = from_torch(plain(size), fuse=fuse, exclude=["lm_head"])
    other.load_state_dict(safetensors.load_file(tmp_path / "saved" / "model.safetensors"))
    state = other.state_dict()
    own = {k: v for k, v in file.items() if k.removesuffix("_scale_inv") + "_scale_inv" in state}
    assert_has(state, own)
    assert len(own) == len(file) or (fuse and (size != "whole" or form == "tensor"))
    for key in {k for k in file.keys() - own.keys() if k.endswith("weight")}:  # cast anew, or plain
        exact = decoded(file[key], file[f"{key}_scale_inv"])
        assert sqnr(exact, state[key]) > (100 if form == "block fp32" else 25)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("form", FILES)
def test_lora_leaves_the_bytes(form, fused):
    peft = pytest.importorskip("peft")
    recipe = FORMS[form]
    model, file = released("whole", form)
    with fp8_model_init(recipe=recipe):
        from_torch(model, exclude=["lm_head"])
    options = {"r": 16, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    if fused:
        fuse_lora(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        with fp8_autocast(True, recipe):
            model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    base = model.get_base_model()
    weights = {k.replace(".base_layer", ""): p for k, p in base.named_parameters()}
    for key in (k for k in file if k.endswith("weight")):
        assert_holds(weights[key], (file[key], file[f"{key}_scale_inv"]))
    layer = base.model.layers[0].mlp.down_proj
    delta = layer.get_delta_weight("default")
    merged = model.merge_and_unload().state_dict()
    for key in (k for k in file if k.endswith("weight")):
        if "q_proj" not in key and "down_proj" not in key:
            assert_has(merged, {k: file[k] for k in (key, f"{key}_scale_inv")})
    key = "model.layers.0.mlp.down_proj.weight"
    exact = decoded(file[key], file[f"{key}_scale_inv"]) + delta.double()
    by_rule = FP8Parameter.empty(tuple(exact.shape), recipe, torch.float32).copy_(exact.float())
    found = decoded(merged[key], merged[f"{key}_scale_inv"])
    assert sqnr(by_rule.dequantize(), found) > 40
    assert 25 < sqnr(exact, found) < 40


@pytest.mark.parametrize("form", FILES)
def test_stacked_experts(form):
    """State dicts have scales as transformers names those of stacks, and load into any experts."""
    model = from_torch(build("qwen3_moe"))
    experts, files = model.model.layers[0].mlp.experts, {}
    for name in ("gate_up_proj", "down_proj"):
        count, *shape = getattr(experts, name).shape
        files[name] = release(FORMS[form], shape, count)
        data, scale_inv = files[name]
        held = FP8Parameter.from_codes(data.clone(), scale_inv, FORMS[form], torch.float32)
        setattr(experts, name, torch.nn.Parameter(held))
    prefix = "model.layers.0.mlp.experts."
    state = copy.deepcopy(model.state_dict())
    for name, (data, scale_inv) in files.items():
        assert_has(state, {f"{prefix}{name}": data, f"{prefix}{name}_scale_inv": scale_inv})
    with torch.no_grad():
        for name in files:
            getattr(experts, name).fill_(1.0)
    model.load_state_dict(state)
    for name, file in files.items():
        assert_holds(getattr(experts, name), file)
    plain = from_torch(build("qwen3_moe"))
    plain.load_state_dict(state)
    own = plain.model.layers[0].mlp.experts
    for name, file in files.items():
        assert torch.equal(getattr(own, name), decoded(*file).float())
    assert torch.equal(logits(model, "qwen3_moe"), logits(plain, "qwen3_moe"))
    with fp8_autocast(True, FORMS[form]):
        found, wanted = logits(model, "qwen3_moe"), logits(plain, "qwen3_moe")
    assert sqnr(wanted, found) > 15  # the plain ones are cast anew


def test_scales_of_two_kinds_are_refused(tmp_path):
    model, _ = released("whole", "tensor")
    projection = model.model.layers[0].self_attn.q_proj
    data, scale_inv = release(BlockScaling(), projection.weight.shape)
    projection.weight = torch.nn.Parameter(
        FP8Parameter.from_codes(data, scale_inv, BlockScaling(), torch.float32)
    )
    from_torch(model)
    with pytest.raises(NotImplementedError, match="must all have one scale, or all of them blocks"):
        model.save_pretrained(tmp_path)
