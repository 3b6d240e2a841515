"""Files that earlier versions wrote load, bit for bit (tests/data/write_saved_files.py)."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import apex_te

DATA = Path(__file__).resolve().parents[2] / "data"
SAVED = sorted(path for path in DATA.glob("saved_*") if path.is_dir())


# What pickles of any version name. Nothing may be removed; former_modules.py finds what has moved.
PICKLED = {
    "apex_te.fp8.delayed.state.FP8State",
    "apex_te.fp8.module_fp8.ModuleFP8",
    "apex_te.module._core.fused_casts.NormOptions",
    "apex_te.module._core.head_layout.HeadLayout",
    "apex_te.module._core.heads.HeadLayout",
    "apex_te.module._core.layer_norm_linear_function.NormOptions",
    "apex_te.module._core.parallel.GroupHolder",
    "apex_te.module.attention.backends.Options",
    "apex_te.module.attention.candidates.Options",
    "apex_te.module.attention.dot_product.DotProductAttention",
    "apex_te.module.attention.masks.MaskType",
    "apex_te.module.attention.multihead.MultiheadAttention",
    "apex_te.module.grouped.linear.GroupedLinear",
    "apex_te.module.layer_norm.LayerNorm",
    "apex_te.module.layer_norm_linear.LayerNormLinear",
    "apex_te.module.layer_norm_mlp.LayerNormMLP",
    "apex_te.module.linear.Linear",
    "apex_te.module.rms_norm.RMSNorm",
    "apex_te.module.transformer_layer.TransformerLayer",
    "apex_te.recipe.DelayedScaling",
    "apex_te.recipe.Format",
    "apex_te.recipe.FormatValue",
}


def _load(path: Path, weights_only: bool = True) -> Any:
    return torch.load(path, weights_only=weights_only)


@pytest.fixture(params=SAVED, ids=lambda path: path.name)
def saved(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("writer", DATA / "write_saved_files.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        if name.endswith(".header"):  # it counts this process's regions, too
            continue
        same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        assert same(got[name], value), name


def _step(writer: ModuleType, models: Any) -> None:
    """Train once, which reads and moves the scales of a loaded state."""
    for optimizer in writer.train(models, 1):
        for group in optimizer.param_groups:
            assert all(torch.isfinite(p).all() for p in group["params"])
    apex_te.flush_fp8_state()


def test_state_dict(saved: Path, writer: ModuleType) -> None:
    wanted = _load(saved / "state_dict.pt")
    model = torch.nn.ModuleDict(writer.modules())
    model.load_state_dict(wanted)
    _same(model.state_dict(), wanted)
    _step(writer, dict(model.items()))


def test_pickled_modules(saved: Path, writer: ModuleType) -> None:
    models = _load(saved / "modules.pt", weights_only=False)
    _same(torch.nn.ModuleDict(models).state_dict(), _load(saved / "state_dict.pt"))
    fresh = torch.nn.ModuleDict(writer.modules())
    fresh.load_state_dict(_load(saved / "state_dict.pt"))
    _step(writer, models)
    _step(writer, dict(fresh.items()))
    _same(torch.nn.ModuleDict(models).state_dict(), fresh.state_dict())


def test_distributed_checkpoint(saved: Path, writer: ModuleType) -> None:
    model = torch.nn.ModuleDict(writer.modules())
    apex_te.init_fp8_state(model, writer.RECIPES["delayed"])
    state = model.state_dict()
    dcp.load(state, checkpoint_id=saved / "dcp")
    model.load_state_dict(state)
    _same(model.state_dict(), _load(saved / "state_dict.pt"))


def test_fp8_parameters(saved: Path, writer: ModuleType) -> None:
    values = _load(saved / "fp8_values.pt")
    for weights_only in (True, False):
        held = _load(saved / "fp8_parameters.pt", weights_only)
        assert list(held) == list(values) == list(writer.RECIPES)
        for name, parameter in held.items():
            assert isinstance(parameter, torch.nn.Parameter)
            wanted, fp8_data = values[name]
            assert torch.equal(parameter.dequantize(torch.float32), wanted)
            assert torch.equal(parameter._rowwise.view(torch.uint8), fp8_data)


def test_recipes(saved: Path, writer: ModuleType) -> None:
    with (saved / "recipes.pkl").open("rb") as file:
        assert pickle.load(file) == writer.RECIPES


def test_optimizers(saved: Path, writer: ModuleType) -> None:
    wanted = _load(saved / "optimizers.pt")
    for module, state in zip(writer.modules().values(), wanted, strict=True):
        optimizer = apex_te.optimizers.FusedAdam(module.parameters(), lr=1e-3)
        optimizer.load_state_dict(state)
        got = optimizer.state_dict()
        for index, moments in state["state"].items():
            _same(got["state"][index], moments)
    with (saved / "optimizer.pkl").open("rb") as file:
        optimizer = pickle.load(file)
    for index, moments in wanted[0]["state"].items():
        _same(optimizer.state_dict()["state"][index], moments)


def test_former_modules_are_the_present_ones() -> None:
    from apex_te.runtime.former_modules import _NOW

    has_jax = importlib.util.find_spec("jax") is not None
    for former, now in _NOW.items():
        if former.startswith("jax.") and not has_jax:
            continue
        present = importlib.import_module(f"apex_te.{now}")
        assert importlib.import_module(f"apex_te.{former}") is present
        assert present.__name__ == present.__spec__.name == f"apex_te.{now}"


def test_names_in_pickles_stay(writer: ModuleType) -> None:
    for name in PICKLED:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    models = writer.modules()
    writer.train(models, 1)
    parts = pickletools.genops(pickle.dumps(models, protocol=2))
    held = {name.replace(" ", ".") for opcode, name, _ in parts if opcode.name == "GLOBAL"}
    assert {name for name in held if name.startswith("apex_te")} <= PICKLED


@pytest.mark.long
def test_folder_of_a_renamed_package_is_no_package(tmp_path: Path) -> None:
    """A checkout that was upgraded has the old folder with what Python cached in it."""
    (tmp_path / "quantizer" / "__pycache__").mkdir(parents=True)
    code = (
        "import sys, apex_te; apex_te.__path__.insert(0, sys.argv[1])\n"
        "from apex_te.quantizer.base import Quantizer\n"
        "import apex_te.quantizer as found; print(found.__name__)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "apex_te.fp8.scheme\n", done.stderr
