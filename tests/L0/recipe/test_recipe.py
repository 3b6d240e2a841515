"""Recipes and fp8_autocast: arguments, errors and the region stack."""

import copy
import dataclasses
import importlib
import inspect
import pickle
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch

import apex_te
from apex_te import fp8_autocast, is_fp8_enabled
from apex_te.autocast import get_fp8_recipe
from apex_te.distributed import enable_fp8_all_gather
from apex_te.fp8.delayed.state import update_scales
from apex_te.integrations.transformer_engine.common import recipe as te_recipe
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, Format, MXFP8Scaling


def test_format_values():
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    assert (Format.E4M3.value.max_fwd, Format.E4M3.value.max_bwd) == (448, 448)
    assert (Format.E5M2.value.max_fwd, Format.E5M2.value.max_bwd) == (57344, 57344)
    assert Format.HYBRID.value.fwd_dtype is torch.float8_e4m3fn
    assert Format.HYBRID.value.bwd_dtype is torch.float8_e5m2


def test_defaults_and_positional_order():
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.interval, recipe.fp8_format) == (0, 1, Format.HYBRID)
    assert (recipe.amax_history_len, recipe.amax_compute_algo) == (1024, "max")
    assert recipe.reduce_amax
    assert recipe.first_step == "scale_one"
    recipe = DelayedScaling(2, 3, Format.E4M3)
    assert (recipe.margin, recipe.interval, recipe.fp8_format) == (2, 3, Format.E4M3)


def test_frozen_hashable_and_replaceable():
    recipe = DelayedScaling(override_linear_precision=[False, False, True])
    assert hash(recipe) == hash(dataclasses.replace(recipe))
    assert recipe.override_linear_precision == (False, False, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.margin = 1


class Unhashable:
    """A function that regions, which look recipes up, could not use."""

    __hash__ = None

    def __call__(self, *args):
        return args[0]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"margin": 0.5}, TypeError, "margin must be an int, got float"),
        ({"margin": float("inf")}, TypeError, "margin must be an int, got float"),
        ({"margin": float("nan")}, TypeError, "margin must be an int, got float"),
        ({"margin": "5"}, TypeError, "margin must be an int, got str"),
        ({"margin": 17.0}, ValueError, "margin must be from -16 to 16, got 17"),
        ({"interval": 1.5}, TypeError, "interval must be an int, got float"),
        ({"interval": 0.0}, ValueError, "interval must be at least 1, got 0"),
        ({"amax_history_len": 2.5}, TypeError, "amax_history_len must be an int, got float"),
        ({"margin": 17}, ValueError, "margin must be from -16 to 16, got 17"),
        ({"margin": -100}, ValueError, "margin must be from -16 to 16, got -100"),
        ({"margin": 10**30}, ValueError, "margin must be from -16 to 16, got 1000"),
        ({"margin": True}, TypeError, "margin must be an int, got bool"),
        ({"amax_history_len": 0}, ValueError, "amax_history_len must be from 1 to 16384, got 0"),
        ({"amax_history_len": 16385}, ValueError, "must be from 1 to 16384, got 16385"),
        ({"amax_history_len": -1}, ValueError, "must be from 1 to 16384, got -1"),
        ({"amax_history_len": True}, TypeError, "amax_history_len must be an int, got bool"),
        ({"amax_compute_algo": Unhashable()}, TypeError, "must be hashable, got Unhashable"),
        ({"scaling_factor_compute_algo": Unhashable()}, TypeError, "must be hashable"),
        ({"fp8_format": "E3M4"}, ValueError, 'must be "hybrid" or "e4m3", got .E3M4.'),
        ({"amax_compute_algo": "mean"}, ValueError, '"max" or "most_recent".*got \'mean\''),
        ({"amax_compute_algo": 3}, TypeError, "amax_compute_algo must be .* got int"),
        ({"scaling_factor_compute_algo": "p"}, ValueError, "scaling_factor_compute_algo"),
        ({"reduce_amax": 1}, TypeError, "reduce_amax must be a bool, got int"),
        ({"first_step": "now"}, ValueError, "first_step must be .* got 'now'"),
    ],
)
def test_recipe_rejects(kwargs, error, message):
    with pytest.raises(error, match=message):
        DelayedScaling(**kwargs)


@pytest.mark.parametrize("kind", [DelayedScaling, te_recipe.DelayedScaling])
def test_floats_without_a_fraction_are_ints(kind):
    """A recipe of them equals that of the ints, has their hash, and keeps ints."""
    recipe = kind(margin=5.0, amax_history_len=16.0, interval=2.0)
    same = kind(margin=5, amax_history_len=16, interval=2)
    assert recipe == same
    assert hash(recipe) == hash(same)
    assert repr(recipe) == repr(same)
    for name in ("margin", "amax_history_len", "interval"):
        assert type(getattr(recipe, name)) is int
    assert repr(CurrentScaling(interval=4.0)) == repr(CurrentScaling(interval=4))


@pytest.mark.parametrize("margin", [-16, 0, 16])
@pytest.mark.parametrize("algo", [None, "pow2"])
@pytest.mark.parametrize("fp8_max", [448.0, 57344.0, 240.0])
def test_scales_of_allowed_margins_are_normal_numbers(margin, algo, fp8_max, device):
    """Of every amax up to 2**117; the inverse is finite, and tiny amaxes have the largest scale."""
    recipe = DelayedScaling(margin=margin, scaling_factor_compute_algo=algo)
    exponents = torch.arange(-149.0, 118.0)
    amax = torch.cat([2.0**exponents, 1.9 * 2.0 ** exponents[20:-1]]).to(device)
    for chunk in amax.split(64):
        history, scale = chunk[None].clone(), torch.ones_like(chunk)
        inverse = scale.clone()
        update_scales([history], [scale], [inverse], [fp8_max], recipe, None)
        info = torch.finfo(torch.float32)
        assert scale.isfinite().all()
        assert (scale >= info.tiny).all()
        assert inverse.isfinite().all()
        assert (inverse > 0).all()
        if algo is None:
            exact = (fp8_max * 2.0**-margin / chunk.double()).clamp(max=info.max).float()
            assert torch.equal(scale, exact)


def test_margins_beyond_the_bound_leave_e4m3_nothing():
    x = torch.linspace(0.9, 1.0, 16)
    for margin, codes in ((16, True), (19, False)):
        scaled = x * (448 * 2.0**-margin)
        assert scaled.to(torch.float8_e4m3fn).float().any() == codes


def test_pickled_recipes_are_checked():
    recipe = DelayedScaling(margin=3, amax_history_len=5)
    assert pickle.loads(pickle.dumps(recipe)) == recipe == copy.deepcopy(recipe)
    poisoned = DelayedScaling()
    object.__setattr__(poisoned, "margin", 100)
    with pytest.raises(ValueError, match="margin must be from -16 to 16, got 100"):
        pickle.loads(pickle.dumps(poisoned))


def test_false_attention_arguments_are_accepted():
    assert DelayedScaling(fp8_dpa=False, fp8_mha=False) == DelayedScaling()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("delayed", DelayedScaling),
        ("tensorwise", CurrentScaling),
        ("blockwise", BlockScaling),
        ("mxfp8", MXFP8Scaling),
    ],
)
def test_a_name_stands_for_a_recipe_everywhere(name, kind):
    with fp8_autocast(fp8_recipe=name):
        assert get_fp8_recipe() == kind()
    with apex_te.autocast(recipe=name):
        assert get_fp8_recipe() == kind()
    layer = apex_te.Linear(16, 16)
    apex_te.init_fp8_state(layer, name)
    assert layer.fp8_state.allocated == kind.keeps_state
    with apex_te.quantized_model_init(recipe=name):
        held = apex_te.Linear(16, 16)
    assert type(held.weight).__name__ == "FP8Parameter"


@pytest.mark.parametrize(
    ("call", "owner", "argument"),
    [
        (fp8_autocast, "fp8_autocast", "fp8_recipe"),
        (apex_te.autocast, "autocast", "recipe"),
        (apex_te.fp8_model_init, "fp8_model_init", "recipe"),
        (apex_te.quantized_model_init, "quantized_model_init", "recipe"),
        (partial(apex_te.init_fp8_state, torch.nn.ReLU()), "init_fp8_state", "recipe"),
        (partial(enable_fp8_all_gather, torch.nn.ReLU()), "enable_fp8_all_gather", "recipe"),
    ],
)
def test_unknown_names_of_recipes(call, owner, argument):
    names = "delayed, tensorwise, blockwise, mxfp8, rowwise"
    message = f"^{owner}: {argument} must be a recipe or one of {names}, got 'current'$"
    with pytest.raises(ValueError, match=message):
        call(**{argument: "current"})
    message = f"^{owner}: {argument} must be a recipe from apex_te.recipe or its name, got int$"
    with pytest.raises(TypeError, match=message):
        call(**{argument: 8})


def test_present_names_of_transformer_engine():
    region = apex_te.autocast(False, True, "tensorwise", None)
    assert isinstance(region, fp8_autocast)
    assert (region.enabled, region.calibrating, region.group) == (False, True, None)
    assert region.recipe == CurrentScaling()
    assert {"enabled", "calibrating", "recipe", "amax_reduction_group"} <= set(
        inspect.signature(apex_te.autocast).parameters
    )
    assert inspect.signature(apex_te.quantized_model_init) == inspect.signature(
        apex_te.fp8_model_init
    )
    with pytest.raises(TypeError, match="autocast: amax_reduction_group must be a "):
        apex_te.autocast(amax_reduction_group=3)

    @apex_te.autocast(recipe="blockwise")
    def inside():
        return get_fp8_recipe()

    assert inside() == BlockScaling()


@pytest.mark.parametrize("kind", [fp8_autocast, apex_te.autocast])
def test_a_recipe_is_taken_first_or_by_either_name_or_in_the_order_of_transformer_engine(kind):
    chosen = CurrentScaling()
    for name in (chosen, "tensorwise"):
        for region in (
            kind(name), kind(recipe=name), kind(fp8_recipe=name), kind(True, name),
            kind(True, recipe=name), kind(True, False, name), kind(True, False, name, None),
        ):  # fmt: skip
            assert (region.enabled, region.calibrating, region.recipe) == (True, False, chosen)
        off = kind(name, enabled=False, calibrating=True)
        for region in (off, kind(False, True, name), kind(False, recipe=name, calibrating=True)):
            assert (region.enabled, region.calibrating, region.recipe) == (False, True, chosen)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((), {"recipe": "mxfp8", "fp8_recipe": "mxfp8"}, TypeError, "fp8_recipe and recipe mean"),
        (("mxfp8",), {"recipe": "mxfp8"}, TypeError, "the first argument and recipe mean the same"),
        (("mxfp8", False), {}, TypeError,
         "must be given by name, such as enabled=False, got False"),
        (("mxfp8", "delayed"), {}, TypeError, "must be given by name, .* got 'delayed'"),
        (("mxfp9",), {}, ValueError,
         "the first argument must be a recipe or one of .* got 'mxfp9'"),
        ((), {"recipe": "mxfp9"}, ValueError, "recipe must be a recipe or one of .* got 'mxfp9'"),
        ((None,), {}, TypeError, "enabled must be a bool, got NoneType"),
        ((), {"recipe": 8}, TypeError, "recipe must be a recipe from apex_te.recipe or .* got int"),
        ((CurrentScaling,), {}, TypeError,
         r"got the class CurrentScaling; call it: CurrentScaling\(\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [fp8_autocast, apex_te.autocast])
def test_a_region_refuses_what_it_cannot_tell(kind, args, kwargs, error, message):
    with pytest.raises(error, match=f"^{kind.__name__}: .*{message}"):
        kind(*args, **kwargs)


def test_a_group_given_by_both_names_is_refused():
    with pytest.raises(TypeError, match="fp8_group and amax_reduction_group mean the same"):
        fp8_autocast(fp8_group=1, amax_reduction_group=1)


def test_the_class_autocast_is_its_module_too():
    module = importlib.import_module("apex_te.autocast")
    assert module is apex_te.autocast is sys.modules["apex_te.autocast"]
    assert module.get_fp8_recipe is get_fp8_recipe
    assert module.fp8_autocast is fp8_autocast
    with pytest.raises(AttributeError, match="has no attribute 'no'"):
        module.no  # noqa: B018
    for name in ("fp8_autocast", "autocast"):
        old = f"capex_te.autocast\n{name}\n.".encode()  # as files written by releases have it
        assert pickle.loads(old) is getattr(apex_te, name)
        assert pickle.loads(pickle.dumps(getattr(apex_te, name))) is getattr(apex_te, name)
    region = pickle.loads(pickle.dumps(apex_te.autocast(recipe="mxfp8")))
    assert region.recipe == MXFP8Scaling()


@pytest.mark.long
@pytest.mark.cover(0)
@pytest.mark.parametrize("first", ["import apex_te.autocast", "from apex_te import autocast"])
def test_either_import_comes_first(first):
    """In a new process, where the other has not happened yet."""
    program = f"""{first}
import apex_te, torch
from apex_te.autocast import fp8_autocast, is_fp8_enabled
with apex_te.autocast(recipe="delayed"):
    assert is_fp8_enabled()
import apex_te.autocast as module
assert module.fp8_autocast is fp8_autocast is apex_te.fp8_autocast
assert isinstance(apex_te.autocast(), fp8_autocast)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_reprs_of_regions():
    assert "fp8_format=Format.HYBRID, " in repr(DelayedScaling())
    shown = repr(fp8_autocast(False, "delayed", calibrating=True))
    assert shown.startswith("fp8_autocast(enabled=False, fp8_recipe=DelayedScaling(margin=0, ")
    assert shown.endswith("fp8_group=None, calibrating=True)")
    shown = repr(apex_te.autocast(recipe="mxfp8"))
    assert shown.startswith("autocast(enabled=True, calibrating=False, recipe=MXFP8Scaling(")
    assert shown.endswith("amax_reduction_group=None)")


def test_autocast_nests_and_restores():
    outer, inner = DelayedScaling(margin=1), DelayedScaling(margin=2)
    assert not is_fp8_enabled()
    with fp8_autocast(True, outer):
        assert is_fp8_enabled()
        with fp8_autocast(False):
            assert not is_fp8_enabled()
            with fp8_autocast(fp8_recipe=inner):
                assert get_fp8_recipe() == inner != outer  # equal recipes are one object
        assert is_fp8_enabled()
        assert get_fp8_recipe() == outer
    assert not is_fp8_enabled()


def test_autocast_restores_after_an_exception():
    with fp8_autocast(enabled=False):
        with pytest.raises(KeyError), fp8_autocast():
            raise KeyError("x")
        assert not is_fp8_enabled()
    region = fp8_autocast()
    with region, region:
        assert is_fp8_enabled()
    assert not is_fp8_enabled()


def test_autocast_decorates():
    @fp8_autocast(enabled=True)
    def inside():
        return is_fp8_enabled()

    assert inside()
    assert inside()
    assert inside.__name__ == "inside"
    assert not is_fp8_enabled()


def test_autocast_is_per_thread():
    seen = []
    with fp8_autocast():
        thread = threading.Thread(target=lambda: seen.append(is_fp8_enabled()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_bool_in_second_place_is_calibrating():
    assert fp8_autocast(False, True).calibrating
    assert not fp8_autocast(False, False).calibrating


def test_autocast_rejects_a_group_that_is_none():
    message = "fp8_group must be a torch.distributed.ProcessGroup, got int"
    with pytest.raises(TypeError, match=message):
        fp8_autocast(True, None, 3)
