"""A file of FP8 state that does not fit is refused whole."""

import pytest
import torch

from apex_te import Linear, fp8_autocast
from apex_te.fp8.delayed.serialize import NAMES
from apex_te.integrations import load_fp8_state, save_fp8_state
from apex_te.recipe import DelayedScaling

safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


def _without(state, entry):
    return {key: value for key, value in state.items() if not key.endswith(entry)}


SPOILED = {
    **{
        f"without {entry}": (lambda state, entry=entry: _without(state, "1.fp8_state." + entry),
                             rf"complete FP8 states, got none for 1\.fp8_state\.{entry}")
        for entry in NAMES
    },
    "without entries": (lambda state: {}, "must contain complete FP8 states, got none for entries"),
    "of another model": (lambda state: {**state, "2.fp8_state.scale_fwd": torch.ones(3)},
                         r"converted as the saved one was, got state for \['2.fp8_state'\]"),
    "with another name": (lambda state: {**state, "1.fp8_state.scales": torch.ones(3)},
                          r"converted as the saved one was, got state for \['1.fp8_state'\]"),
    "of another width": (lambda state: {**state, "1.fp8_state.scale_fwd": torch.ones(4)},
                         r"must fit the model: FP8State: 1\.fp8_state\.scale_fwd must have shape"),
    "with a negative scale": (lambda state: {**state, "1.fp8_state.scale_fwd": -torch.ones(3)},
                              r"must fit the model: .*scale_fwd must be finite and above 0"),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_spoiled_file_is_refused_whole(how, tmp_path):
    """A file that lacks an entry, or has a wrong one, is refused and changes no module."""
    spoil, message = SPOILED[how]
    recipe = DelayedScaling(amax_history_len=4)
    models = [torch.nn.Sequential(Linear(16, 16), Linear(16, 16)) for _ in range(2)]
    for factor, model in enumerate(models, 1):
        with fp8_autocast(True, recipe):
            model(factor * torch.ones(16, 16)).sum().backward()
    trained, other = models
    save_fp8_state(trained, tmp_path)
    file = tmp_path / "fp8_state.apex_te"
    saved = safetensors_torch.load_file(file)
    safetensors_torch.save_file(spoil(saved), file)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises((ValueError, RuntimeError), match=f"load_fp8_state: .*{message}"):
        load_fp8_state(other, tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    safetensors_torch.save_file(saved, file)
    load_fp8_state(other, tmp_path)
    assert all(torch.equal(other.state_dict()[key], value) for key, value in saved.items())


def test_file_that_is_not_safetensors_is_refused(tmp_path):
    """A damaged file gives a typed error with its path."""
    file = tmp_path / "fp8_state.apex_te"
    for content in (b"", b"{}", b"\xff" * 64, b"\x08" + bytes(7) + b"not json"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"fp8_state.apex_te must be a safetensors file"):
            load_fp8_state(Linear(16, 16), tmp_path)
