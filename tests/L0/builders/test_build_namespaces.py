"""Names that are found without an import of their own, what importing costs, and their types."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import captured
from tiny_op import CHECKOUT

from op_builder import builder_names

SCRIPT = """
import json, pkgutil, sys, torch
before = set(sys.modules)
import apex_te
loaded = sorted(set(sys.modules) - before)
names = {n: dir(o) for n, o in (("top", apex_te), ("ops", apex_te.ops),
                                ("compatibility", apex_te.compatibility))}
found = [apex_te.ops.rms_norm.rms_norm.__name__, apex_te.statistics.__name__,
         apex_te.compatibility.rms_norm.rms_norm_fwd.__name__]
listed = [module.name for module in pkgutil.iter_modules(apex_te.compatibility.__path__)]
for owner in (apex_te, apex_te.ops, apex_te.compatibility):
    try:
        owner.nonsense
    except AttributeError as error:
        found.append(str(error))
try:
    import apex_te.compatibility.nonsense
except ModuleNotFoundError as error:
    found.append(str(error))
import apex_te.compatibility.loader as former
found.append(former.define_loader.__module__)
print(json.dumps([loaded, names, listed, found]))
"""


def test_every_name_is_found_and_listed(cache_dir):
    done = captured([sys.executable, "-c", SCRIPT], cwd=CHECKOUT)
    loaded, names, listed, found = json.loads(done.stdout)
    own = [name for name in loaded if name.startswith("apex_te")]
    runtime = ["runtime", "runtime.imports"]
    assert own == ["apex_te", *(f"apex_te.{name}" for name in runtime)]
    assert list(cache_dir.iterdir()) == []
    assert {"ops", "compatibility", "statistics", "Linear"} <= set(names["top"])
    stems = {path.stem for path in (CHECKOUT / "apex_te/ops").glob("[a-z]*.py")}
    assert stems <= set(names["ops"])
    assert sorted(listed) == sorted([*builder_names(), "aliases", "apex", "finder"])
    assert set(listed) <= set(names["compatibility"])
    assert found == [
        "rms_norm",
        "apex_te.statistics",
        "rms_norm_fwd",
        "module 'apex_te' has no attribute 'nonsense'",
        "module 'apex_te.ops' has no attribute 'nonsense'",
        "module 'apex_te.compatibility' has no attribute 'nonsense'",
        "No module named 'apex_te.compatibility.nonsense'",
        "apex_te.compatibility.finder",
    ]


@pytest.mark.parametrize(
    ("owner", "name", "meant"),
    [
        ("apex_te", "Layernorm", "LayerNorm"),
        ("apex_te", "Linaer", "Linear"),
        ("apex_te", "linear", "Linear"),
        ("apex_te", "from_troch", "from_torch"),
        ("apex_te", "FP8Callbak", "FP8Callback"),
        ("apex_te", "xyzzy", None),
        ("apex_te.recipe", "DelayedScalling", "DelayedScaling"),
        ("apex_te.ops", "rmsnorm", "rms_norm"),
        ("apex_te.optimizers", "FusedAdamW", "FusedAdam"),
        ("apex_te.integrations", "fuselora", "fuse_lora"),
        ("apex_te.distributed", "ColumnParalel", "ColumnParallel"),
        ("apex_te.amp", "initialise", "initialize"),
        ("apex_te.module", "RMSnorm", "RMSNorm"),
        ("apex_te.compatibility", "layernorm", "layer_norm"),
    ],
)
def test_a_misspelt_name_is_answered_by_the_name_that_was_meant(owner, name, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(importlib.import_module(owner), name)
    hint = f"; did you mean {meant!r}?" if meant else ""
    assert str(caught.value) == f"module {owner!r} has no attribute {name!r}{hint}"
    assert caught.value.name == name


def test_a_name_that_is_one_level_deeper_is_pointed_to():
    import apex_te

    with pytest.raises(AttributeError, match=r"; it is apex_te\.integrations\.huggingface\.FP8C"):
        apex_te.integrations.FP8Callback  # noqa: B018
    with pytest.raises(AttributeError, match=r"'DelayedScaling'; it is apex_te\.recipe\.DelayedSc"):
        apex_te.DelayedScaling  # noqa: B018


def test_python_adds_no_second_guess():
    code = "import apex_te; apex_te.Linaer"
    done = captured([sys.executable, "-c", code], check=False, cwd=CHECKOUT)
    assert done.stderr.endswith("has no attribute 'Linaer'; did you mean 'Linear'?\n")


@pytest.mark.parametrize("package", ["apex_te", "apex_te.distributed", "apex_te.module"])
def test_type_checkers_are_told_every_lazy_name(package):
    module = importlib.import_module(package)
    assert module.__file__ is not None
    told = {
        name.asname
        for block in ast.parse(Path(module.__file__).read_text()).body
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for name in line.names
    }
    assert told == set(module._NAMES)


def test_type_checkers_are_told_every_op():
    import apex_te

    stems = {path.stem for path in (CHECKOUT / "apex_te/ops").glob("[a-z]*.py")}
    text = Path(str(apex_te.ops.__file__)).read_text()
    assert [op for op in builder_names() if op in stems and f" {op} as {op}\n" not in text] == []


WITHOUT_TRANSFORMERS = """
import contextlib, io, sys
sys.modules["transformers"] = None
import apex_te
try:
    apex_te.FP8Callback
except ImportError as error:
    print(error)
from apex_te import *
with contextlib.redirect_stdout(io.StringIO()) as shown:
    help(apex_te)
print("FP8Callback" in dir(apex_te), "fuse_loss" in dir(apex_te), len(shown.getvalue()) > 10000)
"""


@pytest.mark.long
def test_the_callback_says_how_to_install_transformers_which_nothing_else_needs():
    done = captured([sys.executable, "-c", WITHOUT_TRANSFORMERS], cwd=CHECKOUT)
    assert done.stdout.splitlines() == [
        "FP8Callback: transformers must be installed: pip install transformers",
        "False True True",
    ]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("FP8Callback", "huggingface"),
        ("advise", "layer_advice"),
        ("autocast_forward", ""),
        ("conversion_summary", ""),
        ("export_fp8", ""),
        ("fp8_tensors", ""),
        ("from_torch", ""),
        ("fuse_latent_attention", ""),
        ("fuse_lora", ""),
        ("fuse_loss", ""),
    ],
)
def test_names_of_conversion_and_training_are_at_the_top_level(name, module):
    import apex_te

    if name == "FP8Callback":
        pytest.importorskip("transformers")
    where = importlib.import_module(f"apex_te.integrations.{module}".rstrip("."))
    assert name in dir(apex_te)
    assert getattr(apex_te, name) is getattr(where, name)


PROBE = """
import apex_te
import torch

reveal_type(apex_te.Linear(4, 4))
reveal_type(apex_te.ops.activation.activation_fwd(torch.ones(1), "silu"))
reveal_type(apex_te.ops.rms_norm.rms_norm_fwd)
reveal_type(apex_te.statistics.fp8_statistics)
reveal_type(apex_te.from_torch)
reveal_type(apex_te.recipe.DelayedScaling(fp8_format="e4m3").fp8_format)
wrong: int = apex_te.is_fp8_enabled
apex_te.Linaer
apex_te.ops.rmsnorm
apex_te.recipe.Formatt
apex_te.optimizers.FusedAdm
apex_te.integrations.fuse_los
apex_te.distributed.Replicate
"""
TYPES = (
    'Revealed type is "apex_te.module.linear.Linear"',
    'Revealed type is "torch._tensor.Tensor"',
    "fallback=apex_te.ops.norm_common.NormOutput]",
    "-> apex_te.fp8.statistics.fp8_statistics",
    "-> torch.nn.modules.module.Module",
    'Revealed type is "apex_te.recipe.Format"',
    "error: Incompatible types in assignment",
    'error: Module has no attribute "Linaer"',
    'error: Module has no attribute "rmsnorm"',
    'error: Module has no attribute "Formatt"',
    'error: Module has no attribute "FusedAdm"',
    'error: Module has no attribute "fuse_los"',
    'error: Module has no attribute "Replicate"',
)


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """A folder that has torch and no other installed package, with mypy's cache of torch."""
    import torch

    folder = tmp_path_factory.mktemp("beside")
    (folder / "packages").mkdir()
    (folder / "packages" / "torch").symlink_to(Path(torch.__file__).parent)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("hook", ["build_editable", "build_wheel"])
def test_type_checkers_see_an_installation(hook, tmp_path, beside):
    pytest.importorskip("mypy")
    import zipfile

    from test_build_wheel import run_hook

    done = run_hook(CHECKOUT, f"{hook}({str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr[-2000:]
    environment = tmp_path / "environment"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120
    )
    (site,) = environment.glob("lib/python*/site-packages")
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    # Not the folder of torch, where an apex_te of its own may be.
    (site / "torch.pth").write_text(f"{beside / 'packages'}\n")
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE)
    python = environment / "bin" / "python"
    options = ["--python-executable", str(python), "--config-file", "", "--ignore-missing-imports"]
    options += ["--cache-dir", str(beside / "cache"), str(probe)]
    command = [sys.executable, "-m", "mypy", *options]
    checked = captured(command, check=False, timeout=600, cwd=tmp_path)
    for expected in TYPES:
        assert expected in checked.stdout, checked.stdout + checked.stderr
