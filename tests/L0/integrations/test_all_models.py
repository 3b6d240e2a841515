"""from_torch(fuse=True) on small models of all classes of transformers that generate text."""

import collections
import copy
import importlib.util
import inspect
import warnings

import pytest
import torch
from rounding import assert_within, named, rounding_bounds
from tiny_models import VOCABULARY, build, classes, transformers

from apex_te import fp8_autocast
from apex_te.integrations import conversion_summary, from_torch, key_map
from apex_te.recipe import CurrentScaling

IDS = torch.arange(24).view(2, 12) % (VOCABULARY - 8) + 3
CLOSE = 1e-5  # of the largest logit, or element of all gradients
# How many classes of transformers 5.23 have which outcome, without timm.
OUTCOMES = {
    "with norms": 178, "without norms": 48, "nothing joined": 12,
    "not built: ValueError": 14, "not built: StrictDataclassClassValidationError": 11,
    "not built: TypeError": 4, "not built: AttributeError": 3, "not built: ImportError": 3,
    "not built: KeyError": 2, "not built: RuntimeError": 1, "not built: AssertionError": 1,
    "not run: RuntimeError": 11, "not run: TypeError": 7, "not run: ValueError": 7,
    "not run: IndexError": 1,
}  # fmt: skip
# By class: how many layers are joined in a model of two blocks, by kind.
SOME = {
    "BambaForCausalLM": {"JoinedMLP": 2},  # whose other norms take a gate, too
    "Cohere2ForCausalLM": {"JoinedProjections": 4},  # one norm for attention and MLP
    "DeepseekV3ForCausalLM": {"JoinedLinear": 4, "JoinedMLP": 1, "JoinedProjections": 1},
    "GptOssForCausalLM": {"JoinedLinear": 2},
    "LEDForConditionalGeneration": {"JoinedProjections": 8},  # changes its queries in place
    "Olmo2ForCausalLM": {"JoinedProjections": 4},  # norms follow attention and MLP
    "Qwen3NextForCausalLM": {"JoinedProjections": 4},
    "StableLmForCausalLM": {"JoinedLinear": 2, "JoinedMLP": 2},
    "WhisperForCausalLM": {"JoinedLinear": 4},
}


def run(model):
    """Logits and gradients."""
    model.zero_grad()
    accepted = inspect.signature(model.forward).parameters
    options = {"input_ids": IDS.clone()}
    if "use_cache" in accepted or "kwargs" in accepted:
        options["use_cache"] = False
    if getattr(model.config, "is_encoder_decoder", False):
        options["decoder_input_ids"] = IDS.flip(1)
    out = model(**options).logits
    out.float().square().mean().backward()
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return out.detach(), key_map(model).to_original(grads)


def converted(plain):
    """A copy of a model after from_torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return from_torch(copy.deepcopy(plain), fuse=True)


def joined(model):
    """Names of joined layers in the first place where each is, and their originals' names."""
    layers = [layer for layer in conversion_summary(model).converted if ", " in layer.before]
    return collections.Counter(layer.after.rpartition(".")[2] for layer in layers)


def assert_same(plain, model, expected):
    """The converted model has the plain one's logits, gradients and state dict.

    A model in which rounding grows more than usual is compared with its results in fp64.
    """
    results, wanted = named(run(model)), named(expected)
    assert results.keys() == wanted.keys()
    scale = max(value.abs().max() for key, value in wanted.items() if key != "output")
    scales = dict.fromkeys(wanted, scale) | {"output": wanted["output"].abs().max()}
    far = (key for key in wanted if (results[key] - wanted[key]).abs().max() > CLOSE * scales[key])
    if any(True for _ in far):
        assert_within(results, *rounding_bounds(plain, IDS, lambda one, _: run(one)))
    state = plain.state_dict()
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", SOME)
def test_some_models(name, tmp_path):
    """Layers are joined as they should be, the model computes the same, and its files load."""
    plain = build(name)
    model = converted(plain)
    expected = run(plain)
    assert joined(model) == SOME[name]
    assert_same(plain, model, expected)
    model.save_pretrained(tmp_path)
    again, info = type(plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(run(again)[0], expected[0])
    with fp8_autocast(True, CurrentScaling()):
        low, grads = run(model)
    assert 0 < (low - expected[0]).norm() < 0.3 * expected[0].norm()
    assert grads.keys() == expected[1].keys()


def outcome(name):
    """What becomes of a class: why there is no small model, or what is joined in it."""
    try:
        plain = build(name)
    except Exception as error:
        return f"not built: {type(error).__name__}"
    model = converted(plain)
    try:
        expected = run(plain)
    except Exception as error:
        return f"not run: {type(error).__name__}"
    assert_same(plain, model, expected)
    kinds = joined(model)
    with_norm = kinds["JoinedLinear"] + kinds["JoinedMLP"]
    return "with norms" if with_norm else "without norms" if kinds else "nothing joined"


@pytest.mark.long
def test_all_models():
    """Every class that can be built is the same after conversion; others are counted by reason."""
    found, wrong = {}, {}
    for name in classes():
        try:
            found[name] = outcome(name)
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong
    if transformers.__version__.startswith("5.23.") and not importlib.util.find_spec("timm"):
        assert collections.Counter(found.values()) == OUTCOMES, found
