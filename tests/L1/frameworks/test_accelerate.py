"""Accelerate with ``mixed_precision="fp8"``: conversion, every option, checkpoints."""

import copy
import os

import pytest
import torch
from pins import pin
from tiny import STEPS, batches, check_losses, optimizer_of, plain_losses, tiny_llama

pytest.importorskip("accelerate", minversion=pin("accelerate"))
pytest.importorskip("transformers", minversion=pin("transformers"))

import transformer_engine.pytorch as te
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    FP8RecipeKwargs,
    TERecipeKwargs,
    has_transformer_engine_layers,
    is_fp8_available,
    is_transformer_engine_available,
)

from apex_te import recipe as native


@pytest.fixture(autouse=True)
def _no_accelerator():
    """Accelerate keeps its precision and devices in classes."""
    yield
    _forget_accelerator()


def _forget_accelerator():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerator(**options):
    return Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(**options)])


def prepare(given, model):
    """Has Accelerate convert a model, which it does together with an optimizer."""
    return given.prepare(model, torch.optim.SGD(model.parameters(), 0.1))[0]


def train(given, model, steps=STEPS):
    """Trains a language model through Accelerate and returns the loss of each step."""
    model, optimizer = given.prepare(model, optimizer_of(model))
    losses = []
    for _, batch in zip(range(steps), batches(), strict=False):
        loss = model(input_ids=batch, labels=batch).loss
        given.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_availability():
    assert is_transformer_engine_available()
    assert is_fp8_available()


def test_a_language_model_is_converted_and_learns():
    model = tiny_llama()
    plain, before = plain_losses(model), copy.deepcopy(model.state_dict())
    names = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    prepared = prepare(accelerator(), model)
    assert {name for name, m in prepared.named_modules() if isinstance(m, te.Linear)} == names
    assert has_transformer_engine_layers(prepared)
    for name, value in before.items():
        assert torch.equal(prepared.state_dict()[name], value), name
    check_losses(train(accelerator(), tiny_llama()), plain)


@pytest.mark.parametrize("during", [False, True])
def test_evaluation_is_in_high_precision_unless_asked_for(during):
    x = torch.randn(16, 32)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 16))
    with torch.autocast("cpu", torch.bfloat16):  # which Accelerate adds to FP8
        expected = model(x).float()
    model = prepare(accelerator(use_autocast_during_eval=during), model)
    model.eval()
    assert torch.equal(model(x).float(), expected) is not during
    model.train()
    assert not torch.equal(model(x).float(), expected)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        # What equals Accelerate's own default is not passed on: Transformer Engine's counts.
        ({}, {"amax_history_len": 1024, "amax_compute_algo": "max"}),
        ({"margin": 2}, {"margin": 2}),
        ({"interval": 3}, {"interval": 3}),
        ({"fp8_format": "E4M3"}, {"fp8_format": native.Format.E4M3}),
        ({"amax_history_len": 16}, {"amax_history_len": 16}),
        ({"amax_compute_algo": "max"}, {"amax_compute_algo": "max"}),
        (
            {"override_linear_precision": (False, False, True)},
            {"override_linear_precision": (False, False, True)},
        ),
    ],
)
def test_each_option_reaches_the_layers(options, fields):
    model = prepare(accelerator(**options), torch.nn.Sequential(torch.nn.Linear(32, 16)))
    model(torch.randn(16, 32)).sum().backward()
    recipe = model[0]._fp8.state.recipe
    assert isinstance(recipe, native.DelayedScaling)
    assert {name: getattr(recipe, name) for name in fields} == fields


def test_mxfp8_is_chosen():
    given = accelerator(use_mxfp8_block_scaling=True)
    x = torch.randn(32, 64)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    expected = copy.deepcopy(model)(x)
    model = prepare(given, model)
    y = model(x)
    assert not torch.equal(y, expected)
    assert torch.allclose(y, expected, atol=0.2)
    assert not model[0]._fp8.state.allocated  # MXFP8 keeps no state


def test_pure_e5m2_is_refused():
    with pytest.raises(ValueError, match="pure E5M2 training is not supported"):
        prepare(accelerator(fp8_format="E5M2"), torch.nn.Sequential(torch.nn.Linear(32, 16)))


def test_layers_of_transformer_engine_are_not_converted_again():
    layers = [
        te.Linear(32, 32, return_bias=True), te.LayerNorm(32, zero_centered_gamma=True),
        te.RMSNorm(32), te.LayerNormLinear(32, 48), te.LayerNormMLP(32, 64),
        te.TransformerLayer(32, 64, 4),
    ]  # fmt: skip
    model = torch.nn.ModuleList(layers)
    inside = list(model.modules())
    prepared = prepare(accelerator(), model)
    assert list(prepared) == layers
    assert [id(m) for m in prepared.modules()] == [id(m) for m in inside]
    assert prepared[0].return_bias
    assert prepared[1].zero_centered_gamma


@pytest.mark.parametrize("handlers", [[FP8RecipeKwargs(backend="TE")], []])
def test_accelerates_own_test(handlers):
    os.environ["ACCELERATE_FP8_BACKEND"] = "TE"
    given = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers or None)
    data = torch.utils.data.DataLoader(torch.randn(10, 32), batch_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lambda _: 1.0)
    model, optimizer, data, scheduler = given.prepare(model, optimizer, data, scheduler)
    assert has_transformer_engine_layers(model)
    for batch in data:
        given.backward(model(batch).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def test_a_saved_state_continues_to_the_bit(tmp_path):
    def prepared():
        given = accelerator(amax_history_len=4)
        model = tiny_llama()
        return given, *given.prepare(model, optimizer_of(model))

    def step(given, model, optimizer, batch):
        loss = model(input_ids=batch, labels=batch).loss
        given.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    data = list(batches())
    given, model, optimizer = prepared()
    for batch in data[:6]:
        step(given, model, optimizer, batch)
    given.save_state(str(tmp_path))
    expected = [step(given, model, optimizer, batch) for batch in data[6:10]]
    _forget_accelerator()
    given, model, optimizer = prepared()
    given.load_state(str(tmp_path))
    assert [step(given, model, optimizer, batch) for batch in data[6:10]] == expected
