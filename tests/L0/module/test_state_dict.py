"""Saving, loading, moving and copying the FP8 state."""

import copy
import io
import json
import warnings

import pytest
import torch

from apex_te import Linear, flush_fp8_state, fp8_autocast, init_fp8_state
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.fp8.delayed.state import TENSORS
from apex_te.recipe import DelayedScaling, Format

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
    states = [getattr(m.fp8_state, n) for m in model if isinstance(m, Linear) for n in TENSORS]
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
    due = [list(m.fp8_state.first_steps.due) for m in model[::2]]

    amax_groups.pending = 0  # as in a new process
    torch.manual_seed(9)
    other = build()
    blob.seek(0)
    saved = torch.load(blob, weights_only=True)
    other.load_state_dict(saved["model"])
    resumed = torch.optim.AdamW(other.parameters(), lr=0.01)
    resumed.load_state_dict(saved["optimizer"])
    assert train(other, resumed, range(at, at + 5), recipe) == losses
    assert equal(expected, everything(other))
    assert due == [m.fp8_state.first_steps.due for m in other[::2]]


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
    assert amax_groups.pending == 1
    with fp8_autocast(True, recipe):
        pass
    assert equal(everything(model), everything(other))


def test_plain_linear_checkpoint_loads_strictly():
    plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    model = trained()
    model.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(model[0].weight, plain[0].weight)
    assert model[0].fp8_state.scale_fwd.eq(1).all()  # missing keys are the initial state
    assert model[0].fp8_state.amax_history_fwd.eq(0).all()
    assert model[0].fp8_state.first_steps.due == [True] * 5
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
    assert model[0].fp8_state.scale_fwd.dtype == torch.float32


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
    assert model[0].fp8_state.device.type == "meta"
    assert not any("fp8_state" in key for key in model.state_dict())
    model.to_empty(device="cpu")
    for module in model:
        module.reset_parameters()
    assert model[0].fp8_state.scale_fwd.tolist() == [1.0] * 3
    assert model[0].fp8_state.amax_history_bwd.eq(0).all()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
    source = trained()
    state = {k.replace("2.", "1.", 1): v for k, v in source.state_dict().items()}
    fresh = torch.nn.Sequential(Linear(16, 32, device="meta"), Linear(32, 16, device="meta"))
    fresh.load_state_dict(state, assign=True)
    assert equal(everything(source), everything(fresh))
    model.to("meta")
    assert model[0].fp8_state.device.type == "meta"


@pytest.mark.parametrize("length", [2, 6])
def test_other_history_length_is_trimmed_or_padded(length):
    from apex_te.fp8.delayed.state import _warned

    model, other = trained(4), build()
    _warned.clear()
    init_fp8_state(other, DelayedScaling(amax_history_len=length))
    with pytest.warns(UserWarning, match=f"from length 4 to {length}") as seen:
        other.load_state_dict(model.state_dict())
    assert len(seen) == 1
    old, new = model[0].fp8_state.amax_history_fwd, other[0].fp8_state.amax_history_fwd
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
    assert not model[0].fp8_state.allocated


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


def changed(state, key, slot, value):
    tensor = state["0.fp8_state." + key].clone()
    tensor[slot] = value
    return state | {"0.fp8_state." + key: tensor}


def expanded(length):
    """Entries of a file of a few KB that claim long histories."""
    long = {
        f"0.fp8_state.amax_history_{way}": torch.zeros(1, slots).expand(length, slots)
        for way, slots in (("fwd", 3), ("bwd", 2))
    }
    return trained().state_dict() | long


NAN, INF = float("nan"), float("inf")
WRONG = {
    "NaN scale": (lambda s: changed(s, "scale_fwd", 1, NAN), "scale_fwd must be finite .* got nan"),
    "zero scale": (lambda s: changed(s, "scale_bwd", 0, 0), "scale_bwd must be finite .* got 0"),
    "negative": (lambda s: changed(s, "scale_fwd", 0, -2), "scale_fwd must be finite .* got -2"),
    "infinite": (lambda s: changed(s, "scale_bwd", 1, INF), "scale_bwd must be finite .* got inf"),
    "tiny": (lambda s: changed(s, "scale_fwd", 1, 1e-39), "scale_fwd must be finite .* got 1e-39"),
    "inverse NaN": (lambda s: changed(s, "scale_inv_fwd", 0, NAN), "scale_inv_fwd must be finite"),
    "inverse 0": (lambda s: changed(s, "scale_inv_bwd", 0, 0), "scale_inv_bwd must be finite"),
    "inconsistent": (
        lambda s: changed(s, "scale_inv_fwd", 0, 3.0),
        "scale_inv_fwd must be the inverse of scale_fwd, got 3 for",
    ),
    "infinite history": (
        lambda s: changed(s, "amax_history_fwd", (2, 1), INF),
        "amax_history_fwd must be finite and at least 0, got inf",
    ),
    "NaN history": (
        lambda s: changed(s, "amax_history_bwd", (1, 0), NAN),
        "amax_history_bwd must be finite and at least 0, got nan",
    ),
    "negative amax": (
        lambda s: changed(s, "amax_history_fwd", (0, 0), -1),
        "amax_history_fwd must be finite and at least 0, got -1",
    ),
    "sparse": (
        lambda s: s | {"0.fp8_state.scale_bwd": torch.ones(2).to_sparse()},
        "scale_bwd must be a dense tensor, got layout torch.sparse_coo",
    ),
    "sparse header": (
        lambda s: s | {"0." + HEADER: torch.ones(9, dtype=torch.uint8).to_sparse()},
        "header must be a dense tensor",
    ),
    "meta": (
        lambda s: s | {"0.fp8_state.amax_history_bwd": torch.zeros(4, 2, device="meta")},
        "amax_history_bwd must have values, got a tensor on the meta device",
    ),
    "meta header": (
        lambda s: s | {"0." + HEADER: torch.ones(9, dtype=torch.uint8, device="meta")},
        "header must have values",
    ),
    "other length": (
        lambda s: s | {"0.fp8_state.amax_history_bwd": torch.zeros(3, 2)},
        r"amax_history_bwd must have shape \[4, 2\], got \[3, 2\]",
    ),
    "length of the header": (lambda s: header(history=5), "header must have the length .* got 5"),
    "too long": (lambda s: expanded(16385), "must have at most 16384 rows, got 16385"),
    "1.5 GiB": (lambda s: expanded(10**8), "must have at most 16384 rows, got 100000000"),
    "margin": (
        lambda s: header(recipe=recipe_of(s) | {"margin": 100}),
        "recipe must be the one that was saved.*margin must be from -16 to 16, got 100",
    ),
    "algorithm": (
        lambda s: header(recipe=recipe_of(s) | {"amax_compute_algo": "mean"}),
        "recipe must be the one that was saved",
    ),
}


def recipe_of(state):
    return json.loads(bytes(state["0." + HEADER].tolist()))["recipe"]


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("used", [True, False])
def test_what_is_refused_leaves_the_module_as_it_was(what, used, device):
    """All of it: scales, histories, clocks, recipe and weights."""
    change, message = WRONG[what]
    state = change(trained().state_dict())
    module = Linear(16, 32, device=device)
    if used:
        with fp8_autocast(True, DelayedScaling(amax_history_len=6)):
            module(torch.full((2, 16), 3.0, device=device)).sum().backward()
    amax_groups.pending = 3
    fp8 = module.fp8_state
    allocated, recipe, due = fp8.allocated, fp8.recipe, list(fp8.first_steps.due)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    own = {k[2:]: v for k, v in state.items() if k.startswith("0.")}
    with pytest.raises(RuntimeError, match=rf"FP8State: fp8_state\..*{message}"):
        module.load_state_dict(own)
    after = module.state_dict()
    assert list(after) == list(before)
    assert equal(before.values(), after.values())
    assert (fp8.allocated, fp8.recipe, fp8.first_steps.due) == (allocated, recipe, due)
    assert amax_groups.pending == 3


def test_weights_that_do_not_fit_leave_the_fp8_state():
    source, model = trained(5), trained(2)
    state = source.state_dict()
    state["0.weight"] = torch.zeros(3, 3)
    states = [getattr(model[0].fp8_state, name) for name in TENSORS]
    before = [tensor.clone() for tensor in states]
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict(state)
    assert equal(before, states)
    assert torch.equal(
        model[2].fp8_state.scale_fwd, source[2].fp8_state.scale_fwd
    )  # by module, as in torch


@pytest.mark.parametrize("staged", [NAN, INF])
def test_an_amax_that_awaits_its_update_may_be_anything(staged):
    """The update drops and counts it."""
    state = changed(trained().state_dict(), "amax_history_fwd", (0, 0), staged)
    model = build()
    model.load_state_dict(state)
    before = model[0].fp8_state.scale_fwd[0].item()
    flush_fp8_state()
    assert model[0].fp8_state.scale_fwd[0] == before
    assert model[0].fp8_state.amax_history_fwd.isfinite().all()


def test_a_state_dict_in_16_bits_gets_its_inverses_again():
    state = trained().state_dict()
    rounded = {k: v.bfloat16() if v.is_floating_point() else v for k, v in state.items()}
    model = build()
    with pytest.warns(UserWarning, match=r"0\.fp8_state\.scale_inv_fwd was rounded and is made ag"):
        model.load_state_dict(rounded)
    fp8 = model[0].fp8_state
    assert torch.equal(fp8.scale_fwd, state["0.fp8_state.scale_fwd"].bfloat16().float())
    assert torch.equal(fp8.scale_inv_fwd, fp8.scale_fwd.reciprocal())


def test_entries_without_values_suit_a_module_without():
    state = {k: v.to("meta") for k, v in trained().state_dict().items()}
    model = torch.nn.Sequential(
        Linear(16, 32, device="meta"), torch.nn.GELU(), Linear(32, 16, device="meta")
    )
    model.load_state_dict(state, assign=True)
    assert not model[0].fp8_state.allocated


@pytest.mark.parametrize("used", [True, False])
def test_a_state_of_another_recipe_is_brought_to_the_modules(used):
    """Scales of HYBRID's gradients are 128 times those of E4M3: half of them would saturate."""
    saved, own = RECIPE, DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3, margin=1)
    source = trained(recipe=saved)
    flush_fp8_state()
    model = trained(1, own) if used else build()
    flush_fp8_state()
    model.load_state_dict(source.state_dict())
    assert model[0].fp8_state.recipe == saved
    before = {way: getattr(source[0].fp8_state, f"scale_{way}").clone() for way in ("fwd", "bwd")}
    for name in TENSORS:
        assert torch.equal(getattr(model[0].fp8_state, name), getattr(source[0].fp8_state, name))
    with fp8_autocast(True, own):
        model(torch.randn(8, 16))
    fp8 = model[0].fp8_state
    assert fp8.recipe == own
    assert fp8.scale_fwd[0] == before["fwd"][0] / 2
    assert fp8.scale_bwd[0] == before["bwd"][0] * (448 / 57344) / 2
    assert torch.equal(fp8.scale_inv_bwd, fp8.scale_bwd.reciprocal())


@pytest.mark.long
def test_compiled_code_follows_a_state_of_another_recipe():
    own = DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3)
    source = trained()
    flush_fp8_state()
    eager, compiled = trained(1, own), trained(1, own)
    call = torch.compile(compiled, backend="aot_eager")
    x = torch.randn(8, 16)
    found = []
    for model, forward in ((eager, eager), (compiled, call)):
        for load in (False, True):
            amax_groups.pending = 0
            if load:
                model.load_state_dict(source.state_dict())
            with fp8_autocast(True, own):
                out = forward(x)
            out.sum().backward()
        found.append(everything(model)[:12])
    assert equal(*found)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("interval", [1, 3])
def test_copies_keep_the_update_that_is_pending(how, interval):
    """In a process that starts with the copy they go on as the original does."""
    recipe = DelayedScaling(amax_history_len=4, interval=interval)
    model = trained(4, recipe)
    pending = amax_groups.pending
    assert pending > 0
    blob = io.BytesIO()
    torch.save(model, blob)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "deepcopy":
        other = copy.deepcopy(model)
        assert amax_groups.pending == pending
        losses = train(model, optimizer, range(4, 8), recipe)
        del model
        amax_groups.pending = pending
    else:
        losses = train(model, optimizer, range(4, 8), recipe)
        del model
        amax_groups.pending = 0
        blob.seek(0)
        other = torch.load(blob, weights_only=False)
    assert amax_groups.pending == pending
    assert train(other, torch.optim.SGD(other.parameters(), lr=0.1), range(4, 8), recipe) == losses


def test_a_copy_from_a_file_takes_no_update_from_the_process():
    model, blob = trained(), io.BytesIO()
    flush_fp8_state()
    torch.save(model, blob)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3, 4))
    assert amax_groups.pending == 1
    blob.seek(0)
    other = torch.load(blob, weights_only=False)
    assert amax_groups.pending == 1
    flush_fp8_state()
    assert model[0].fp8_state.amax_history_fwd[0].eq(0).all()
    assert other[0].fp8_state.allocated


def test_an_allocation_that_fails_leaves_no_half(monkeypatch):
    module, real = Linear(16, 16), torch.zeros

    def scarce(*size, **kwargs):
        if size[1:] == (2,):
            raise MemoryError("no more")
        return real(*size, **kwargs)

    monkeypatch.setattr(torch, "zeros", scarce)
    with pytest.raises(MemoryError):
        init_fp8_state(module, RECIPE)
    monkeypatch.undo()
    assert not module.fp8_state.allocated
    assert not hasattr(module.fp8_state, "scale_fwd")
    init_fp8_state(module, RECIPE)
    assert "fp8_state.header" in module.state_dict()


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
    assert other[0].fp8_state.recipe.fp8_format is Format.E4M3


@pytest.mark.parametrize("nested", [False, True])
def test_a_distributed_checkpoint_says_what_it_does_not_load(tmp_path, nested):
    """It loads the keys that the model has: none of FP8 state before a forward."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")

    def wrapped(state):
        return {"model": state} if nested else state

    model = trained()
    flush_fp8_state()
    dcp.save(wrapped(model.state_dict()), checkpoint_id=tmp_path)
    fresh = build()
    said = "FP8 state of 2 modules, from .*0.fp8_state on, .* call apex_te.init_fp8_state"
    with pytest.warns(UserWarning, match=said):
        dcp.load(wrapped(fresh.state_dict()), checkpoint_id=tmp_path)
    init_fp8_state(fresh, RECIPE)
    state = fresh.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "FP8State")
        dcp.load(wrapped(state), checkpoint_id=tmp_path)
    fresh.load_state_dict(state)
    assert equal(everything(fresh), everything(model))
