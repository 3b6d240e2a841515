"""``apex_te.advise``: what it measures and advises, and that it leaves everything as it was."""

from __future__ import annotations

import json
import math
import os
import random
from collections import OrderedDict

import pytest
import torch
from torch import nn

import apex_te
from apex_te import recipe
from apex_te.fp8.delayed.ranks import amax_groups, registry
from apex_te.integrations import conversion_summary, from_torch
from apex_te.integrations.layer_advice import trial
from apex_te.integrations.layer_advice.advice import ExactName


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One call a round, for times that no test reads."""
    monkeypatch.setattr(trial, "_WARM_UP", 1)
    monkeypatch.setattr(trial, "_MOST_CALLS", 1)


class Model(nn.Module):
    """Layers of three sizes, one of them called twice, with dropout and a counting buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)
        )
        self.shared = nn.Linear(64, 64, bias=False)
        self.odd = nn.Linear(64, 10)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(64)
        self.unused = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 32)

    def forward(self, tokens, scale=1.0):
        x = self.norm(self.embed(tokens).flatten(0, 1)) * scale
        for block in self.blocks:
            x = x + self.drop(block(x))
        x = self.shared(self.shared(x))
        return self.lm_head(x) + self.odd(x).sum(-1, keepdim=True)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


TOKENS = torch.arange(32).view(2, 16)
NAMES = ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "shared", "odd"]


@pytest.mark.parametrize(
    "name",
    [
        "delayed",
        "tensorwise",
        "blockwise",
        "mxfp8",
        recipe.CurrentScaling(fp8_format=recipe.Format.HIF8),
    ],
)
def test_layers_and_statistics(name, model):
    advice = apex_te.advise(model, TOKENS, name, repeats=1, min_gain=0.0)
    found = {layer.name: layer for layer in advice.layers}
    assert list(found) == [*NAMES, "unused", "lm_head"]
    for each in NAMES:
        layer = found[each]
        linear = model.get_submodule(each)
        assert (layer.in_features, layer.out_features) == (linear.in_features, linear.out_features)
        assert layer.rows == 32
        assert layer.calls == (2 if each == "shared" else 1)
        assert layer.times.high > 0
        assert layer.times.fp8 > 0
        assert layer.times.backward
        assert set(layer.roles) == {"input", "weight", "grad_output"}
        assert layer.roles["weight"].amax == linear.weight.abs().max().item()
        assert all(20 < role.sqnr < 60 for role in layer.roles.values())
    assert found["unused"].times is None
    assert found["unused"].advice() == "did not run"
    assert found["lm_head"].kept == "an output head by its name, lm_head"
    assert found["odd"].against == ("a size of 10 is not a multiple of 16",)
    assert advice.exclude == ["odd"]


def test_statistics_are_those_of_the_tensors(model):
    """Amax and SQNR of the first layer's tensors, computed by hand under tensorwise scaling."""
    seen: dict[str, torch.Tensor] = {}
    linear = model.blocks[0][0]

    def hook(module, args, output):
        seen["input"] = args[0].detach()
        output.register_hook(lambda grad: seen.update(grad_output=grad))

    handle = linear.register_forward_hook(hook)
    torch.manual_seed(3)
    model(TOKENS).square().mean().backward()
    handle.remove()
    seen["weight"] = linear.weight.detach()
    model.zero_grad()
    torch.manual_seed(3)
    (layer, *_) = apex_te.advise(model, TOKENS, "tensorwise", repeats=1).layers
    for role, x in seen.items():
        dtype = torch.float8_e5m2 if role == "grad_output" else torch.float8_e4m3fn
        scale = torch.finfo(dtype).max / x.abs().max()
        lost = x - (x * scale).to(dtype).float() / scale
        expected = 10 * math.log10(x.square().sum().item() / lost.square().sum().item())
        assert layer.roles[role].amax == x.abs().max().item()
        assert layer.roles[role].sqnr == pytest.approx(expected, abs=0.05)


def test_everything_stays_as_it_was(model):
    model(TOKENS).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = {name: None if g is None else g.clone() for name, g in gradients.items()}
    buffers = {name: id(b) for name, b in model.named_buffers()}
    calls: list[str] = []
    model.odd.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    states = torch.get_rng_state(), random.getstate(), len(registry.sizes), amax_groups.clocks
    hooks = [len(m._forward_hooks) for m in model.modules()]
    grad = torch.is_grad_enabled()
    apex_te.advise(model, TOKENS, repeats=1)
    assert calls == []
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert len(registry.sizes) == states[2]
    assert amax_groups.clocks[1][: len(states[3][1])] == states[3][1]
    assert torch.is_grad_enabled() is grad
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert {name: id(b) for name, b in model.named_buffers()} == buffers
    for name, p in model.named_parameters():
        assert p.grad is gradients[name]
        assert p.grad is None or torch.equal(p.grad, values[name])
    assert all(type(m) is not apex_te.Linear for m in model.modules())


def test_dropout_of_tried_layers_leaves_random_states():
    """Timed copies of a layer with dropout draw random numbers, which advise must take back."""
    tracker = apex_te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    layer = apex_te.TransformerLayer(
        32, 64, 2, hidden_dropout=0.5, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker
    )
    state, forked = torch.get_rng_state(), tracker.get_states()["model-parallel-rng"]
    apex_te.advise(layer, torch.randn(4, 2, 32, generator=torch.Generator()), repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], forked)


def test_buffers_that_the_forward_makes_are_gone():
    class Caching(nn.Linear):
        def forward(self, inp):
            self.seen = inp.detach()
            self.count += 1
            self.register_buffer("made", torch.zeros(2))
            return super().forward(inp)

    cache = Caching(32, 32)
    cache.register_buffer("seen", None)
    cache.register_buffer("count", torch.zeros(()))
    keys = list(cache.state_dict())
    apex_te.advise(nn.Sequential(cache, nn.Linear(32, 32)), torch.randn(4, 32), repeats=1)
    assert cache.seen is None
    assert list(cache.state_dict()) == keys
    assert cache.count == 0


def test_training_goes_on_bitwise(model):
    """Steps of delayed scaling are the same with and without an ``advise`` between them."""

    def train(advised):
        torch.manual_seed(0)
        trained = from_torch(Model())
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        losses = []
        for step in range(4):
            if advised and step in (0, 2):
                apex_te.advise(trained, TOKENS, repeats=1)
            with apex_te.fp8_autocast(fp8_recipe=recipe.DelayedScaling(amax_history_len=4)):
                loss = trained(TOKENS).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    apex_te.flush_fp8_state()
    plain = train(False)
    apex_te.flush_fp8_state()
    assert all(map(torch.equal, plain, train(True)))


def test_exclude_is_taken_by_from_torch(model):
    advice = apex_te.advise(model, TOKENS, "tensorwise", repeats=1, min_gain=0.0)
    from_torch(model, exclude=advice.exclude)
    kept = {layer.name: layer.reason for layer in conversion_summary(model).kept}
    assert kept["odd"] == "excluded"
    assert "blocks.0.0" not in kept


def test_name_that_is_a_part_of_another():
    model = nn.Sequential(nn.Linear(16, 24), nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 32)))
    advice = apex_te.advise(model, torch.randn(16, 16), "tensorwise", repeats=1, min_gain=0.0)
    assert [layer.name for layer in advice.layers if layer.against] == ["0", "1.0"]
    assert advice.exclude == ["0", "1.0"]  # all layers that "0" matches are to stay
    model = nn.Sequential(nn.Linear(16, 24), nn.Sequential(nn.Identity(), nn.Linear(24, 32)))
    model[1][0] = nn.Linear(24, 24)
    model.append(nn.Sequential(nn.Linear(32, 32)))
    advice = apex_te.advise(model, torch.randn(16, 16), "tensorwise", repeats=1, min_gain=0.0)
    first, *others = advice.exclude
    assert isinstance(first, ExactName)
    assert repr(first) == "ExactName('0')"
    from_torch(model, exclude=advice.exclude)
    assert type(model[0]) is nn.Linear
    assert type(model[2][0]) is apex_te.Linear
    assert json.loads(advice.to_json())["exclude"] == ["0", *others]


def test_reasons_against(model, monkeypatch):
    monkeypatch.setattr(trial, "_milliseconds", lambda runs, device, repeats: [1.0, 2.0])
    advice = apex_te.advise(
        model, TOKENS, "tensorwise", min_gain=1.0, min_sqnr=99.0, min_grad_sqnr=98.0
    )
    first, *_ = advice.layers
    assert first.gain == 0.5
    assert first.against[0] == "0.50x as fast in FP8"
    told = " ".join(first.against)
    for role, limit in (("input", 99), ("weight", 99), ("grad_output", 98)):
        assert f"SQNR of {role} {first.roles[role].sqnr:.1f} dB is below {limit}" in told
    assert advice.exclude == NAMES
    assert advice.totals() == {"high": 7.0, "fp8": 14.0, "advised": 7.0}


def test_elements_that_are_not_finite():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    with torch.no_grad():
        model[0].weight[3, 3] = math.inf
    advice = apex_te.advise(model, torch.randn(16, 16), "tensorwise", repeats=1, min_gain=0.0)
    assert "1 NaN or infinite elements in weight" in advice.layers[0].against


def test_loss_function_keywords_and_frozen_weights(model):
    def sample(m):
        with torch.autocast("cpu", torch.bfloat16):
            return m(tokens=TOKENS, scale=0.5).float().logsumexp(-1).mean()

    autocast = apex_te.advise(model, sample, "tensorwise", repeats=1)
    assert autocast.layers[0].times.backward
    named = apex_te.advise(model, {"tokens": TOKENS, "scale": 2.0}, "tensorwise", repeats=1)
    plain = apex_te.advise(model, (TOKENS, 1.0), "tensorwise", repeats=1)
    ratio = named.layers[0].roles["input"].amax / plain.layers[0].roles["input"].amax
    assert ratio == pytest.approx(2.0)
    model.requires_grad_(False)
    frozen = apex_te.advise(model, TOKENS, "tensorwise", repeats=1).layers[0]
    assert not frozen.times.backward
    assert set(frozen.roles) == {"input", "weight"}


@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_layers_of_apex_te(name):
    torch.manual_seed(0)
    layers = [apex_te.TransformerLayer(64, 128, 4, layer_number=1), apex_te.Linear(64, 32)]
    model = nn.Sequential(*layers, nn.Linear(32, 32))
    advice = apex_te.advise(model, torch.randn(16, 2, 64), name, repeats=1)
    assert [layer.kind for layer in advice.layers] == ["TransformerLayer", "Linear", "Linear"]
    for layer in advice.layers:
        assert layer.times.backward
        assert set(layer.roles) == {"input", "weight", "grad_output"}


def test_huggingface_model_with_checkpointing():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32,
        n_head=2,
        n_layer=2,
        vocab_size=64,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids = torch.randint(0, 64, (2, 16))
    sample = {"input_ids": ids, "labels": ids}
    advice = apex_te.advise(model, sample, "tensorwise", repeats=1)
    first = advice.layers[0]
    assert (first.name, first.kind) == ("transformer.h.0.attn.c_attn", "Conv1D")
    assert (first.in_features, first.out_features, first.calls) == (32, 96, 1)
    assert set(first.roles) == {"input", "weight", "grad_output"}
    assert advice.layers[-1].kept == "the model's output embeddings"


def test_reentrant_checkpointing_is_refused(model):
    from torch.utils.checkpoint import checkpoint

    def sample(m):
        x = m.embed(TOKENS)
        return checkpoint(m.shared, x, use_reentrant=True).sum()

    with pytest.raises(NotImplementedError, match="use_reentrant=False, or none, got reentrant"):
        apex_te.advise(model, sample, repeats=1)
    assert not model.shared._forward_hooks


def test_verdict_of_measured_times(monkeypatch, model):
    """The first line gives the gain of all layers and names those to keep."""
    monkeypatch.setattr(trial, "_milliseconds", lambda runs, device, repeats: [2.0, 1.0])
    advice = apex_te.advise(model, TOKENS, "tensorwise", min_gain=1.0)
    first, second, *_ = str(advice).splitlines()
    assert first == "Use tensorwise: 1.75x as fast; keep odd, lm_head out of FP8."
    assert second.startswith("SQNR is high enough in every layer; lowest: ")
    monkeypatch.setattr(trial, "_milliseconds", lambda runs, device, repeats: [1.0, 2.0])
    slow = apex_te.advise(model, TOKENS, "tensorwise", min_gain=1.0)
    assert str(slow).startswith("Do not use tensorwise for this model: no layer is faster")


def test_on_a_cpu_sizes_and_sqnr_decide(model):
    advice = apex_te.advise(model, TOKENS, "tensorwise", repeats=1)
    assert advice.exclude == ["odd"]
    text = str(advice)
    assert text.startswith("tensorwise fits 5 of 6 layers by sizes and SQNR; keep odd, lm_head out")
    assert "FP8 ms" not in text
    low = apex_te.advise(model, TOKENS, "tensorwise", repeats=1, min_sqnr=99.0)
    assert low.verdict().startswith("Do not use tensorwise")
    assert low.precision().startswith("SQNR is too low or not finite in blocks.*.* (4), shared")


def test_lines_are_narrow_and_long_names_short():
    inner: nn.Module = nn.Linear(32, 24)
    for name in ("projection", "attention", "layers", "transformer", "model"):
        inner = nn.Sequential(OrderedDict([(name, inner)]))
    text = str(apex_te.advise(inner, torch.randn(16, 32), "delayed", repeats=1, min_gain=0.0))
    assert max(map(len, text.splitlines())) <= 100
    assert "\n..attention.projection " in text
    assert "exclude=['model.transformer.layers.attention.projection']" in text


def test_table_json_and_picture(model, tmp_path):
    advice = apex_te.advise(model, TOKENS, "tensorwise", repeats=1, min_gain=0.0)
    text = str(advice)
    lines = text.splitlines()
    assert "\nadvise: CurrentScaling() on " in text
    columns = next(i for i, line in enumerate(lines) if line.startswith("layer "))
    assert lines[columns].split()[:5] == ["layer", "in", "out", "rows", "calls"]
    assert lines[columns + 1].split()[:5] == ["blocks.0.0", "64", "128", "32", "1"]
    assert lines[-1] == "exclude=['odd']"
    apart = next(i for i, line in enumerate(lines) if line.startswith("Each layer ran alone. "))
    assert lines[apart - 1].startswith("all layers: ")
    assert "odd: keep: a size of 10 is not a multiple of 16" in text
    path = tmp_path / "advice.json"
    found = json.loads(advice.to_json(path))
    assert json.loads(path.read_text()) == found
    assert found["exclude"] == ["odd"]
    assert found["layers"][-1]["times"] is None
    assert found["layers"][0]["roles"]["input"]["sqnr"] == advice.layers[0].roles["input"].sqnr
    pytest.importorskip("matplotlib")
    advice.plot(tmp_path / "advice.svg")
    picture = (tmp_path / "advice.svg").read_text()
    assert os.path.getsize(tmp_path / "advice.svg") > 5000
    assert "blocks.1.2" in picture or "<svg" in picture


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"model": nn.ReLU()}, ValueError, "model must have a linear layer .*, got ReLU"),
        (
            {"model": nn.Linear(2, 2, device="meta")},
            ValueError,
            "model must have .*, got weight on meta",
        ),
        ({"sample": 3}, TypeError, "sample must be a tensor, tuple, .*, got int"),
        ({"sample": nn.ReLU()}, TypeError, "sample must be a tensor, tuple, .*, got ReLU"),
        ({"sample": lambda m: "text"}, ValueError, "sample must make .* tensors, got str"),
        ({"recipe": 3}, TypeError, "recipe must be a recipe from apex_te.recipe"),
        ({"repeats": 0}, ValueError, "repeats must be at least 1, got 0"),
        ({"repeats": 1.5}, TypeError, "repeats must be an int, got float"),
        ({"min_gain": "1"}, TypeError, "min_gain must be a number, got str"),
        ({"min_grad_sqnr": None}, TypeError, "min_grad_sqnr must be a number, got NoneType"),
    ],
)
def test_bad_arguments(arguments, error, told):
    good = {"model": nn.Linear(16, 16), "sample": torch.zeros(16, 16), "repeats": 1}
    with pytest.raises(error, match=f"advise: {told}"):
        apex_te.advise(**{**good, **arguments})


def test_settings_that_are_not_the_defaults_are_told():
    tried = recipe.DelayedScaling(margin=1, amax_history_len=4)
    layer = apex_te.Linear(16, 16)
    advice = apex_te.advise(layer, torch.zeros(16, 16), tried, repeats=1, min_gain=0.0)
    assert advice.recipe == "DelayedScaling(margin=1, amax_history_len=4)"
    assert "Each layer ran alone" not in str(advice)


def test_region_of_the_sample_is_refused(model):
    def sample(m):
        with apex_te.fp8_autocast():
            return m(TOKENS)

    with pytest.raises(ValueError, match=r"outside of fp8_autocast, got a call of blocks\.0\.0"):
        apex_te.advise(from_torch(model), sample, repeats=1)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    yield
    torch.distributed.destroy_process_group()


def test_sharded_model_is_refused(model, one_rank):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    with pytest.raises(NotImplementedError, match=r"must not be sharded, got .* as a DTensor"):
        apex_te.advise(model, TOKENS, repeats=1)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise"])
def test_on_a_gpu(name):
    """Times of both come from the device; the statistics are those of the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).bfloat16()
    x = torch.randn(128, 256, dtype=torch.bfloat16)
    on_cpu = apex_te.advise(model, x, name, repeats=1)
    states = torch.cuda.get_rng_state()
    advice = apex_te.advise(model.cuda(), x.cuda(), name, repeats=3)
    assert torch.equal(torch.cuda.get_rng_state(), states)
    assert advice.device == torch.cuda.get_device_name()
    for layer, reference in zip(advice.layers, on_cpu.layers, strict=True):
        assert 0 < layer.times.fp8 < 1e3
        assert 0 < layer.times.high < 1e3
        for role in ("input", "weight"):
            sqnr = reference.roles[role].sqnr
            assert layer.roles[role].sqnr == pytest.approx(sqnr, abs=0.5)
