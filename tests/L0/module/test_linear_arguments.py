"""Linear's further arguments: parameters_split, delay_wgrad_compute, save_original_input, name."""

import copy
import dataclasses

import pytest
import torch
from module_cases import (
    RECIPES,
    SCHEMES,
    check_against_torch,
    gradients_for,
    randomized,
    results,
    same_bits,
)

from apex_te import fp8_autocast
from apex_te.module.linear import Linear
from apex_te.recipe import DelayedScaling

PLAIN_AND_FP8 = [None, *SCHEMES]
X = torch.randn(12, 32, generator=torch.Generator().manual_seed(3))
DY = torch.randn(12, 48, generator=torch.Generator().manual_seed(4))


def run(module, recipe, **options):
    module.fp8_state.reset()
    chosen = RECIPES.get(recipe, recipe)
    return results(module, X, None, [DY], chosen, **options)


def linear(**options):
    return randomized(Linear(32, 48, **options))


def halves(whole, split, **options):
    """A module whose parts hold the parameters of ``whole``."""
    module = Linear(32, 48, whole.use_bias, parameters_split=split, **options)
    rows = list(split.values()) if isinstance(split, dict) else [48 // len(split)] * len(split)
    with torch.no_grad():
        for kind in ("weight", "bias") if whole.use_bias else ("weight",):
            for part, value in zip(split, getattr(whole, kind).split(rows), strict=True):
                getattr(module, f"{part}_{kind}").copy_(value)
    return module


@pytest.mark.parametrize("recipe", PLAIN_AND_FP8)
@pytest.mark.parametrize("split", [("a", "b", "c"), ["a"], {"a": 1, "b": 47}], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_split_equals_whole(recipe, split, bias):
    whole = linear(bias=bias)
    module = halves(whole, split)
    found, expected = run(module, recipe), run(whole, recipe)
    for kind in ("weight", "bias") if bias else ("weight",):
        found[kind] = torch.cat([found.pop(f"{part}_{kind}") for part in split])
    assert same_bits(found, expected)


def test_split_parameters():
    module = Linear(32, 48, parameters_split=("query", "key"), init_method=torch.nn.init.ones_)
    names = ["query_weight", "query_bias", "key_weight", "key_bias"]
    assert list(module.state_dict()) == names
    assert module.query_weight.shape == (24, 32)
    assert module.key_bias.shape == (24,)
    assert module.query_weight.eq(1).all()
    assert module.key_weight.eq(1).all()
    assert module.key_bias.eq(0).all()
    other = Linear(32, 48, parameters_split=("query", "key"))
    other.load_state_dict(module.state_dict(), strict=True)
    assert other.key_weight.eq(1).all()
    check_against_torch(randomized(module), X)


@pytest.mark.parametrize("recipe", SCHEMES)
def test_split_weight_is_cached(recipe):
    module = halves(linear(), ("a", "b"))
    expected = run(module, recipe)
    for first in (True, False):
        assert same_bits(expected, run(module, recipe, is_first_microbatch=first))
    with torch.no_grad():
        module.a_weight.mul_(-2)
    found = run(module, recipe, is_first_microbatch=False)
    assert not same_bits(expected, found)
    assert same_bits(run(module, recipe), found)


@pytest.mark.parametrize("recipe", SCHEMES)
def test_a_weight_that_is_passed_is_not_taken_for_the_cached_one(recipe):
    module = linear()
    run(module, recipe, is_first_microbatch=True)
    other = linear()
    given = {"weight": other.weight.detach(), "bias": other.bias.detach()}
    module.fp8_state.reset()
    with torch.no_grad(), fp8_autocast(True, RECIPES[recipe]):
        found = module(X, **given, is_first_microbatch=False)
        expected = module(X, **given)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", PLAIN_AND_FP8)
@pytest.mark.parametrize("hp_wgrad", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_delayed_wgrad(recipe, hp_wgrad, fuse):
    chosen = RECIPES.get(recipe)
    if hp_wgrad and recipe is not None:
        chosen = dataclasses.replace(chosen, override_linear_precision=(False, False, True))
    usual = linear(fuse_wgrad_accumulation=fuse)
    later = Linear(32, 48, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse)
    later.load_state_dict(usual.state_dict())
    for module in (usual, later):
        module.weight.main_grad = torch.zeros(48, 32)
    expected, found = run(usual, chosen), run(later, chosen)
    assert found.pop("weight") is None
    expected.pop("weight")
    assert same_bits(found, expected)
    assert later.weight.main_grad.eq(0).all()
    for _ in range(2):  # the second has nothing to do
        later.backward_dw()
        if fuse:
            assert torch.equal(later.weight.main_grad, usual.weight.main_grad)
            assert later.weight.grad is None
        else:
            assert torch.equal(later.weight.grad, usual.weight.grad)
    assert usual.weight.main_grad.ne(0).any() == fuse


def test_delayed_wgrad_of_several_backwards_adds_up():
    usual, later = linear(), Linear(32, 48, delay_wgrad_compute=True)
    later.load_state_dict(usual.state_dict())
    for module in (usual, later):
        for factor in (1.0, -3.0):
            with fp8_autocast(True, RECIPES["tensorwise"]):
                module(X).backward(factor * DY)
    assert later.weight.grad is None
    later.backward_dw()
    assert torch.equal(usual.weight.grad, later.weight.grad)


def test_delayed_wgrad_between_the_backwards_of_microbatches_in_flight():
    usual, later = linear(), Linear(32, 48, delay_wgrad_compute=True)
    later.load_state_dict(usual.state_dict())
    for module in (usual, later):
        outs = [module(factor * X) for factor in (1.0, -3.0)]
        for out in outs:
            out.backward(DY)
            module.backward_dw()
    assert torch.equal(usual.weight.grad, later.weight.grad)


def test_delayed_wgrad_of_a_frozen_weight_is_nothing():
    module = linear(delay_wgrad_compute=True)
    module.weight.requires_grad_(False)
    run(module, "delayed")
    module.backward_dw()
    assert module.weight.grad is None


@pytest.mark.parametrize("recipe", PLAIN_AND_FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_the_original_input_changes_no_bit(recipe, dtype):
    module = linear(params_dtype=dtype)
    other = copy.deepcopy(module)
    other.save_original_input = True  # as frameworks set it
    x, dy = X.to(dtype), DY.to(dtype)
    found = [results(m, x, None, [dy], RECIPES.get(recipe)) for m in (module, other)]
    assert same_bits(*found)


@pytest.mark.parametrize("recipe", SCHEMES)
def test_the_original_input_is_what_is_saved(recipe):
    x = X.clone().requires_grad_()
    saved = {}
    for original in (False, True):
        module, seen = linear(save_original_input=original), []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, s=seen: s.append(t) or t,
                                                         lambda t: t)  # fmt: skip
        with hooks, fp8_autocast(True, RECIPES[recipe]):
            module(x)
        saved[original] = [(tuple(t.shape), t.element_size()) for t in seen]
        assert any(t.data_ptr() == x.data_ptr() for t in seen) == original
    assert ((32, 16), 1) in saved[False]  # 12 rows, padded for the weight gradient
    assert ((12, 32), 4) in saved[True]
    assert not any(size == 1 and len(shape) == 2 for shape, size in saved[True])


def test_the_original_input_is_cast_with_the_scale_of_its_forward():
    """Other forwards may move the scale before the backward."""
    found = []
    for original in (False, True):
        module = linear(save_original_input=original, init_method=torch.nn.init.ones_)
        with torch.no_grad():
            module.weight.fill_(0.25)
        recipe = DelayedScaling(amax_history_len=2)
        x = X.clone().requires_grad_()
        with fp8_autocast(True, recipe):
            out = module(x)
        for _ in range(2):
            with fp8_autocast(True, recipe):
                module(1000 * X)
        assert module.fp8_state.scale_fwd[0] != 1
        out.backward(DY)
        found.append(module.weight.grad)
    assert torch.equal(*found)


def test_a_weight_cannot_be_passed_beside_parts():
    module = Linear(32, 48, parameters_split=("a", "b"))
    with pytest.raises(ValueError, match=r"^Linear: weight must be None with parameters_split"):
        module(X, torch.zeros(48, 32))
    bias = torch.ones(48)
    with torch.no_grad():
        assert torch.equal(module(X, bias=bias), module(X) + 1)


def test_name():
    assert Linear(4, 4).name is None
    assert Linear(4, 4, name="mlp.fc1").name == "mlp.fc1"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"parameters_split": 3}, TypeError, "parameters_split must be names .* got int"),
        ({"parameters_split": ()}, TypeError, "parameters_split must be names .* got tuple"),
        ({"parameters_split": {}}, ValueError, "must have out_features=48 rows, got 0"),
        ({"parameters_split": ("a", "a")}, ValueError, "must have unique names"),
        ({"parameters_split": list("abcde")}, ValueError, "must divide out_features=48, got 5"),
        ({"parameters_split": {"a": 49}}, ValueError, "must have out_features=48 rows, got 49"),
        ({"parameters_split": {"a": 24.0, "b": 24.0}}, ValueError, "rows above 0"),
        ({"parameters_split": ("1", "b")}, ValueError, "must have identifiers"),
        (
            {"parameters_split": ("a", "b"), "skip_weight_param_allocation": True},
            ValueError,
            "parameters_split must be None with skip_weight_param_allocation=True",
        ),
        (
            {"parameters_split": ("a", "b"), "delay_wgrad_compute": True},
            ValueError,
            "parameters_split must be None with delay_wgrad_compute=True",
        ),
        (
            {"parameters_split": ("a", "b"), "fuse_wgrad_accumulation": True},
            ValueError,
            "parameters_split must be None with fuse_wgrad_accumulation=True",
        ),
        ({"ub_name": "qkv"}, TypeError, "ub_name"),
    ],
)
def test_rejects_arguments(options, error, message):
    with pytest.raises(error, match=message):
        Linear(32, 48, **options)


@pytest.mark.parametrize("recipe", PLAIN_AND_FP8)
def test_gradients_against_torch(device, recipe):
    module = randomized(Linear(32, 48, device=device, save_original_input=True))
    x = X.to(device)
    if recipe is None:
        check_against_torch(module, x)
        return
    from module_cases import check_floors

    check_floors(module, x, RECIPES[recipe])
    assert gradients_for(module, x)[0].shape == (12, 48)
