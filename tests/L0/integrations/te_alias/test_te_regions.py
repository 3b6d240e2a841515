"""Transformer Engine's regions, availability checks and global state over apex_te's regions."""

import inspect

import pytest
import torch

import apex_te
from apex_te.integrations.transformer_engine.common import recipe
from apex_te.integrations.transformer_engine.pytorch import export, fp8, quantization
from apex_te.integrations.transformer_engine.pytorch.quantization import FP8GlobalStateManager

x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def layer():
    torch.manual_seed(3)
    return apex_te.Linear(32, 48)


@pytest.mark.parametrize(
    ("region", "names"),
    [
        (
            quantization.autocast,
            ["enabled", "calibrating", "recipe", "amax_reduction_group", "_graph"],
        ),
        (
            quantization.fp8_autocast,
            ["enabled", "calibrating", "fp8_recipe", "fp8_group", "_graph"],
        ),
        (quantization.fp8_model_init, ["enabled", "recipe", "preserve_high_precision_init_val"]),
        (
            quantization.quantized_model_init,
            ["enabled", "recipe", "preserve_high_precision_init_val"],
        ),
    ],
)
def test_signatures_and_full_names(region, names):
    assert list(inspect.signature(region).parameters) == names
    assert region.__module__ == "transformer_engine.pytorch.quantization"


@pytest.mark.parametrize("region", [quantization.autocast, quantization.fp8_autocast])
def test_a_region_computes_what_apex_te_computes(region):
    ours, theirs = layer(), layer()
    with apex_te.fp8_autocast(True, apex_te.recipe.DelayedScaling()):
        expected = ours(x)
    with region(True, False, recipe.DelayedScaling()):
        found = theirs(x)
    assert torch.equal(found, expected)
    assert not torch.equal(found, layer()(x))


def test_calibrating_is_the_second_argument():
    module = layer()
    with quantization.autocast(False, True, recipe.DelayedScaling()):
        out = module(x)
        assert FP8GlobalStateManager.is_fp8_calibration()
        assert not FP8GlobalStateManager.is_fp8_enabled()
    assert torch.equal(out, layer()(x))
    apex_te.flush_fp8_state()
    assert module.fp8_state.scale_fwd[0] == pytest.approx(float(448 / x.abs().max()))


def test_a_region_is_a_decorator_and_takes_numbers_as_flags():
    module = layer()
    assert not torch.equal(quantization.autocast(1)(module)(x), layer()(x))
    assert torch.equal(quantization.autocast(0)(module)(x), layer()(x))


def test_what_is_not_served_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="_graph"):
        quantization.autocast(_graph=True)
    with pytest.raises(TypeError, match="autocast: enabled"):
        quantization.autocast(enabled="yes")
    with pytest.raises(TypeError, match="fp8_autocast: fp8_group"):
        quantization.fp8_autocast(fp8_group=3)


def test_state_inside_and_outside_regions():
    outer = recipe.Float8CurrentScaling()
    manager = FP8GlobalStateManager
    assert not manager.is_fp8_enabled()
    assert not manager.is_first_fp8_module()
    assert type(manager.get_fp8_recipe()) is recipe.DelayedScaling
    with quantization.autocast(recipe=outer):
        assert manager.is_fp8_enabled()
        assert manager.get_fp8_recipe() == outer
        assert manager.get_fp8_group() is None
        assert manager.is_first_fp8_module()
        assert not manager.is_first_fp8_module()
        with quantization.autocast(enabled=False):
            assert not manager.is_fp8_enabled()
            assert manager.is_first_fp8_module()
        assert manager.is_fp8_enabled()
    assert not manager.is_fp8_enabled()
    assert fp8.get_fp8_recipe() == recipe.DelayedScaling()


def test_state_is_saved_and_set_again():
    manager = FP8GlobalStateManager
    with quantization.autocast(recipe=recipe.Float8CurrentScaling()):
        state = manager.get_autocast_state()
    assert state[0] is True
    assert len(state) == 6
    outside = manager.get_autocast_state()
    manager.set_autocast_state(state)
    try:
        assert manager.is_fp8_enabled()
        assert type(manager.get_fp8_recipe()) is recipe.Float8CurrentScaling
        assert manager.is_first_fp8_module()
    finally:
        manager.set_autocast_state(outside)
    assert not manager.is_fp8_enabled()
    with pytest.raises(TypeError, match="set_autocast_state: state"):
        manager.set_autocast_state((True,) * 6)


def test_reset_leaves_regions_that_were_broken_off():
    region = quantization.autocast()
    region.__enter__()
    FP8GlobalStateManager.reset()
    assert not FP8GlobalStateManager.is_fp8_enabled()


def test_scales_move_after_a_backward():
    module = layer()
    with quantization.autocast(recipe=recipe.DelayedScaling()):
        out = module(x)
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
    assert module.fp8_state.scale_fwd[0] == 1
    out.sum().backward()
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
    assert module.fp8_state.scale_fwd[0] == pytest.approx(float(448 / x.abs().max()))


def test_weights_in_fp8():
    manager = FP8GlobalStateManager
    assert not manager.with_fp8_parameters()
    with quantization.fp8_model_init(True, recipe.DelayedScaling(), True):
        assert manager.with_fp8_parameters()
        assert manager.with_high_precision_init_val()
        module = apex_te.Linear(32, 32)
    assert isinstance(module.weight, apex_te.parameter.FP8Parameter)
    assert module.weight.get_high_precision_init_val().shape == (32, 32)
    with quantization.quantized_model_init(enabled=False):
        assert not manager.with_fp8_parameters()


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "fp8_block_scaling"])
def test_what_apex_te_computes_is_available(name):
    assert getattr(quantization, f"check_{name}_support")() == (True, "")
    available = getattr(quantization, f"is_{name}_available")
    assert available() is True
    assert available(return_reason=True) == (True, "")
    assert getattr(FP8GlobalStateManager, f"is_{name}_available")() == (True, "")


def test_nvfp4_is_not_available():
    answer, reason = quantization.is_nvfp4_available(return_reason=True)
    assert answer is quantization.is_nvfp4_available() is False
    assert "NVFP4" in reason
    for made in (recipe.DelayedScaling(), recipe.MXFP8BlockScaling()):
        quantization.check_recipe_support(made)


@pytest.mark.parametrize(
    ("made", "forward", "dtype"),
    [
        (recipe.DelayedScaling(), True, torch.float8_e4m3fn),
        (recipe.DelayedScaling(), False, torch.float8_e5m2),
        (recipe.DelayedScaling(fp8_format=recipe.Format.E4M3), False, torch.float8_e4m3fn),
        (recipe.MXFP8BlockScaling(), False, torch.float8_e4m3fn),
    ],
)
def test_dtypes_of_a_recipe(made, forward, dtype):
    assert quantization.get_fp8_torch_dtype(made, forward) is dtype
    assert quantization.get_fp8_max(made, forward) == torch.finfo(dtype).max
    number = quantization.get_fp8_te_dtype(made, forward)
    assert number.name == f"kFloat8{'E4M3' if dtype is torch.float8_e4m3fn else 'E5M2'}"


def test_the_earlier_module_has_the_same_objects():
    for name in fp8.__all__:
        assert getattr(fp8, name) is getattr(quantization, name)


def test_an_export_changes_nothing():
    module = layer()
    expected = module(x)
    with export.onnx_export(True):
        assert export.is_in_onnx_export_mode()
        assert torch.equal(module(x), expected)
    assert not export.is_in_onnx_export_mode()
