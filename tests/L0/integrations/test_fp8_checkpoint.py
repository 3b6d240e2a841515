"""from_fp8_checkpoint: bytes read = held = written, values and gradients, training, LoRA."""

import copy
import json

import pytest
import torch
from released_files import (
    IDS,
    LAYOUTS,
    MODELS,
    assert_same_tensors,
    plain_model,
    read,
    release,
)
from test_trainer import losses, trainer

from apex_te import export_fp8, fp8_autocast, from_fp8_checkpoint
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.integrations.experts import StackedExperts
from apex_te.integrations.huggingface import FP8Callback
from apex_te.module.linear import Linear
from apex_te.optimizers import FusedAdam
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling

pytest.importorskip("transformers", "5.23")

HELD = [name for name in LAYOUTS if name != "mxfp8"]
NAMES = [name for name in MODELS if "fsdp" not in name]


def cases():
    """Each layout with one model, every other one fused, and the others marked long."""
    for i, layout in enumerate(HELD):
        for j, model in enumerate(NAMES):
            for fuse in (False, True):
                usual = (j - i) % len(NAMES) == 0 and fuse == bool((i // len(NAMES) + i) % 2)
                marks = () if usual else pytest.mark.long
                name = f"{layout}-{model}-{'fused' if fuse else 'converted'}"
                yield pytest.param(layout, model, fuse, marks=marks, id=name)


def recipe_of(layout):
    """The recipe that a layout's model is to have."""
    config, _, form, dtype, static = LAYOUTS[layout]
    if form in ((1, 0), (-1,)):
        return RowwiseScaling(activation_scale_ub=config.get("activation_scale_ub"))
    if len(form) > 1:
        return BlockScaling(pow2=not dtype.is_floating_point or dtype.itemsize == 1)
    return DelayedScaling() if static else CurrentScaling()


def load(folder, device="cpu", **options):
    """The model in float32, loaded to a device."""
    if device != "cpu":
        options["device_map"] = device
    return from_fp8_checkpoint(folder, dtype=torch.float32, **options)


def logits(model):
    with torch.no_grad():
        return model(IDS.to(model.device)).logits


def fp8_weights(model):
    return {n: p for n, p in model.named_parameters() if type(p) is FP8Parameter}


def loss_of(model, recipe=None):
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        ids = IDS.to(model.device)
        return model(input_ids=ids, labels=ids).loss


def relative(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(("layout", "model", "fuse"), cases())
@pytest.mark.filterwarnings("ignore:from_torch")
def test_bytes_read_are_held_and_written(layout, model, fuse, device, tmp_path):
    wanted, decoded = release(model, layout, tmp_path / "read", same=True)
    loaded = load(tmp_path / "read", device, fuse=fuse)
    assert loaded.hf_quantizer.recipe == recipe_of(layout)
    assert not loaded.hf_quantizer.cast_again
    plain = plain_model(model, decoded, tmp_path / "plain").to(device)
    torch.testing.assert_close(logits(loaded), logits(plain), rtol=0, atol=2e-5)
    loaded.save_pretrained(tmp_path / "saved")
    export_fp8(loaded, tmp_path / "exported", layout="file", max_shard_size="64KB")
    for name in ("saved", "exported"):
        assert_same_tensors(read(tmp_path / name), wanted)
        config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert LAYOUTS[layout][0].items() <= config.items()
        assert "apex_te" not in str(config)
    again = load(tmp_path / "exported", device, fuse=fuse)
    assert torch.equal(logits(again), logits(loaded))


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("fp8", "qwen3_moe edges"),
        ("fp8 bytes", "deepseek_v3"),
        ("ct tensor", "qwen3_moe"),
        ("ct channel", "qwen3_moe edges"),
        ("fbgemm", "deepseek_v3"),
    ],
)
def test_gradients_are_those_of_the_decoded_model(layout, model, device, tmp_path):
    """Outside of a region; in one, layers differ by the casts of activations, not of weights."""
    _, decoded = release(model, layout, tmp_path / "read", same=True)
    loaded = load(tmp_path / "read", device)
    plain = plain_model(model, decoded, tmp_path / "plain").to(device)
    loss_of(loaded).backward()
    loss_of(plain).backward()
    grads = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in loaded.named_parameters():
        grad, wanted = parameter.grad, grads[name]
        if grad.shape != wanted.shape:  # experts with further features, whose gradients are zeros
            features = wanted.shape[-2] // 2, wanted.shape[-1]
            if "gate_up" in name:
                gate, up = grad.chunk(2, 1)
                rest = torch.cat([gate[:, features[0] :], up[:, features[0] :]])
                grad = torch.cat([gate[:, : features[0]], up[:, : features[0]]], 1)
            else:
                grad, rest = grad[..., : features[1]], grad[..., features[1] :]
            assert not rest.any()
        torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-5)
    for name, module in loaded.named_modules():
        top = ()
        if isinstance(module, StackedExperts):
            features, bounds = module.gate_up_proj.shape[-1], BOUNDS_OF_EXPERTS
            top = torch.stack([torch.randperm(4)[:2] for _ in range(64)]), torch.rand(64, 2)
            top = tuple(each.to(device) for each in top)
        elif type(module) is Linear:
            features, bounds = module.in_features, BOUNDS
        else:
            continue
        x = torch.randn(64, features, device=device)
        found = of_layer(module, x, *top, recipe=loaded.hf_quantizer.recipe)
        found = [relative(*pair) for pair in zip(found, of_layer(module, x, *top), strict=True)]
        bounds = bounds[layout == "ct tensor"]
        assert all(a < b for a, b in zip(found, bounds, strict=False)), (name, found, bounds)


# Errors of output and gradients of input and weights: those of a cast to E4M3, 2.7%, or with
# delayed scaling to E5M2, 5.4%, of one operand or both. A cast of the weights would add 2.6%.
BOUNDS = (0.029, 0.029, 0.04), (0.029, 0.056, 0.063)
BOUNDS_OF_EXPERTS = (0.05, 0.05, 0.056, 0.056), (0.05, 0.083, 0.083, 0.09)


def of_layer(layer, x, *others, recipe=None):
    """Output, gradient of the input and of the weights, for a fixed gradient of the output."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y = layer(x, *others)
    torch.manual_seed(7)
    y.backward(torch.randn_like(y))
    return y.detach(), x.grad, *(p.grad for p in layer.parameters())


@pytest.mark.parametrize("layout", ["ct block", "ct channel"])
@pytest.mark.parametrize("fuse", [False, True], ids=["converted", "fused"])
@pytest.mark.filterwarnings("ignore:from_torch")
def test_what_is_not_trained_keeps_its_bytes(fuse, layout, device, tmp_path):
    wanted, _ = release("qwen3_moe edges", layout, tmp_path / "read")
    model = load(tmp_path / "read", device, fuse=fuse)
    recipe = model.hf_quantizer.recipe
    trained = {n: p for n, p in fp8_weights(model).items() if "layers.1" in n and "k_norm" not in n}
    rates = [{"params": list(trained.values()), "lr": 1e-3}]
    rates.append({"params": [p for n, p in model.named_parameters() if n not in trained], "lr": 0})
    optimizer = FusedAdam(rates, master_weights=True)
    losses = []
    for _ in range(3):
        loss = loss_of(model, recipe)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    export_fp8(model, tmp_path / "exported", layout="file")
    found = read(tmp_path / "exported")
    changed = {
        key for key, value in wanted.items() if not torch.equal(found[key].float(), value.float())
    }
    names = {key for key in wanted if "layers.1" in key and f"{key}_scale" in wanted}
    assert names <= changed <= names | {f"{name}_scale" for name in names}
    again = load(tmp_path / "exported", device, fuse=fuse)
    assert torch.equal(logits(again), logits(model))


def test_lora_leaves_all_bytes_and_merges(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    wanted, _ = release("llama", "fp8", tmp_path / "read")
    model = load(tmp_path / "read")
    recipe = model.hf_quantizer.recipe
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = loss_of(adapted, recipe)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    layers = {n: m for n, m in adapted.named_modules() if hasattr(m, "get_delta_weight")}
    sums = {n: m.weight.dequantize() + m.get_delta_weight("default") for n, m in layers.items()}
    merged = adapted.merge_and_unload()
    for name, value in sums.items():
        weight = merged.get_submodule(name.removeprefix("base_model.model.")).weight
        assert type(weight) is FP8Parameter
        assert relative(weight.dequantize(), value.detach()) < 0.028  # that of a cast
    merged.save_pretrained(tmp_path / "merged")
    found = read(tmp_path / "merged")
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if not any(f"{name}." in key for name in ("q_proj", "down_proj")):
            assert torch.equal(found[key].float(), value.float()), key


@pytest.mark.parametrize(
    ("layout", "model", "fuse"),
    [("ct block", "qwen3_moe edges", False), ("fp8 bytes", "llama", True),
     ("fp8 static", "mixtral", False), ("modelopt channel", "llama", True)],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:from_torch")
def test_trainer_trains_all_weights_and_resumes_bitwise(layout, model, fuse, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    release(model, layout, tmp_path / "read", same=True)

    def train(name, **options):
        loaded = load(tmp_path / "read", fuse=fuse)
        callback = FP8Callback(loaded.hf_quantizer.recipe, convert=False)
        one = trainer(tmp_path / name, [callback], loaded.train(), learning_rate=5e-4)
        return loaded, losses(one, **options)

    straight, found = train("straight")
    resumed, rest = train("resumed", resume_from_checkpoint=tmp_path / "straight/checkpoint-2")
    assert rest[-2:] == found[-2:]
    ours, theirs = (dict(each.named_parameters()) for each in (resumed, straight))
    for name, value in theirs.items():
        if type(value) is FP8Parameter:
            pairs = zip(ours[name].codes(), value.codes(), strict=True)
            assert all(torch.equal(a.float(), b.float()) for a, b in pairs), name
        else:
            assert torch.equal(ours[name], value), name


def test_copies_pickles_and_state_dicts_keep_the_bytes(tmp_path):
    wanted, _ = release("qwen3_moe edges", "ct block", tmp_path / "read")
    model = load(tmp_path / "read")
    torch.save(model, tmp_path / "model.pt")
    for made in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        made.save_pretrained(tmp_path / "saved")
        assert_same_tensors(read(tmp_path / "saved"), wanted)
        for state in (wanted, model.state_dict()):  # as files have it, and as the model has
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.zero_()
            made.load_state_dict(state)
            assert torch.equal(logits(made), logits(model))
