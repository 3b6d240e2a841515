"""Hugging Face's models after from_torch: files, PEFT's adapters, pickles, where these exist."""

import copy
import io
import json
import os
import warnings

import pytest
import torch
from families import APART, IDS, build, class_of, load, transformers

from apex_te import flush_fp8_state, fp8_autocast
from apex_te.integrations import conversion_summary, from_torch, key_map, load_fp8_state
from apex_te.integrations.from_torch import Conv1DLinear
from apex_te.module._core.fp8_module import FP8Module
from apex_te.recipe import DelayedScaling

safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

FAMILIES = ["llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma", "gpt_neox", "bert"]


def converted(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for apart in APART.values() if options.get("fuse") else ():
            warnings.filterwarnings("ignore", rf"from_torch: left as they are: {apart}")
        return from_torch(model, **options)


def train(model, recipe=None, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        with fp8_autocast(recipe is not None, recipe):
            model(input_ids=IDS).logits.square().mean().backward()
        optimizer.step()
    return model


def logits(model, recipe=None):
    with torch.no_grad(), fp8_autocast(recipe is not None, recipe):
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_round_trips(name, fuse, tmp_path):
    """Train, save, load as the plain model, convert, resume in FP8: logits are the same bits."""
    recipe = DelayedScaling(amax_history_len=4)
    model = train(converted(build(name), fuse=fuse), recipe)
    assert bool(key_map(model).entries) == fuse
    model.save_pretrained(tmp_path)
    expected, in_fp8 = logits(model), logits(model, recipe)
    assert not torch.equal(expected, in_fp8)
    plain = load(name, tmp_path)
    keys = list(build(name).state_dict())
    assert list(plain.state_dict()) == keys
    assert [k for k in model.state_dict() if ".fp8_state." not in k] == keys
    torch.testing.assert_close(logits(plain), expected, rtol=1.3e-6, atol=1e-5)
    other = converted(copy.deepcopy(plain), fuse=not fuse)
    torch.testing.assert_close(logits(other), expected, rtol=1.3e-6, atol=1e-5)
    resumed = converted(plain, fuse=fuse)
    assert torch.equal(logits(resumed), expected)
    load_fp8_state(resumed, tmp_path)
    assert torch.equal(logits(resumed, recipe), in_fp8)
    for one in (model, resumed):
        train(one.train(), recipe)
    for (key, a), b in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("fp8_state", [True, False])
def test_folders_with_the_former_name_load_and_are_replaced(tmp_path, fp8_state):
    recipe = DelayedScaling(amax_history_len=4)
    model = train(converted(build("llama"), fuse=True), recipe)
    model.save_pretrained(tmp_path)
    former = tmp_path / "fp8_state.safetensors"
    (tmp_path / "fp8_state.apex_te").rename(former)
    again = converted(type(model).from_pretrained(tmp_path), fuse=True)
    load_fp8_state(again, tmp_path)
    state = again.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model.save_pretrained(tmp_path, fp8_state=fp8_state)
    assert not former.exists()
    assert (tmp_path / "fp8_state.apex_te").exists() == fp8_state


def test_fp8_state_has_a_file_of_its_own(tmp_path):
    model = train(converted(build("llama"), fuse=True), DelayedScaling(amax_history_len=4))
    model.save_pretrained(tmp_path)
    weights = safetensors_torch.load_file(tmp_path / "model.safetensors")
    state = safetensors_torch.load_file(tmp_path / "fp8_state.apex_te")
    assert not [key for key in weights if "fp8_state" in key]
    assert state
    assert all(".fp8_state." in key for key in state)
    assert weights.keys() | state.keys() == model.state_dict().keys()
    # Loaders that take all of a folder's weights find those of the model alone.
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert not [*tmp_path.glob("*.bin"), *tmp_path.glob("*.pt"), *tmp_path.glob("*.pth")]
    model.save_pretrained(tmp_path, fp8_state=False)  # and the older one is gone
    assert sorted(os.listdir(tmp_path)) == [
        "config.json", "generation_config.json", "model.safetensors"
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError):
        load_fp8_state(model, tmp_path)
    with pytest.raises(TypeError, match="save_pretrained: fp8_state must be a bool, got str"):
        model.save_pretrained(tmp_path, fp8_state="no")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    tmp_path = tmp_path / "shards"
    copied.save_pretrained(tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert not any(p.any() for p in load("llama", tmp_path).parameters())
    assert not copied._keys_to_ignore_on_save  # as it was
    with pytest.raises(ValueError, match=r"converted as the saved one was, .*qkv_proj.fp8_state"):
        load_fp8_state(converted(build("llama")), tmp_path)


def test_trainer_resumes_with_its_fp8_state(tmp_path):
    """Four steps in a row, and two and two from a checkpoint: the same weights and scales."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from test_trainer import assert_resumes

    recipe = DelayedScaling(amax_history_len=4)

    class Trainer(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            with fp8_autocast(True, recipe):
                return super().compute_loss(*args, **kwargs)

    assert_resumes(tmp_path, list, lambda: converted(build("llama"), fuse=True), kind=Trainer)
    # The plain model takes the weights; what is beside them is named, and no weight is missing.
    _, info = class_of("llama").from_pretrained(tmp_path / "checkpoint-4", output_loading_info=True)
    assert not info["missing_keys"]
    assert all(".fp8_state." in key for key in info["unexpected_keys"])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_safetensors_and_accelerate_write_every_weight(name, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = converted(build(name), fuse=True)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    safetensors_torch.save_model(model, str(tmp_path / "again.safetensors"))
    for file in ("model.safetensors", "again.safetensors"):
        found = safetensors_torch.load_file(tmp_path / file)
        state = model.state_dict()
        assert state.keys() - found.keys() <= {"lm_head.weight", "transformer.wte.weight"}
        assert all(torch.equal(found[key], state[key]) for key in found)


def test_pickles(tmp_path):
    for name in ("llama", "gpt2"):
        for fuse in (False, True):
            model = converted(build(name), fuse=fuse)
            stream = io.BytesIO()
            torch.save(model, stream)
            stream.seek(0)
            loaded = torch.load(stream, weights_only=False)
            assert torch.equal(logits(loaded), logits(model))
            assert list(loaded.state_dict()) == list(model.state_dict())
            other = {key: value / 2 for key, value in build(name).state_dict().items()}
            loaded.load_state_dict(other, strict=True)
            assert not torch.equal(logits(loaded), logits(model))
            loaded.save_pretrained(tmp_path)
            torch.testing.assert_close(logits(load(name, tmp_path)), logits(loaded))
            assert not torch.equal(logits(loaded), logits(model))


def test_conv1d_is_hugging_faces():
    from transformers.pytorch_utils import Conv1D

    layer = converted(build("gpt2")).transformer.h[0].attn.c_proj
    for one in (layer, copy.deepcopy(layer)):
        assert isinstance(one, Conv1D)
        assert isinstance(one, Conv1DLinear)
        assert isinstance(one, FP8Module)
        assert not isinstance(one, torch.nn.Linear)
        assert type(one) is type(layer)
        assert repr(one) == "apex_te.Conv1DLinear(in_features=32, out_features=32, bias=True)"
        assert (one.nf, one.nx) == (32, 32)


RECIPES = [None, DelayedScaling(amax_history_len=4)]


def adapted(model, targets):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # said for the plain model, too
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(model, config)


TARGETS = {"llama": ["q_proj", "o_proj", "up_proj"], "gpt2": ["c_attn", "c_proj", "c_fc"]}


@pytest.mark.parametrize("recipe", RECIPES, ids=["high precision", "delayed"])
@pytest.mark.parametrize("first", ["from_torch", "adapters"])
@pytest.mark.parametrize("name", TARGETS)
def test_lora(name, first, recipe):
    """Adapters train, merge and come off as those of the plain model."""
    torch.manual_seed(3)
    plain = build(name)
    model = copy.deepcopy(plain)
    torch.manual_seed(5)
    plain = adapted(plain, TARGETS[name])
    torch.manual_seed(5)
    if first == "from_torch":
        model = adapted(converted(model), TARGETS[name])
    else:
        model = converted(adapted(model, TARGETS[name]))
    assert [k for k, _ in model.named_parameters()] == [k for k, _ in plain.named_parameters()]
    adapters = [m for k, m in model.named_modules() if ".lora_A." in k or ".lora_B." in k]
    assert adapters
    assert all(type(m) is torch.nn.Linear for m in adapters)
    assert sum(isinstance(m, FP8Module) for m in model.modules()) == (14 if name == "llama" else 8)
    before = logits(plain)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(logits(model), before, **close)
    trained = train(model.train(), recipe, steps=2)
    unmerged = logits(trained)
    assert not torch.equal(unmerged, before)
    if recipe is None:
        torch.testing.assert_close(unmerged, logits(train(plain.train())), **close)
    else:
        assert (logits(trained, recipe) - unmerged).norm() < 0.15 * unmerged.norm()
    trained.merge_adapter()
    torch.testing.assert_close(logits(trained), unmerged, **close)
    trained.unmerge_adapter()
    torch.testing.assert_close(logits(trained), unmerged, **close)
    merged = trained.merge_and_unload()
    assert type(merged) is class_of(name)
    torch.testing.assert_close(logits(merged), unmerged, **close)
    weights = [key for key in merged.state_dict() if ".fp8_state." not in key]
    assert weights == list(build(name).state_dict())
    if recipe is not None:
        with fp8_autocast(False, calibrating=True, fp8_recipe=recipe):
            merged(input_ids=IDS)  # scales that suit the merged weights
        flush_fp8_state()
        assert (logits(merged, recipe) - unmerged).norm() < 0.15 * unmerged.norm()


def test_adapters_and_joined_layers():
    """A joined projection has no place for an adapter; the refusal says why."""
    pytest.importorskip("peft", reason="peft is not installed")
    model = converted(build("llama"), fuse=True)
    with pytest.raises(ValueError, match=r"joined with its norm by from_torch\(fuse=True\)"):
        adapted(model, ["q_proj"])
    wrapped = adapted(build("llama"), ["q_proj"])
    from_torch(wrapped, fuse=True)
    layer = wrapped.base_model.model.model.layers[0]
    assert type(layer.self_attn.kv_proj).__name__ == "JoinedProjections"  # the adapted one stays
    assert type(layer.mlp).__name__ == "JoinedMLP"
    assert "as Linear reads its output, too" in repr(conversion_summary(wrapped))
    assert len(key_map(wrapped).entries) == 2 * (3 + 1)  # parameters of the MLPs, keys and values
    plain = adapted(build("llama"), ["q_proj"])
    plain.load_state_dict(wrapped.state_dict(), strict=True)
    torch.testing.assert_close(logits(wrapped), logits(plain), rtol=1e-5, atol=1e-5)


def test_layers_that_accelerate_has_hooked_are_named():
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    model = build("llama")
    hooks.add_hook_to_module(model.model.layers[0].mlp.up_proj, hooks.AlignDevicesHook("cpu"))
    with pytest.warns(UserWarning, match=r"up_proj \(accelerate's AlignDevicesHook replaced its"):
        from_torch(model)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("llama", {"lm_head": "the model's output embeddings"}),
        ("gpt2", {"lm_head": "the model's output embeddings"}),
        ("gpt_neox", {"lm_head": "the model's output embeddings"}),
        ("bert", {"classifier": "an output head by its name, classifier"}),
    ],
)
def test_output_heads_stay_in_high_precision(name, heads):
    model = converted(build(name))
    linear = (torch.nn.Linear, Conv1DLinear)
    kept = {k for k, m in model.named_modules() if type(m) is torch.nn.Linear}
    assert kept == heads.keys()
    found = conversion_summary(model)
    assert {layer.name: layer.reason for layer in found.kept if layer.name in heads} == heads
    for layer in found.converted:
        assert model.get_submodule(layer.name)._get_name() == layer.after
    all_layers = converted(build(name), include="*")
    assert all(type(m) is not torch.nn.Linear for m in all_layers.modules())
    assert sum(isinstance(m, linear) for m in all_layers.modules()) == sum(
        isinstance(m, linear) for m in model.modules()
    )
