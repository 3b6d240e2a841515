"""Recipes and fp8_autocast: arguments, errors and the region stack."""

import dataclasses
import threading

import pytest
import torch

from apex_te import fp8_autocast, is_fp8_enabled
from apex_te.autocast import get_fp8_recipe
from apex_te.recipe import DelayedScaling, Format


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


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"params_dtype": torch.bfloat16}, TypeError, "params_dtype"),
        ({"margin": 0.5}, TypeError, "margin must be an int, got float"),
        ({"interval": 0}, ValueError, "interval must be at least 1, got 0"),
        ({"amax_history_len": 0}, ValueError, "amax_history_len must be at least 1, got 0"),
        ({"fp8_format": "HYBRID"}, TypeError, "fp8_format must be a recipe.Format, got str"),
        ({"fp8_format": Format.E5M2}, ValueError, "pure E5M2"),
        ({"amax_compute_algo": "mean"}, ValueError, '"max" or "most_recent".*got \'mean\''),
        ({"amax_compute_algo": 3}, TypeError, "amax_compute_algo must be .* got int"),
        ({"scaling_factor_compute_algo": "p"}, ValueError, "scaling_factor_compute_algo"),
        ({"override_linear_precision": (True, False, False)}, ValueError, "override_linear"),
        ({"override_linear_precision": (False, True)}, ValueError, "override_linear_precision"),
        ({"override_linear_precision": "no"}, TypeError, "override_linear_precision"),
        ({"reduce_amax": 1}, TypeError, "reduce_amax must be a bool, got int"),
        ({"first_step": "now"}, ValueError, "first_step must be .* got 'now'"),
        ({"fp8_dpa": True}, NotImplementedError, "fp8_dpa must be False"),
        ({"fp8_mha": True}, NotImplementedError, "fp8_mha must be False"),
    ],
)
def test_recipe_rejects(kwargs, error, message):
    with pytest.raises(error, match=message):
        DelayedScaling(**kwargs)


def test_false_attention_arguments_are_accepted():
    assert DelayedScaling(fp8_dpa=False, fp8_mha=False) == DelayedScaling()


def test_autocast_nests_and_restores():
    outer, inner = DelayedScaling(margin=1), DelayedScaling(margin=2)
    assert not is_fp8_enabled()
    with fp8_autocast(True, outer):
        assert is_fp8_enabled()
        with fp8_autocast(False):
            assert not is_fp8_enabled()
            with fp8_autocast(fp8_recipe=inner):
                assert get_fp8_recipe() is inner
        assert is_fp8_enabled()
        assert get_fp8_recipe() is outer
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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((1,), "enabled must be a bool, got int"),
        ((True, "delayed"), "fp8_recipe must be a recipe from apex_te.recipe, got str"),
        ((True, None, 3), "fp8_group must be a torch.distributed.ProcessGroup, got int"),
    ],
)
def test_autocast_rejects(args, message):
    with pytest.raises(TypeError, match=message):
        fp8_autocast(*args)
