"""The package ``apex``: its ways in, its module tree, and what is refused."""

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from apex_te.compatibility import aliases
from apex_te.compatibility import apex as names
from apex_te.compatibility.aliases import APEX, TRANSFORMER_ENGINE, commands, files, process
from apex_te.op_builder.jit.cli import Command, main
from programs import captured

import apex_te
import apex_te.integrations.apex as ours  # whose finder a fixture would take away again

ROOT = Path(__file__).resolve().parents[4]
VERSION = f"1.14.0+apexte.{apex_te.__version__}"
# The modules of ROCm's and NVIDIA's apex that this package has; the rest are other tests'.
_MODULES = """
RNN RNN.RNNBackend RNN.cells RNN.models _autocast_utils amp amp.__version__ amp._amp_state
amp._initialize amp._process_optimizer amp.amp amp.compat amp.frontend amp.handle amp.lists
amp.lists.functional_overrides amp.lists.tensor_overrides amp.lists.torch_overrides amp.opt
amp.rnn_compat amp.scaler amp.utils amp.wrap contrib contrib.clip_grad contrib.clip_grad.clip_grad
contrib.gpu_direct_storage contrib.layer_norm
contrib.layer_norm.layer_norm contrib.openfold_triton contrib.openfold_triton.fused_adam_swa
contrib.openfold_triton.layer_norm contrib.openfold_triton.mha contrib.torchsched
contrib.torchsched.backend contrib.torchsched.config contrib.torchsched.inductor
contrib.torchsched.ops contrib.torchsched.passes contrib.xentropy
contrib.xentropy.softmax_xentropy fp16_utils fp16_utils.fp16_optimizer fp16_utils.fp16util
fp16_utils.loss_scaler fused_dense fused_dense.fused_dense mlp mlp.mlp multi_tensor_apply
multi_tensor_apply.multi_tensor_apply normalization normalization.fused_layer_norm optimizers
optimizers.fused_adam optimizers.fused_lamb optimizers.fused_sgd
"""
MODULES = _MODULES.split()


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """No alias is installed, before and after."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    names.uninstall()
    yield
    names.uninstall()


def run(body, *folders, check=True, **variables):
    """What a program in a new process prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("APEX_TE_")}
    environment.update(variables, PYTHONPATH=os.pathsep.join([*map(str, folders), str(ROOT)]))
    done = captured([sys.executable, "-c", body], check=False, env=environment)
    assert (done.returncode == 0) is check, done.stdout + done.stderr
    return done.stdout + done.stderr


PROGRAM = """
import importlib.metadata, pickle, sys, apex
from apex import amp
import apex.amp as again
assert apex.amp is amp is again is sys.modules["apex.amp"]
import apex.optimizers.fused_adam, apex_te.integrations.apex as ours
assert apex is ours and apex.optimizers.fused_adam is ours.optimizers.fused_adam
assert apex.optimizers.fused_adam.__name__ == "apex_te.integrations.apex.optimizers.fused_adam"
assert apex.__version__ == importlib.metadata.version("apex")
assert apex.normalization.FusedLayerNorm(3).eps == 1e-5
import amp_C, apex_te
assert amp_C.multi_tensor_scale is apex_te.compatibility.apex.amp_C.multi_tensor_scale
assert pickle.loads(pickle.dumps(apex.mlp.MLP([2, 3]))).mlp_sizes == [2, 3]
assert apex.amp._amp_state is __import__("apex.amp._amp_state", fromlist=["x"])._amp_state
print(apex.__version__)
"""


@pytest.mark.cover(0)
@pytest.mark.parametrize("way", ["install", "environment", "files"])
def test_each_way_gives_the_package_and_the_extensions(way, tmp_path):
    begin, folders, variables = "import apex_te\n", [], {}
    if way == "install":
        begin = "from apex_te.compatibility import apex as c; c.install()\n"
    elif way == "environment":
        variables = {"APEX_TE_APEX": "1"}
    else:
        begin, folders = "", [tmp_path]
        files.write_files(APEX, tmp_path, VERSION)
    assert run(begin + PROGRAM, *folders, **variables) == f"{VERSION}\n"


def test_the_whole_module_tree_imports():
    names.install()
    folder = Path(ours.__file__).parent
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    served = {".".join(path.parts).removesuffix(".__init__") for path in paths} - {"__init__"}
    assert len(served) > 30
    for module in sorted({*MODULES, *served}):
        found = importlib.import_module(f"apex.{module}")
        assert found is importlib.import_module(f"apex_te.integrations.apex.{module}")
    with pytest.raises(ModuleNotFoundError, match=r"apex\.nothing"):
        importlib.import_module("apex.nothing")


def test_what_is_not_served_raises_at_use_with_the_alternative():
    names.install()
    from apex.contrib.openfold_triton import LayerNormSmallShapeOptImpl
    from apex.RNN import LSTM, models

    with pytest.raises(NotImplementedError, match=r"apex\.RNN\.LSTM is not .*torch\.nn has RNN"):
        LSTM(3, 4)
    with pytest.raises(NotImplementedError, match=r"apex\.RNN\.models\.mLSTM.*torch\.nn"):
        models.mLSTM(3, 4)
    with pytest.raises(NotImplementedError, match=r"openfold_triton.*scaled_dot_product"):
        LayerNormSmallShapeOptImpl.apply(torch.ones(3))
    assert not hasattr(models, "__path__")


def test_uninstalling_leaves_nothing_and_installing_again_works():
    before = list(sys.meta_path)
    names.install()
    assert importlib.import_module("apex") is ours
    assert importlib.metadata.version("apex") == VERSION
    names.uninstall()
    assert sys.meta_path == before
    assert not [name for name in sys.modules if name.partition(".")[0] == "apex"]
    assert importlib.util.find_spec("apex") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")
    names.install()
    assert importlib.import_module("apex") is ours


@pytest.mark.parametrize("kind", ["module", "distribution"])
def test_a_real_apex_is_left_alone(kind, tmp_path, monkeypatch):
    if kind == "module":
        (tmp_path / "apex").mkdir()
        (tmp_path / "apex" / "__init__.py").write_text("real = True\n")
        expected = f"a module apex is in {tmp_path}/apex; remove it"
    else:
        info = tmp_path / "apex-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
        expected = f"apex 0.1 is installed in {tmp_path}; pip uninstall apex removes it"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("APEX_TE_APEX", "1")
    for enter in (
        names.install_from_environment,
        lambda: files.write_files(APEX, tmp_path / "other", VERSION),
    ):
        with pytest.raises(aliases.AliasError, match="there must be no real apex beside") as error:
            enter()
        assert expected in str(error.value)
    names.install(first=True)
    if kind == "module":
        assert importlib.import_module("apex").real
        sys.modules.pop("apex")
    else:
        assert importlib.util.find_spec("apex") is None
    assert importlib.import_module("amp_C").__file__.startswith(str(ROOT))


@pytest.mark.parametrize("value", ["0", "maybe"])
def test_the_variable_is_a_boolean(value, monkeypatch):
    monkeypatch.setenv("APEX_TE_APEX", value)
    before = list(sys.meta_path)
    if value == "maybe":
        with pytest.raises(ValueError, match="APEX_TE_APEX must be one of 1/0"):
            names.install_from_environment()
    else:
        names.install_from_environment()
    assert sys.meta_path == before


def test_both_aliases_share_a_folder_and_go_one_by_one(tmp_path):
    """Writing and removing one leaves the other's files bit by bit."""

    def contents(alias):
        paths = [*tmp_path.glob(f"{alias.name}/*"), *tmp_path.glob(f"{alias.name}-*/*")]
        return {path: path.read_bytes() for path in paths if path.is_file()}

    files.write_files(TRANSFORMER_ENGINE, tmp_path, "2.14.0+apexte.1")
    theirs = contents(TRANSFORMER_ENGINE)
    assert files.write_files(APEX, tmp_path, VERSION) == "installed"
    assert files.write_files(APEX, tmp_path, VERSION) == "kept"
    found = files.installed_in(APEX, tmp_path)
    assert (found.version, found.made_for) == (VERSION, apex_te.__version__)
    assert len(files.remove_files(APEX, tmp_path)) == 6
    assert contents(TRANSFORMER_ENGINE) == theirs
    assert contents(APEX) == {}
    files.remove_files(TRANSFORMER_ENGINE, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_commands_take_the_name(tmp_path, capsys):
    more = {
        "install-alias": Command("install", commands.add_install_arguments, commands.install),
        "remove-alias": Command("remove", commands.add_remove_arguments, commands.remove),
    }
    folder = files.purelib(str(tmp_path))
    for words, expected in (
        (["install-alias", "apex"], f"apex {VERSION}: installed in {folder}"),
        (["install-alias", "apex", "--version", "0.9"], "apex 0.9+apexte"),
        (["remove-alias"], f"transformer_engine: no alias in {folder}"),
        (["remove-alias", "apex"], f"apex: removed from {folder}"),
    ):
        assert main([*words, "--prefix", str(tmp_path)], more) == 0
        assert capsys.readouterr().out.startswith(expected)
    assert not list(folder.iterdir())


def test_the_report_says_which_way_is_active(tmp_path, monkeypatch):
    assert commands.facts(APEX) == {"claimed": None, "ways": [], "files": None, "problem": ""}
    assert commands.lines(APEX, commands.facts(APEX)) == ["apex is not an alias here"]
    names.install()
    assert process.ways(TRANSFORMER_ENGINE) == []
    assert commands.facts(APEX)["claimed"] == VERSION
    assert commands.lines(APEX, commands.facts(APEX)) == [f"apex {VERSION}, by install()"]
    files.write_files(APEX, tmp_path, VERSION)
    monkeypatch.syspath_prepend(tmp_path)
    assert commands.facts(APEX)["ways"] == [f"files in {tmp_path}", "install()"]


@pytest.mark.long
def test_the_command_report_has_both_aliases():
    body = "import runpy, sys; sys.argv = ['apex_te', 'report', '--json']\n"
    body += "runpy.run_module('apex_te', None, '__main__')"
    facts = json.loads(run(body))
    assert facts["apex_alias"] == facts["alias"]
    assert facts["alias"]["claimed"] is None
