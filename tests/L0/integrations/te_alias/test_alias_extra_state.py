"""``_extra_state`` of alias modules: what is saved, all forms that are read, what is refused."""

import copy
import io
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from alias_kinds import (
    FP8_KINDS,
    KINDS,
    SPLITS,
    alias_layer,
    batches,
    call,
    own_layer,
    pair,
    same,
    states,
    step,
    steps,
)
from schemes import SCHEMES, STATELESS
from te_blobs import FORMS, NAMES, as_uint8, tensors
from torch.distributed.checkpoint.state_dict import StateDictOptions

import apex_te
from apex_te.distributed import get_model_state_dict, set_model_state_dict
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.integrations import load_te_extra_state
from apex_te.integrations.transformer_engine.pytorch import module as te
from apex_te.integrations.transformer_engine.pytorch.module import GroupedLinear, LayerNorm, Linear
from apex_te.recipe import DelayedScaling

CPU = torch.device("cpu")
RECIPE = DelayedScaling(amax_history_len=4)
KEY = "_extra_state"


def trained(layer, device=CPU, recipe=RECIPE, steps=3):
    for x in batches(device, steps):
        step(layer, x, recipe)
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_is_always_there(kind):
    layer = alias_layer(kind)
    saved = layer.state_dict()
    assert saved[KEY].dtype == torch.uint8
    assert saved[KEY].shape == (0,)
    assert list(saved)[:-1] == list(own_layer(kind).state_dict())
    assert alias_layer(kind).load_state_dict(saved, strict=True)
    with apex_te.fp8_autocast(True, fp8_recipe=RECIPE):
        call(layer, batches(CPU, 1)[0])
    assert (layer.state_dict()[KEY].numel() > 0) == (kind in FP8_KINDS)
    assert not [key for key in layer.state_dict() if "fp8_state" in key]


def test_padding_modules_have_none():
    for kind in (te.Fp8Padding, te.Fp8Unpadding):
        module = kind(3)
        assert not module.state_dict()
        assert module.load_state_dict({}, strict=True)


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_a_load_restores_all_bits_of_the_state(kind, device):
    layer = trained(pair(kind, device)[0], device)
    saved = layer.state_dict()
    assert saved[KEY].device == CPU
    other = pair(kind, device)[0]
    other.load_state_dict(saved, strict=True)
    same(states(other), states(layer))
    assert torch.equal(other.state_dict()[KEY], saved[KEY])
    for x in batches(device, 4)[2:]:
        same(*steps([other, layer], x, RECIPE))
    same(states(other), states(layer))


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_state_passes_between_the_alias_and_apex_te(kind):
    layer, own = pair(kind, CPU)
    trained(layer)
    saved = layer.state_dict()
    assert load_te_extra_state(own, saved) == [""]
    own.load_state_dict(saved, strict=True)
    same(states(own), states(layer))
    other = alias_layer(kind)
    other.load_state_dict(own.state_dict(), strict=True)
    same(states(other), states(layer))
    same(list(other.parameters()), list(layer.parameters()))


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_a_checkpoint_without_state_resets_it(kind):
    layer = trained(alias_layer(kind))
    plain = {k: v for k, v in layer.state_dict().items() if k != KEY}
    layer.load_state_dict(plain, strict=True)
    assert layer.fp8_state.scale_fwd.eq(1).all()


def test_lengths_depend_on_sizes_only():
    first, second = trained(Linear(24, 40), steps=1), trained(Linear(24, 40), steps=5)
    new = Linear(24, 40)
    apex_te.init_fp8_state(new, RECIPE)
    lengths = {layer.state_dict()[KEY].numel() for layer in (first, second, new)}
    assert len(lengths) == 1


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_bytes_are_equal_for_equal_states(kind):
    layer = trained(alias_layer(kind))
    assert torch.equal(layer.state_dict()[KEY], layer.state_dict()[KEY])


@pytest.mark.parametrize("name", STATELESS)
def test_recipes_without_state_save_their_name(name, alias):
    layer = Linear(32, 32)
    with apex_te.fp8_autocast(True, fp8_recipe=SCHEMES[name]):
        layer(torch.randn(32, 32))
    saved = layer.state_dict()[KEY]
    content = pickle.loads(saved.numpy().tobytes())
    assert content.keys() == {"recipe", "extra_fp8_variables"}
    kinds = {
        "tensorwise": "float8_current_scaling",
        "blockwise": "float8_block_scaling",
        "mxfp8": "mxfp8",
    }
    if name in kinds:
        assert getattr(content["recipe"], kinds[name])()
        assert content["recipe"].fp8_format == SCHEMES[name].fp8_format
    else:
        assert content["recipe"] is None
    other = Linear(32, 32)
    other.load_state_dict(layer.state_dict(), strict=True)
    assert not other.fp8_state.allocated


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_transformer_engine_is_read(form):
    values = tensors()
    model = torch.nn.Sequential(Linear(16, 32), LayerNorm(32))
    state = model.state_dict() | {"0._extra_state": FORMS[form](values)}
    assert model.load_state_dict(state, strict=True)
    for name in NAMES:
        assert torch.equal(getattr(model[0].fp8_state, name), values[name]), name
    assert amax_groups.pending == (form in ("0.2", "0.3", "0.x", "early 1.x"))
    other = Linear(16, 32)
    other.set_extra_state(FORMS[form](values))
    assert torch.equal(other.fp8_state.scale_fwd, values["scale_fwd"])


@pytest.mark.parametrize("empty", [None, torch.empty(0, dtype=torch.uint8)])
def test_an_empty_state_is_none(empty):
    layer = Linear(24, 40)
    layer.load_state_dict(layer.state_dict() | {KEY: empty}, strict=True)
    assert not layer.fp8_state.allocated
    layer = trained(layer)
    before = states(layer)
    layer.set_extra_state(empty)
    same(states(layer), before)


def test_transformer_engine_reads_what_is_saved(alias):
    for kind in FP8_KINDS:
        layer = trained(alias_layer(kind))
        content = pickle.loads(layer.state_dict()[KEY].numpy().tobytes())
        assert content["recipe"].delayed()
        assert content["recipe"].amax_history_len == 4
        assert content["recipe"].fp8_format.name == "HYBRID"
        assert content["extra_fp8_variables"]["num_gemms"] == layer.fp8_state.gemms
        for name in NAMES:
            ours = getattr(layer.fp8_state, name)
            if kind == "GroupedLinear":
                ours = ours.unflatten(-1, (len(SPLITS), -1)).transpose(-1, -2).flatten(-2)
            assert content[name].dtype == torch.float32
            assert torch.equal(content[name], ours), (kind, name)


def test_the_reader_of_transformer_engines_states_reads_it():
    layer = trained(Linear(24, 40))
    found = apex_te.integrations.read_te_extra_state(layer.state_dict()[KEY])
    for name in NAMES:
        assert torch.equal(getattr(found, name), getattr(layer.fp8_state, name))


def test_nan_that_was_staged_stays():
    layer = trained(Linear(24, 40))
    layer.fp8_state.amax_history_fwd[0, 0] = float("nan")
    other = Linear(24, 40)
    other.load_state_dict(layer.state_dict())
    assert other.fp8_state.amax_history_fwd[0, 0].isnan()


class Payload:
    """Object whose unpickling makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def hostile(path):
    raw = pickle.dumps(Payload(path))
    in_dict = pickle.dumps({"scale_fwd": torch.ones(3), "extra_fp8_variables": Payload(path)})
    stream = io.BytesIO()
    torch.save({"scale_fwd": Payload(path)}, stream)
    return {
        "pickle": as_uint8(raw), "nested": as_uint8(in_dict), "file": stream,
        "file bytes": as_uint8(stream.getvalue()), "object": Payload(path),
        "garbage": as_uint8(b"\x80\x04garbage"), "cut": None,
    }  # fmt: skip


@pytest.mark.parametrize("name", hostile("x"))
def test_hostile_bytes_execute_nothing(name, tmp_path):
    path = tmp_path / "made"
    layer = trained(Linear(24, 40))
    good = layer.state_dict()[KEY]
    blob = good[: good.numel() // 2] if name == "cut" else hostile(path)[name]
    before = [p.detach().clone() for p in layer.parameters()], states(layer)
    state = {k: torch.ones_like(v) for k, v in layer.state_dict().items() if k != KEY}
    with pytest.raises(RuntimeError, match="_extra_state: read_te_extra_state: "):
        layer.load_state_dict(state | {KEY: blob})
    with pytest.raises((TypeError, ValueError), match="read_te_extra_state: "):
        layer.set_extra_state(blob)
    assert not path.exists()
    same([p.detach() for p in layer.parameters()], before[0])
    same(states(layer), before[1])
    norm = LayerNorm(8)
    norm.load_state_dict(norm.state_dict() | {KEY: blob}, strict=True)  # does not look
    assert not path.exists()


def test_errors_name_the_key():
    model = torch.nn.ModuleDict({"a": Linear(8, 8), "b": GroupedLinear(2, 8, 8)})
    trained_state = trained(Linear(24, 40)).state_dict()[KEY]
    state = model.state_dict() | {"b._extra_state": trained_state}
    with pytest.raises(RuntimeError, match=r"b\._extra_state: .*must have 6 slots for 2 GEMM"):
        model.load_state_dict(state)


def damaged(layer, **changes):
    """Bytes of a state with other content, whose pickle is sound."""
    content = pickle.loads(layer.state_dict()[KEY].numpy().tobytes())
    content.pop("recipe")
    own = content["extra_fp8_variables"]["apex_te"]
    for name, value in changes.items():
        (own if name in own else content)[name] = value
    return as_uint8(pickle.dumps(content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"header": b"{"}, "header must be JSON text"),
        ({"header": b"7"}, "header must be a JSON object"),
        ({"header": b'{"version":1}'}, "pending must be a count"),
        ({"scale_fwd": torch.zeros(3)}, "scale_fwd must be finite and above 0"),
        ({"scale_fwd": torch.ones(6)}, "amax_history_fwd must have 6 columns"),
        ({"amax_history_fwd": torch.full((4, 3), -1.0)}, "amax_history_fwd must be at least 0"),
        ({"amax_history_bwd": torch.ones(5, 2)}, "must have the length of amax_history_fwd"),
    ],
)
def test_damaged_states_are_refused(changes, message, alias):
    layer = trained(Linear(24, 40))
    before = states(layer)
    with pytest.raises(ValueError, match=message):
        layer.set_extra_state(damaged(layer, **changes))
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(layer.state_dict() | {KEY: damaged(layer, **changes)})
    same(states(layer), before)


def test_pre_hooks_may_make_the_state():
    """Hooks before a load may write the state's key, as Megatron's do to merge states of GEMMs."""
    layer, other = trained(Linear(24, 40)), Linear(24, 40)
    calls = []

    def hook(module, state_dict, prefix, *rest):
        calls.append(prefix)
        state_dict[prefix + KEY] = state_dict.pop(prefix + "part")

    other._register_load_state_dict_pre_hook(hook, with_module=True)
    state = layer.state_dict()
    state["part"] = state.pop(KEY)
    other.load_state_dict(state, strict=True)
    assert calls == [""]
    same(states(other), states(layer))
    assert len(other._load_state_dict_pre_hooks) == 1


def test_a_framework_may_replace_set_extra_state(monkeypatch):
    original, seen = te.TransformerEngineBaseModule.set_extra_state, []

    def careful(self, state):
        seen.append(state)
        if not isinstance(state, str):
            original(self, state)

    monkeypatch.setattr(te.TransformerEngineBaseModule, "set_extra_state", careful)
    layer, other = trained(Linear(24, 40)), Linear(24, 40)
    other.load_state_dict(layer.state_dict() | {KEY: "sentinel"}, strict=True)
    assert not other.fp8_state.allocated
    other.load_state_dict(layer.state_dict(), strict=True)
    same(states(other), states(layer))
    assert len(seen) == 2


def split(layer):
    """Splits the state of a GroupedLinear by GEMM, as Megatron-Core does."""
    if not (layer.fp8_meta["fp8_checkpoint"] or layer.fp8 or layer.fp8_calibration):
        return [layer.state_dict()[KEY]] * layer.num_gemms
    content = pickle.loads(layer.state_dict()[KEY].numpy().tobytes())
    length, parts = layer.fp8_meta["recipe"].amax_history_len, []
    content["extra_fp8_variables"]["num_gemms"] = 1
    for gemm in range(layer.num_gemms):
        part = {name: content[name] for name in ("recipe", "extra_fp8_variables")}
        for way, slots in (("fwd", 3), ("bwd", 2)):
            scale, history = content[f"scale_{way}"], content[f"amax_history_{way}"]
            part[f"scale_{way}"] = scale.view(slots, -1)[:, gemm]
            part[f"amax_history_{way}"] = history.view(length, slots, -1)[:, :, gemm]
        parts.append(as_uint8(pickle.dumps(part)))
    return parts


def merged(parts, length):
    """Merges states of one GEMM each, as Megatron-Core does."""
    contents = [pickle.loads(part.numpy().tobytes()) for part in parts]
    extra = dict(contents[0]["extra_fp8_variables"], num_gemms=len(parts))
    state = {"extra_fp8_variables": extra, "recipe": contents[0]["recipe"]}
    for way in ("fwd", "bwd"):
        for name, rows in ((f"scale_{way}", None), (f"amax_history_{way}", length)):
            columns = torch.cat([c[name].reshape(-1, 1) for c in contents], dim=1)
            state[name] = columns.view(-1) if rows is None else columns.view(rows, -1)
    return as_uint8(pickle.dumps(state))


def test_states_of_gemms_are_split_and_merged(alias):
    layer = trained(alias_layer("GroupedLinear"))
    assert layer.fp8_meta["fp8_checkpoint"]
    parts = split(layer)
    whole = alias_layer("GroupedLinear")
    whole.load_state_dict(layer.state_dict() | {KEY: merged(parts, 4)}, strict=True)
    same(states(whole), states(layer))
    for x in batches(CPU, 2):
        same(*steps([whole, layer], x, RECIPE))
    # Each of its GEMMs as a Linear, of which a GroupedLinear is made again in another order.
    single = []
    for gemm, part in enumerate(split(layer)):
        one = Linear(24, 40)
        one.load_state_dict(one.state_dict() | {KEY: part}, strict=True)
        scale = layer.fp8_state.scale_fwd.view(len(SPLITS), 3)[gemm]
        assert torch.equal(one.fp8_state.scale_fwd, scale)
        single.append(one)
    order = [2, 0]
    two = GroupedLinear(2, 24, 40)
    blob = merged([single[i].state_dict()[KEY] for i in order], 4)
    two.load_state_dict(two.state_dict() | {KEY: blob}, strict=True)
    history = layer.fp8_state.amax_history_bwd.view(4, len(SPLITS), 2)[:, order]
    assert torch.equal(two.fp8_state.amax_history_bwd.view(4, 2, 2), history)
    due = two.fp8_state.first_steps.still_due()
    assert due == [False, False, True, False, False, True, False, True, False, True]


def test_a_layer_that_never_ran_is_split_as_it_is():
    layer = alias_layer("GroupedLinear")
    assert [part.numel() for part in split(layer)] == [0] * len(SPLITS)
    assert not layer.fp8_meta["fp8_checkpoint"]


def test_copies_have_the_state():
    layer = trained(Linear(24, 40))
    same(states(copy.deepcopy(layer))[:6], states(layer)[:6])


def test_meta_modules_load_it():
    layer, other = trained(Linear(24, 40)), Linear(24, 40, device="meta")
    other.load_state_dict(layer.state_dict(), strict=True, assign=True)
    same(states(other), states(layer))


def test_no_two_of_them_seem_to_share_memory():
    """Else tools that write safetensors drop all but one."""
    state = torch.nn.Sequential(Linear(8, 8), LayerNorm(8), Linear(8, 8)).state_dict()
    pointers = [v.untyped_storage().data_ptr() for k, v in state.items() if k.endswith(KEY)]
    assert len(set(pointers) - {0}) == 3


def test_safetensors_takes_a_model_whose_layers_never_ran(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = torch.nn.Sequential(Linear(8, 8), LayerNorm(8), Linear(8, 8))
    safetensors.save_model(model, tmp_path / "model")
    assert set(safetensors.load_file(tmp_path / "model")) == set(model.state_dict())


def model_to_save():
    return torch.nn.Sequential(Linear(24, 40), LayerNorm(40))


def test_a_distributed_checkpoint_keeps_it(tmp_path):
    model, other = model_to_save(), model_to_save()
    trained(model[0])
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    apex_te.init_fp8_state(other, RECIPE)
    found = other.state_dict()
    dcp.load(found, checkpoint_id=tmp_path)
    other.load_state_dict(found, strict=True)
    same(states(other[0]), states(model[0]))


@pytest.mark.parametrize("on_cpu", [False, True])
def test_state_dicts_for_all_ranks_have_apex_tes_keys(on_cpu):
    """Keys of the FP8 state stand apart, so that ranks can load parts of what others saved."""
    options = StateDictOptions(cpu_offload=on_cpu)
    model, other = model_to_save(), model_to_save()
    trained(model[0])
    found = get_model_state_dict(model, options=options)
    assert "0._extra_state" not in found
    assert "0.fp8_state.header" in found
    set_model_state_dict(other, found)
    same(states(other[0]), states(model[0]))
    set_model_state_dict(model_to_save(), model.state_dict())
