"""Saving, loading, moving and copying the FP8 state."""

import copy
import io
import json

import pytest
import torch

from apex_te import Linear, flush_fp8_state, fp8_autocast, init_fp8_state
from apex_te.recipe import DelayedScaling, Format
from apex_te.state import TENSORS, registry

RECIPE = DelayedScaling(amax_history_len=4)
HEADER = "fp8_state.header"


def build():
    return torch.nn.Sequential(Linear(16, 32), torch.nn.GELU(), Linear(32, 16))


def train(model, optimizer, steps, recipe=RECIPE):
    losses = []
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with fp8_autocast(True, recipe):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def everything(model):
    states = [getattr(m._fp8, n) for m in model if isinstance(m, Linear) for n in TENSORS]
    return [*states, *(p.detach() for p in model.parameters())]


def trained(steps=3, recipe=RECIPE):
    model = build()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(steps), recipe)
    return model


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("first_step", ["scale_one", "current"])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("at", [1, 4])
def test_resume_is_bitwise(flush, first_step, interval, at):
    recipe = DelayedScaling(amax_history_len=4, first_step=first_step, interval=interval)
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(at), recipe)
    if flush:
        flush_fp8_state()
    blob = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, blob)
    losses = train(model, optimizer, range(at, at + 5), recipe)
    expected = [tensor.clone() for tensor in everything(model)]
    due = [list(m._fp8.first_due) for m in model[::2]]

    registry.pending = 0  # as in a new process
    torch.manual_seed(9)
    other = build()
    blob.seek(0)
    saved = torch.load(blob, weights_only=True)
    other.load_state_dict(saved["model"])
    resumed = torch.optim.AdamW(other.parameters(), lr=0.01)
    resumed.load_state_dict(saved["optimizer"])
    assert train(other, resumed, range(at, at + 5), recipe) == losses
    assert equal(expected, everything(other))
    assert due == [m._fp8.first_due for m in other[::2]]


def test_a_resumed_run_can_flush_before_its_first_region():
    model = trained()
    saved = model.state_dict()
    flush_fp8_state()
    other = build()
    other.load_state_dict(saved)
    flush_fp8_state()
    assert equal(everything(model), everything(other))


def test_functions_of_the_recipe_come_back_with_the_next_region():
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=lambda h: h.amax(0))
    model = trained(recipe=recipe)
    saved = model.state_dict()
    flush_fp8_state()
    other = build()
    other.load_state_dict(saved)
    assert registry.pending == 1
    with fp8_autocast(True, recipe):
        pass
    assert equal(everything(model), everything(other))


def test_plain_linear_checkpoint_loads_strictly():
    plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    model = trained()
    model.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(model[0].weight, plain[0].weight)
    assert model[0]._fp8.scale_fwd.eq(1).all()  # missing keys are the initial state
    assert model[0]._fp8.amax_history_fwd.eq(0).all()
    assert model[0]._fp8.first_due == [True] * 5
    build().load_state_dict(plain.state_dict(), strict=True)
    assert list(build().state_dict()) == list(plain.state_dict())


def test_partial_load_of_other_modules_keeps_the_state():
    model = trained()
    before = [t.clone() for t in everything(model)[:6]]
    model.load_state_dict({"2.weight": torch.zeros(16, 32)}, strict=False)
    assert equal(before, everything(model)[:6])


def test_safetensors_round_trip(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, other = trained(), build()
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert equal(everything(model), everything(other))


def test_state_dict_is_a_snapshot():
    model = trained()
    saved = model.state_dict()["0.fp8_state.scale_fwd"]
    before = saved.clone()
    flush_fp8_state()
    train(model, torch.optim.SGD(model.parameters(), lr=1.0), range(2))
    assert torch.equal(saved, before)


def test_shapes_do_not_depend_on_the_moment():
    early, late = trained(1).state_dict(), trained(5).state_dict()
    assert {k: v.shape for k, v in early.items()} == {k: v.shape for k, v in late.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_leave_the_state_in_fp32(dtype):
    model = trained()
    before, addresses = everything(model)[:12], [t.data_ptr() for t in everything(model)[:12]]
    model.to(dtype)
    assert model[0].weight.dtype == dtype
    assert equal(before, everything(model)[:12])
    assert addresses == [t.data_ptr() for t in everything(model)[:12]]
    assert model[0]._fp8.scale_fwd.dtype == torch.float32


def test_deepcopy_is_independent_and_registered():
    model = trained()
    other = copy.deepcopy(model)
    assert equal(everything(model), everything(other))
    flush_fp8_state()
    assert equal(everything(model), everything(other))  # both are updated
    before = [t.clone() for t in everything(model)]
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), range(1))
    assert equal(before, everything(model))
    assert not equal(before, everything(other))


def test_whole_module_survives_torch_save():
    model, blob = trained(), io.BytesIO()
    torch.save(model, blob)
    blob.seek(0)
    other = torch.load(blob, weights_only=False)
    assert equal(everything(model), everything(other))


def test_meta_then_to_empty():
    model = torch.nn.Sequential(Linear(16, 32, device="meta"), Linear(32, 16, device="meta"))
    init_fp8_state(model, RECIPE)
    assert model[0]._fp8.device.type == "meta"
    assert not any("fp8_state" in key for key in model.state_dict())
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    assert model[0]._fp8.scale_fwd.tolist() == [1.0] * 3
    assert model[0]._fp8.amax_history_bwd.eq(0).all()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
    source = trained()
    state = {k.replace("2.", "1.", 1): v for k, v in source.state_dict().items()}
    fresh = torch.nn.Sequential(Linear(16, 32, device="meta"), Linear(32, 16, device="meta"))
    fresh.load_state_dict(state, assign=True)
    assert equal(everything(source), everything(fresh))
    model.to("meta")
    assert model[0]._fp8.device.type == "meta"


@pytest.mark.parametrize("length", [2, 6])
def test_other_history_length_is_trimmed_or_padded(length):
    from apex_te._amax_history import _resized

    model, other = trained(4), build()
    _resized.clear()
    init_fp8_state(other, DelayedScaling(amax_history_len=length))
    with pytest.warns(UserWarning, match=f"from length 4 to {length}") as seen:
        other.load_state_dict(model.state_dict())
    assert len(seen) == 1
    old, new = model[0]._fp8.amax_history_fwd, other[0]._fp8.amax_history_fwd
    assert new.shape[0] == length
    assert torch.equal(old[0], new[0])
    kept = min(4, length) - 1
    assert torch.equal(old[-kept:], new[-kept:])
    assert new[1 : length - kept].eq(0).all()


def header(**changes):
    state = trained().state_dict()
    values = json.loads(bytes(state["0." + HEADER].tolist())) | changes
    text = json.dumps(values).encode()
    state["0." + HEADER] = torch.tensor(list(text), dtype=torch.uint8)
    return state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version must be 1 .* got 2"),
        ({"version": None}, "version must be 1 .* got None"),
        ({"pending": -1}, "pending must be a count, got -1"),
        ({"pending": True}, "pending must be a count, got True"),
        ({"scope": -1}, "scope must be a count below 256, got -1"),
        ({"scope": 256}, "scope must be a count below 256, got 256"),
        ({"equal": 1.5}, "equal must be a count below 4294967296, got 1.5"),
        ({"first_due": [1]}, "first_due must be 5 bools"),
        ({"format": "E9M9"}, "recipe must be the one that was saved"),
    ],
)
def test_bad_headers_are_refused(changes, message):
    model = build()
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(header(**changes))
    assert not model[0]._fp8.allocated


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (HEADER, torch.tensor(list(b"\x80\x04cos\nsystem\n"), dtype=torch.uint8), "JSON text"),
        (HEADER, torch.tensor(list(b"[1]"), dtype=torch.uint8), "JSON object, got list"),
        (HEADER, torch.zeros(3), "header must be a uint8 tensor"),
        ("fp8_state.scale_fwd", torch.ones(4), r"scale_fwd must have shape \[3\], got \[4\]"),
        ("fp8_state.amax_history_bwd", torch.ones(3, 2), r"shape \[4, 2\], got \[3, 2\]"),
        ("fp8_state.amax_history_fwd", torch.ones(0, 3), r"got \[0, 3\]|must have shape"),
        ("fp8_state.scale_bwd", torch.ones(2, dtype=torch.int32), "floating-point"),
    ],
)
def test_hostile_entries_are_refused(key, value, message):
    state = trained().state_dict()
    state["0." + key] = value
    with pytest.raises(RuntimeError, match=message):
        build().load_state_dict(state)


def test_incomplete_and_unknown_keys_are_named():
    state = trained().state_dict()
    del state["0." + HEADER]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.fp8_state\.header"):
        build().load_state_dict(state)
    state = trained().state_dict()
    state["0.fp8_state.other"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.fp8_state\.other"):
        build().load_state_dict(state)


def test_format_is_saved():
    model = trained(recipe=DelayedScaling(fp8_format=Format.E4M3))
    other = build()
    other.load_state_dict(model.state_dict())
    assert other[0]._fp8.recipe.fp8_format is Format.E4M3
