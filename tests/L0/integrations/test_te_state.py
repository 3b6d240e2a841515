"""TransformerEngine's _extra_state: every release's form, how it is mapped, what does not fit."""

import io
import pickle
import sys
import warnings

import pytest
import torch
from te_blobs import FORMS, NAMES, as_uint8, pickled_with_recipe, saved, tensors, v02

from apex_te import Linear, fp8_autocast
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import _warned
from apex_te.fp8.module_fp8 import init_fp8_state
from apex_te.integrations.te_state import TEStateError, load_te_extra_state, read_te_extra_state
from apex_te.module._core.fp8_module import FP8Module
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.recipe import DelayedScaling, Format


@pytest.fixture(autouse=True)
def _fresh_regions():
    amax_groups.pending = 0
    yield
    amax_groups.pending = 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("slots", [(3, 2), (2, 1)])
def test_every_form_is_read(form, slots):
    values = tensors(slots=slots)
    state = read_te_extra_state(FORMS[form](values))
    for name in NAMES:
        actual = getattr(state, name)
        assert actual.dtype == torch.float32
        assert torch.equal(actual, values[name]), name
    assert state.pending == (form in ("0.2", "0.3", "0.x", "early 1.x"))
    assert not any(name.split(".")[0] in ("transformer_engine", "megatron") for name in sys.modules)


@pytest.mark.parametrize(
    "empty",
    [
        None,
        torch.empty(0, dtype=torch.uint8),
        as_uint8(pickle.dumps(None)),
        saved(None),
        saved(None, _use_new_zipfile_serialization=False),
        as_uint8(pickle.dumps({"extra_fp8_variables": {}})),
    ],
)
def test_no_state(empty):
    assert read_te_extra_state(empty) is None


def test_a_stateless_recipe_has_no_state():
    assert read_te_extra_state(pickled_with_recipe({})) is None


def test_storages_shared_and_strided():
    both = torch.arange(24.0).view(4, 6)
    values = tensors()
    values["amax_history_fwd"], values["amax_history_bwd"] = both[:, :3], both[:, 4:]
    for blob in (as_uint8(pickle.dumps(values)), saved(values)):
        state = read_te_extra_state(blob)
        assert torch.equal(state.amax_history_fwd, both[:, :3])
        assert torch.equal(state.amax_history_bwd, both[:, 4:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_become_fp32(dtype):
    values = {name: value.to(dtype) for name, value in tensors().items()}
    state = read_te_extra_state(saved(values))
    assert state.scale_fwd.dtype == torch.float32
    assert torch.equal(state.scale_bwd, values["scale_bwd"].float())


class TwoGemms(FP8Module):
    """A module with FP8 state for two GEMMs."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self._make_fp8_state(2)


@pytest.mark.parametrize("gemms", [1, 2])
@pytest.mark.parametrize("slots", [(3, 2), (2, 1)])
def test_slots_and_gemms_are_mapped(gemms, slots):
    values = tensors(gemms, slots)
    model = torch.nn.ModuleDict({"a": Linear(4, 4) if gemms == 1 else TwoGemms()})
    state_dict = model.state_dict() | {"a._extra_state": saved(values)}
    assert load_te_extra_state(model, state_dict) == ["a"]
    fp8 = model["a"].fp8_state
    for direction, given, ours in (("fwd", slots[0], 3), ("bwd", slots[1], 2)):
        scale = getattr(fp8, f"scale_{direction}").view(gemms, ours)
        history = getattr(fp8, f"amax_history_{direction}").view(4, gemms, ours)
        expected = values[f"scale_{direction}"].view(gemms, given)
        assert torch.equal(scale[:, :given], expected)
        assert scale[:, given:].eq(1).all()
        expected = values[f"amax_history_{direction}"].view(4, gemms, given)
        assert torch.equal(history[..., :given], expected)
        assert history[..., given:].eq(0).all()
        scale_inv = getattr(fp8, f"scale_inv_{direction}").view(gemms, ours)
        assert torch.equal(scale_inv, 1 / scale)


@pytest.mark.parametrize("gemms", [2, 3, 4])
@pytest.mark.parametrize("by_kind", [True, False])
def test_both_orders_of_grouped_slots_are_known(gemms, by_kind):
    module = GroupedLinear(gemms, 8, 8)
    # [GEMM, slot] as they should arrive; outputs and input gradients measure nothing.
    scale = {"fwd": torch.arange(1.0, 3 * gemms + 1).view(gemms, 3)}
    scale["bwd"] = torch.arange(1.0, 2 * gemms + 1).view(gemms, 2)
    values = {}
    for direction, expected in scale.items():
        expected[:, -1] = 1
        history = torch.stack([torch.zeros_like(expected), 448 / expected])
        history[..., -1] = 0
        if by_kind:
            expected, history = expected.t(), history.transpose(1, 2)
        values[f"scale_{direction}"] = expected.flatten()
        values[f"amax_history_{direction}"] = history.flatten(1)
    load_te_extra_state(module, {"_extra_state": saved(values)})
    for direction, expected in scale.items():
        assert torch.equal(getattr(module.fp8_state, f"scale_{direction}"), expected.flatten())
        history = getattr(module.fp8_state, f"amax_history_{direction}")[1].view(gemms, -1)
        assert torch.equal(history[:, :-1], 448 / expected[:, :-1])
        assert history[:, -1].eq(0).all()


def model_and_state(**options):
    """A model, and the checkpoint of its counterpart in TransformerEngine."""
    model = torch.nn.Sequential(Linear(16, 32), torch.nn.LayerNorm(32), Linear(32, 16))
    state_dict = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    blobs = {
        "0._extra_state": FORMS["2.x"](tensors(**options)),
        "1._extra_state": torch.empty(0, dtype=torch.uint8),
        "2._extra_state": torch.empty(0, dtype=torch.uint8),
    }
    return model, state_dict, state_dict | blobs


def test_a_strict_load_follows(device):
    model, plain, state_dict = model_and_state()
    model.to(device)
    assert load_te_extra_state(model, state_dict) == ["0"]
    assert not [key for key in state_dict if "_extra_state" in key]
    assert set(state_dict) - set(plain) == {k for k in state_dict if k.startswith("0.fp8_state.")}
    loaded = model[0].fp8_state.scale_fwd.clone()
    assert loaded.device.type == device.type
    assert torch.equal(loaded.cpu(), tensors()["scale_fwd"])
    assert not model[2].fp8_state.allocated
    address = model[0].fp8_state.scale_fwd.data_ptr()
    model.load_state_dict(state_dict, strict=True)
    assert torch.equal(model[0].fp8_state.scale_fwd, loaded)
    assert model[0].fp8_state.scale_fwd.data_ptr() == address
    assert torch.equal(model[0].weight.cpu(), plain["0.weight"])
    other = torch.nn.Sequential(Linear(16, 32), torch.nn.LayerNorm(32), Linear(32, 16))
    other.load_state_dict(state_dict, strict=True)
    assert torch.equal(other[0].fp8_state.scale_fwd, loaded.cpu())


def test_training_goes_on_with_the_loaded_scales():
    values = tensors(length=2)
    values["scale_fwd"][:2] = torch.tensor([56.0, 128.0])
    values["amax_history_fwd"][1] = torch.tensor([7.0, 3.5, 0.0])
    module = Linear(16, 16)
    load_te_extra_state(module, {"_extra_state": saved(values)})
    recipe = DelayedScaling(amax_history_len=2)
    x = torch.full((4, 16), 2.0)
    scales = []
    for _ in range(3):
        with fp8_autocast(True, recipe):
            scales.append(module.fp8_state.scale_fwd[0].item())
            module(x)
    # The loaded scale, then 7.0 of the history beside the 2.0 of x, then 2.0 alone.
    assert scales == [56.0, 448 / 7.0, 448 / 2.0]


def test_amaxes_that_early_releases_staged_are_applied():
    values = tensors(slots=(2, 1), length=2)
    values["amax_history_fwd"][:] = torch.tensor([[4.0, 8.0], [1.0, 1.0]])
    module = Linear(16, 16)
    load_te_extra_state(module, {"_extra_state": v02(values)})
    assert amax_groups.pending == 1
    with fp8_autocast(True, DelayedScaling(amax_history_len=2)):
        pass
    assert module.fp8_state.scale_fwd[:2].tolist() == [112.0, 56.0]
    amax_groups.pending = 3
    load_te_extra_state(module, {"_extra_state": v02(values)})
    assert amax_groups.pending == 3


def test_first_scales_are_still_due_where_nothing_was_measured():
    values = tensors()
    values["amax_history_bwd"][:, 0] = 0
    module = Linear(16, 16)
    load_te_extra_state(module, {"_extra_state": saved(values)})
    assert module.fp8_state.first_steps.due == [False, False, False, True, False]


@pytest.mark.parametrize("length", [2, 6])
def test_history_takes_the_length_of_the_module(length):
    _warned.clear()
    model, _, state_dict = model_and_state()
    init_fp8_state(model, DelayedScaling(amax_history_len=length))
    with pytest.warns(UserWarning, match=f"from length 4 to {length}"):
        load_te_extra_state(model, state_dict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        model.load_state_dict(state_dict)
    history, given = model[0].fp8_state.amax_history_fwd, tensors()["amax_history_fwd"]
    kept = min(length, 4) - 1
    assert history.shape == (length, 3)
    assert torch.equal(history[-kept:], given[-kept:])
    assert history[1 : length - kept].eq(0).all()


def test_meta_modules_get_their_state_with_the_load():
    model = torch.nn.Sequential(Linear(16, 32, device="meta"))
    state_dict = {"0.weight": torch.ones(32, 16), "0.bias": torch.ones(32)}
    state_dict["0._extra_state"] = saved(tensors())
    assert load_te_extra_state(model, state_dict) == ["0"]
    model.load_state_dict(state_dict, assign=True)
    assert torch.equal(model[0].fp8_state.scale_fwd, tensors()["scale_fwd"])


def test_prefix_and_unknown_modules():
    model, _, state_dict = model_and_state()
    wrapped = {f"model.{key}": value for key, value in state_dict.items()}
    wrapped["model.7.core_attention._extra_state"] = torch.empty(0, dtype=torch.uint8)
    wrapped["head._extra_state"] = torch.empty(0, dtype=torch.uint8)
    assert load_te_extra_state(model, wrapped, prefix="model.") == ["0"]
    assert [key for key in wrapped if "_extra_state" in key] == ["head._extra_state"]
    assert "model.0.fp8_state.scale_fwd" in wrapped


class OwnExtraState(torch.nn.Module):
    def get_extra_state(self):
        return 3

    def set_extra_state(self, state):
        assert state == 3


def test_an_extra_state_of_the_users_own_is_left():
    model = torch.nn.ModuleDict({"a": OwnExtraState(), "b": Linear(4, 4)})
    state_dict = model.state_dict() | {"b._extra_state": saved(tensors())}
    assert load_te_extra_state(model, state_dict) == ["b"]
    assert state_dict["a._extra_state"] == 3
    model.load_state_dict(state_dict, strict=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_fwd": torch.ones(4)}, r"amax_history_fwd must have 4 columns, got \[4, 3\]"),
        ({"scale_fwd": torch.ones(3, 1)}, r"scale_fwd must have 1 dimension\(s\) and a row"),
        ({"amax_history_bwd": torch.ones(0, 2)}, r"amax_history_bwd must have 2 dimension\(s\)"),
        ({"amax_history_bwd": torch.ones(3, 2)}, "the length of amax_history_fwd, 4, got 3"),
        ({"scale_bwd": torch.ones(2).int()}, "scale_bwd must be a floating-point tensor"),
        ({"scale_bwd": 1.0}, "scale_bwd must be a floating-point tensor, got float"),
        ({"scale_bwd": None}, "scale_bwd must be a floating-point tensor, got NoneType"),
        ({"scale_fwd": torch.tensor([1.0, 0.0, 2.0])}, "scale_fwd must be finite and above 0"),
        ({"scale_bwd": torch.tensor([1.0, float("inf")])}, "scale_bwd must be finite and above 0"),
        ({"scale_bwd": torch.tensor([float("nan"), 1.0])}, "scale_bwd must be finite and above 0"),
        ({"scale_bwd": torch.tensor([1e-40, 1.0])}, "scale_bwd must be finite .* its inverse"),
        ({"amax_history_fwd": torch.full((4, 3), -1.0)}, "amax_history_fwd must be at least 0"),
        (
            {n: torch.zeros(16385, s) for n, s in zip(NAMES[1::2], (3, 2), strict=True)},
            "amax_history_fwd must have at most 16384 rows, got 16385",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(TEStateError, match=message):
        read_te_extra_state(saved(tensors() | changes))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("text", TypeError, "got str"),
        (b"bytes", TypeError, "got bytes"),
        (torch.ones(3), TypeError, r"uint8 vector, got torch.float32 \[3\]"),
        (torch.ones(2, 2).byte(), TypeError, r"got torch.uint8 \[2, 2\]"),
        (as_uint8(pickle.dumps([1, 2])), TEStateError, "list must have 4 items, got 2"),
        (as_uint8(pickle.dumps(7)), TEStateError, "must hold a dict, got int"),
        (as_uint8(b"not a pickle"), TEStateError, "must hold tensors and plain values"),
        (io.BytesIO(b"PK\x03\x04 not a zip"), TEStateError, "damaged: BadZipFile"),
        (io.BytesIO(b""), TEStateError, "damaged"),
    ],
)
def test_other_objects_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        read_te_extra_state(value)


def test_errors_name_the_key_and_change_nothing():
    model, _, state_dict = model_and_state()
    state_dict["2._extra_state"] = saved(tensors(gemms=2))
    before = dict(state_dict)
    with pytest.raises(
        TEStateError,
        match=r"2\._extra_state: .*scale_fwd must have 3 slots for 1 GEMM\(s\), or 2 .* got 6",
    ):
        load_te_extra_state(model, state_dict)
    assert state_dict.keys() == before.keys()
    assert not model[0].fp8_state.allocated
    state_dict["2._extra_state"] = 3
    with pytest.raises(TypeError, match=r"2\._extra_state: .* got int"):
        load_te_extra_state(model, state_dict)


def test_amaxes_that_are_not_finite_are_dropped_and_said():
    values = tensors()
    clean = values["amax_history_fwd"].clone()
    clean[1, 0] = clean[2, 2] = 0
    values["amax_history_fwd"] = clean.clone()
    values["amax_history_fwd"][1, 0] = float("inf")
    values["amax_history_fwd"][2, 2] = float("nan")
    with pytest.warns(UserWarning, match="2 amaxes of amax_history_fwd are not finite and are dro"):
        state = read_te_extra_state(saved(values))
    assert torch.equal(state.amax_history_fwd, clean)
    model = torch.nn.Sequential(Linear(16, 16))
    with pytest.warns(UserWarning, match="not finite and are dropped"):
        load_te_extra_state(model, {"0._extra_state": saved(values)})
    assert model[0].fp8_state.amax_history_fwd.isfinite().all()


@pytest.mark.parametrize("value", [torch.ones(4, 3).to_sparse(), torch.ones(4, 3, device="meta")])
def test_tensors_without_plain_values_are_refused(value):
    module = torch.nn.Sequential(Linear(16, 16))
    state = {"0._extra_state": tensors() | {"amax_history_fwd": value}, "0.bias": torch.ones(16)}
    before = dict(state)
    with pytest.raises(TEStateError, match=r"0\._extra_state: .*amax_history_fwd must be a dense"):
        load_te_extra_state(module, state)
    assert state == before
    assert not module[0].fp8_state.allocated


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize(
    ("saved_margin", "fp8_max", "recipe", "factors"),
    [
        (0, (448.0, 57344.0), DelayedScaling(amax_history_len=4), (1.0, 1.0)),
        (0, (448.0, 57344.0), DelayedScaling(fp8_format=Format.E4M3), (1.0, 2.0**-7)),
        (1, (448.0, 448.0), DelayedScaling(), (2.0, 2.0**8)),
        (2, (448.0, 57344.0), DelayedScaling(margin=2), (1.0, 1.0)),
        (0, (1.0, 2.0), DelayedScaling(margin=2), (1.0, 1.0)),  # of no format that is known
        (99, (448.0, 448.0), DelayedScaling(), (1.0, 1.0)),
    ],
)
@pytest.mark.filterwarnings("ignore:FP8State. amax history padded")
def test_scales_move_with_the_format_and_margin_of_the_next_recipe(
    which, saved_margin, fp8_max, recipe, factors
):
    values, module = tensors(), Linear(16, 16)
    blob = pickled_with_recipe(values, which, margin=saved_margin, fp8_max=fp8_max)
    model = torch.nn.Sequential(module)
    state_dict = model.state_dict() | {"0._extra_state": blob}
    load_te_extra_state(model, state_dict)
    model.load_state_dict(state_dict)
    with fp8_autocast(fp8_recipe=recipe):
        model(torch.ones(16, 16))
    for way, factor in zip(("fwd", "bwd"), factors, strict=True):
        expected = values[f"scale_{way}"] * factor
        assert torch.equal(getattr(module.fp8_state, f"scale_{way}"), expected)
        assert torch.equal(getattr(module.fp8_state, f"scale_inv_{way}"), 1 / expected)
