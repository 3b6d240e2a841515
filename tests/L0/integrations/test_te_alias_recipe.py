"""Recipes of the Transformer Engine alias: arguments, predicates, changes, pickles, and use."""

import copy
import pickle
import sys
import types
import warnings

import pytest
import torch

import apex_te
from apex_te import recipe as native
from apex_te.integrations.transformer_engine.common import recipe as te

KINDS = {
    te.DelayedScaling: (native.DelayedScaling, "delayed"),
    te.Float8CurrentScaling: (native.CurrentScaling, "float8_current_scaling"),
    te.Float8BlockScaling: (native.BlockScaling, "float8_block_scaling"),
    te.MXFP8BlockScaling: (native.MXFP8Scaling, "mxfp8"),
}
PREDICATES = (
    "delayed", "float8_current_scaling", "float8_per_tensor_scaling", "float8_block_scaling",
    "mxfp8", "nvfp4", "custom",
)  # fmt: skip


def _new(kind):
    return kind.__new__(kind)


@pytest.fixture
def alias(monkeypatch):
    """Makes ``transformer_engine.common.recipe`` importable, as pickles name its classes."""
    package, common = types.ModuleType("transformer_engine"), types.ModuleType("common")
    package.common, common.recipe = common, te
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.common", common)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", te)
    te._warned.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_apex_te(kind):
    recipe = kind()
    plain = recipe.plain()
    assert type(plain) is KINDS[kind][0]
    own = {"wgrad_input": "1x128"} if kind is te.Float8BlockScaling else {}
    assert plain == KINDS[kind][0](**own)
    assert isinstance(recipe, te.Recipe)
    assert isinstance(recipe, KINDS[kind][0])
    assert kind.__module__ == "transformer_engine.common.recipe"
    assert (recipe.fp8_dpa, recipe.fp8_mha, recipe.backward_override) == (False, False, None)
    assert recipe.margin == 0


@pytest.mark.parametrize("kind", KINDS)
def test_predicates_tell_the_kind_of_class_and_instance(kind):
    expected = {KINDS[kind][1]}
    if expected & {"delayed", "float8_current_scaling"}:
        expected.add("float8_per_tensor_scaling")
    assert {name for name in PREDICATES if getattr(kind, name)()} == expected
    assert {name for name in PREDICATES if getattr(kind(), name)()} == expected


def test_arguments_reach_the_plain_recipe():
    recipe = te.DelayedScaling(
        1, te.Format.E4M3, 16, "most_recent", None, False, override_linear_precision=[False] * 3,
        interval=2, first_step="current",
    )  # fmt: skip
    assert recipe.plain() == native.DelayedScaling(
        margin=1, interval=2, fp8_format=native.Format.E4M3, amax_history_len=16,
        amax_compute_algo="most_recent", reduce_amax=False, first_step="current",
    )  # fmt: skip
    assert te.DelayedScaling(interval=-1).plain() == native.DelayedScaling()
    current = te.Float8CurrentScaling(
        fp8_format=te.Format.E4M3, use_power_2_scales=True, fp8_gemm_fprop=te.MMParams(True)
    )
    assert current.plain() == native.CurrentScaling(
        fp8_format=native.Format.E4M3, pow2=True, use_split_accumulator=(True, True, True)
    )
    assert current.fp8_quant_bwd_grad == te.QParams(power_2_scale=True)
    block = te.Float8BlockScaling(use_f32_scales=True, fp8_format=te.Format.HYBRID)
    assert block.plain() == native.BlockScaling(
        fp8_format=native.Format.HYBRID, pow2=False, wgrad_input="1x128"
    )
    parts = te.QParams(power_2_scale=True, amax_epsilon=1e-6)
    names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    block = te.Float8BlockScaling(**dict.fromkeys(names, parts))
    assert block.plain() == native.BlockScaling(eps=1e-6, wgrad_input="1x128")
    mx = te.MXFP8BlockScaling(fp8_format=te.Format.HYBRID, rounding="floor")
    assert mx.plain() == native.MXFP8Scaling(fp8_format=native.Format.HYBRID, rounding="floor")


def test_environment_variables_give_defaults(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    assert te.Float8CurrentScaling().plain().pow2 is True
    assert te.Float8BlockScaling().plain().pow2 is False
    assert te.Float8BlockScaling(use_f32_scales=False).plain().pow2 is True


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_keywords_are_ignored_with_one_warning_each(kind):
    te._warned.clear()
    with pytest.warns(UserWarning, match="unknown argument") as seen:
        recipe = kind(params_dtype=torch.bfloat16, device="cuda")
    texts = [str(warning.message) for warning in seen]
    assert texts == [
        f"{kind.__name__}: unknown argument {name} is ignored"
        for name in ("params_dtype", "device")
    ]
    assert {warning.filename for warning in seen} == {__file__}
    assert recipe == kind()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(params_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="params_dtype"):
        KINDS[kind][0](params_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: te.DelayedScaling(fp8_format=te.Format.E5M2), ValueError, "pure E5M2"),
        (lambda: te.DelayedScaling(fp8_dpa=True), NotImplementedError, "fp8_dpa must be False"),
        (lambda: te.MXFP8BlockScaling(fp8_mha=True), NotImplementedError, "fp8_mha must be"),
        (lambda: te.DelayedScaling(amax_history_len=0), ValueError, "amax_history_len"),
        (
            lambda: te.DelayedScaling(backward_override="dequantized"),
            NotImplementedError, "backward_override must be None",
        ),
        (lambda: te.Float8CurrentScaling(margin=1), NotImplementedError, "margin must be 0"),
        (lambda: te.MXFP8BlockScaling(2), NotImplementedError, "margin must be 0"),
        (
            lambda: te.Float8BlockScaling(x_block_scaling_dim=2),
            NotImplementedError, "Float8BlockScaling: x_block_scaling_dim must be 1",
        ),
        (
            lambda: te.Float8BlockScaling(fp8_gemm_dgrad=te.MMParams(False)),
            ValueError, "use_split_accumulator",
        ),
        (
            lambda: te.Float8CurrentScaling(fp8_quant_bwd_grad=te.QParams(power_2_scale=True)),
            NotImplementedError, "fp8_quant_bwd_grad must equal fp8_quant_fwd_inp",
        ),
        (
            lambda: te.Float8CurrentScaling(fp8_quant_fwd_inp=te.QParams(stochastic_rounding=True)),
            NotImplementedError, "fp8_quant_fwd_inp: stochastic_rounding must be False",
        ),
        (lambda: te.Float8CurrentScaling(fp8_gemm_fprop=True), TypeError, "must be a MMParams"),
        (lambda: te.NVFP4BlockScaling(), NotImplementedError, "NVFP4BlockScaling .* FP4"),
        (lambda: te.CustomRecipe(print), NotImplementedError, "CustomRecipe .* quantizers"),
    ],
)  # fmt: skip
def test_what_is_not_served_raises(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_named_recipes_answer_predicates():
    assert te.NVFP4BlockScaling.nvfp4()
    assert te.CustomRecipe.custom()
    assert not te.CustomRecipe.delayed()


def test_attributes_can_be_set_and_are_checked():
    recipe = te.DelayedScaling()
    recipe.amax_history_len = 4
    recipe.interval = 3
    recipe.my_note = "x"
    assert recipe.plain() == native.DelayedScaling(amax_history_len=4, interval=3)
    assert recipe != te.DelayedScaling()
    before = hash(recipe)
    with pytest.raises(ValueError, match="E5M2"):
        recipe.fp8_format = te.Format.E5M2
    assert recipe.fp8_format is te.Format.HYBRID
    assert hash(recipe) == before
    block = te.Float8BlockScaling()
    block.use_f32_scales = True
    assert block.fp8_quant_fwd_inp.power_2_scale is False
    assert block.plain().pow2 is False
    del recipe.my_note
    assert not hasattr(recipe, "my_note")


def test_a_change_reaches_the_next_region():
    recipe = te.DelayedScaling(amax_history_len=8)
    layer = apex_te.Linear(16, 16)
    for length in (8, 4):
        recipe.amax_history_len = length
        with warnings.catch_warnings(), apex_te.fp8_autocast(fp8_recipe=recipe):
            warnings.simplefilter("ignore")  # the history is trimmed
            layer(torch.randn(16, 16)).sum().backward()
        assert layer._fp8.state.amax_history_fwd.shape[0] == length


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_computes_what_the_plain_recipe_does(kind):
    x = torch.randn(32, 32)
    layer = apex_te.Linear(32, 32)
    results = []
    for recipe in (kind(), KINDS[kind][0]()):
        other = copy.deepcopy(layer)
        with apex_te.fp8_autocast(fp8_recipe=recipe):
            y = other(x)
        y.square().sum().backward()
        results.append((y, other.weight.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_subclass_has_its_own_constructor():
    class Mine(te.DelayedScaling):
        def __init__(self, config, fp8_format):
            self.config = config
            super().__init__(margin=config["margin"], fp8_format=fp8_format, reduce_amax=False)

    recipe = Mine({"margin": 2}, te.Format.E4M3)
    assert recipe.config == {"margin": 2}
    assert recipe.delayed()
    assert recipe.plain() == native.DelayedScaling(
        margin=2, fp8_format=native.Format.E4M3, reduce_amax=False
    )
    assert copy.deepcopy(recipe).config == {"margin": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_pickles_and_copies_are_equal(kind, alias):
    recipe = kind(fp8_format=te.Format.E4M3)
    recipe.note = 5
    for copied in (pickle.loads(pickle.dumps(recipe)), copy.copy(recipe), copy.deepcopy(recipe)):
        assert copied == recipe
        assert copied.plain() == recipe.plain()
        assert copied.note == 5
        assert copied is not recipe


def test_a_pickle_of_transformer_engine_is_read(alias):
    helper = te._FormatHelper(max_fwd=448, max_bwd=57344)

    class Saved:  # as an instance of Transformer Engine's class is pickled
        def __init__(self, kind, values):
            self.kind, self.values = kind, values

        def __reduce__(self):
            return _new, (self.kind,), self.values

    class SavedFormat:
        def __reduce__(self):
            return te.Format, (helper,)

    values = {
        "margin": 1, "fp8_format": SavedFormat(), "amax_history_len": 32,
        "amax_compute_algo": "most_recent", "scaling_factor_compute_algo": None,
        "reduce_amax": True, "fp8_dpa": False, "fp8_mha": False, "_cached_repr": None,
    }  # fmt: skip
    read = pickle.loads(pickle.dumps(Saved(te.DelayedScaling, values)))
    assert type(read) is te.DelayedScaling
    assert read.plain() == native.DelayedScaling(
        margin=1, amax_history_len=32, amax_compute_algo="most_recent"
    )
    values = {"use_power_2_scales": True, "fp8_gemm_fprop": te.MMParams(False)}
    read = pickle.loads(pickle.dumps(Saved(te.Float8CurrentScaling, values)))
    assert read.plain() == native.CurrentScaling(pow2=True)
    values = {"fp8_format": te.Format.E5M2}
    with pytest.raises(ValueError, match="E5M2"):
        pickle.loads(pickle.dumps(Saved(te.DelayedScaling, values)))


def test_formats_are_found_by_the_values_of_transformer_engine():
    assert te.Format is native.Format
    assert te.Format((448, 57344)) is te.Format.HYBRID
    assert te.Format((448.0, 448.0)) is te.Format.E4M3
    assert te.Format(te._FormatHelper(57344, 57344)) is te.Format.E5M2
    assert te.Format(te.Format.HYBRID.value) is te.Format.HYBRID
    assert te.Format.E4M3.value.max_fwd == 448
    for wrong in ((6, 6), (448,), 448, "HYBRID", (448, 57344, 0)):
        with pytest.raises(ValueError, match="is not a valid Format"):
            te.Format(wrong)


@pytest.mark.parametrize(
    "plain",
    [
        native.DelayedScaling(margin=1, interval=2, fp8_format=native.Format.E4M3),
        native.CurrentScaling(pow2=True, eps=0.5, use_split_accumulator=(True, False, True)),
        native.BlockScaling(pow2=False, override_linear_precision=(False, False, True)),
        native.BlockScaling(backward="dequantized"),
        native.MXFP8Scaling(rounding="floor", backward="high_precision"),
    ],
)
def test_as_alias_keeps_the_values(plain):
    recipe = te.as_alias(plain)
    assert isinstance(recipe, te.Recipe)
    assert recipe.plain() == plain
    assert te.as_alias(recipe) is recipe


def test_scales_of_servers_have_no_alias():
    recipe = native.BlockScaling(scales="server")
    assert te.as_alias(recipe) is recipe


@pytest.mark.parametrize(
    "kind", [te.Float8CurrentScaling, te.Float8BlockScaling, te.MXFP8BlockScaling]
)
def test_backward_override(monkeypatch, kind):
    assert kind().plain().backward is None
    recipe = kind(backward_override="dequantized")
    assert recipe.plain().backward == recipe.backward_override == "dequantized"
    recipe.backward_override = "high_precision"
    assert recipe.plain().backward == "high_precision"
    assert copy.deepcopy(recipe).plain() == recipe.plain()
    with pytest.raises(ValueError, match="backward_override must be None or one of dequantized, "):
        recipe.backward_override = "none"
    assert recipe.backward_override == "high_precision"
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    assert kind().plain().backward == kind().backward_override == "dequantized"
    assert kind(backward_override="high_precision").plain().backward == "high_precision"


def test_parameters_are_frozen_values():
    assert te.MMParams() == te.MMParams(use_split_accumulator=True)
    assert te.QParams() == te.QParams(power_2_scale=False, amax_epsilon=0.0)
    with pytest.raises(AttributeError):
        te.QParams().power_2_scale = True
    assert "fp8_format=Format.HYBRID" in repr(te.DelayedScaling())


@pytest.mark.cover(0)
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_region_takes_the_recipe(kind):
    recipe, layer = kind(), apex_te.Linear(32, 32)
    eager, x = copy.deepcopy(layer), torch.randn(32, 32)

    def forward(layer, x):
        with apex_te.fp8_autocast(fp8_recipe=recipe):
            return layer(x)

    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    assert torch.equal(compiled(layer, x), forward(eager, x))
