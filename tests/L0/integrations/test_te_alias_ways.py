"""The alias ``transformer_engine`` in a process: its three ways in, refusals, and what it costs."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from apex_te.compatibility.aliases import TRANSFORMER_ENGINE as TE
from apex_te.compatibility.aliases import files
from programs import captured

from apex_te.integrations import te_alias

ROOT = Path(__file__).resolve().parents[3]
INSTALL = "from apex_te.integrations import transformer_engine as shims; shims.install()"
# Ways into the alias: code that begins the program, environment variables, and files.
WAYS = {
    "install": (INSTALL, {}, False),
    "environment": ("import apex_te", {"APEX_TE_TRANSFORMER_ENGINE": "1"}, False),
    "files": ("", {}, True),
    "all": (INSTALL, {"APEX_TE_TRANSFORMER_ENGINE": "1"}, True),
}


def run(body, *folders, check=True, **variables):
    """Runs a program in a new process and returns what it prints.

    Args:
        body: the program.
        folders: folders that imports search before others.
        check: the program must succeed; False: it must fail.
        variables: environment variables.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("APEX_TE_T")}
    path = os.pathsep.join([*map(str, folders), str(ROOT), environment.get("PYTHONPATH", "")])
    environment.update(variables, PYTHONPATH=path.rstrip(os.pathsep))
    done = captured([sys.executable, "-c", body], check=False, env=environment)
    assert (done.returncode == 0) is check, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_alias(prefix, *options):
    """Writes the alias's files below ``prefix`` and returns their folder of packages."""
    command = ["apex_te", "install-alias", "--prefix", str(prefix), *options]
    run(f"import runpy, sys; sys.argv = {command!r}; runpy.run_module('apex_te', None, '__main__')")
    return next(prefix.rglob("transformer_engine")).parent


@pytest.fixture(scope="module")
def alias_folder(tmp_path_factory):
    """A folder of packages with the alias's files, which tests only read."""
    return write_alias(tmp_path_factory.mktemp("prefix"))


@pytest.fixture
def enter(request):
    """Returns the first lines, the folders and the variables of a program that uses a way in."""

    def parts(way):
        begin, variables, files = WAYS[way]
        return begin, [request.getfixturevalue("alias_folder")] if files else [], variables

    return parts


CHECKS = """
import importlib.metadata as metadata, importlib.util, pickle, sys, warnings
warnings.simplefilter("error")
assert importlib.util.find_spec("transformer_engine").origin.endswith(".py")
assert "transformer_engine" not in sys.modules
assert importlib.util.find_spec("transformer_engine_torch") is None
import transformer_engine
import transformer_engine.common.recipe as recipe
from transformer_engine import common
from transformer_engine.common import recipe as again
import apex_te
from apex_te.integrations import transformer_engine as shims
assert transformer_engine is shims is sys.modules["transformer_engine"]
assert recipe is again is common.recipe is shims.common.recipe
assert recipe is sys.modules["apex_te.integrations.transformer_engine.common.recipe"]
assert recipe.__spec__.name == recipe.__name__
assert importlib.util.find_spec("transformer_engine.common.recipe") is recipe.__spec__
version = transformer_engine.__version__
assert version == "2.14.0+apexte." + apex_te.__version__, version
for name in ("transformer-engine", "transformer_engine", "Transformer.Engine"):
    assert metadata.version(name) == version
    assert metadata.metadata(name)["Summary"] == "alias of apex_te"
assert metadata.requires("transformer-engine") == ["apex_te"]
names = [d.metadata["Name"] for d in metadata.distributions()]
assert names.count("transformer-engine") == 1, names
assert metadata.packages_distributions()["transformer_engine"] == ["transformer-engine"]
from packaging.requirements import Requirement
for text in (">=2.14", "==2.14.0", ">=0.11.0", "<3"):
    assert Requirement("transformer-engine" + text).specifier.contains(version)
copy = pickle.loads(pickle.dumps(recipe.DelayedScaling(margin=1)))
assert type(copy) is recipe.DelayedScaling
import inspect
assert inspect.getsource(recipe.DelayedScaling).startswith("@named")
import transformer_engine_torch
assert transformer_engine_torch.thd_get_partitioned_indices
assert shims.install() is True  # which is not taken for a real one
for absent in ("transformer_engine.pytorch.cpp_extensions", "transformer_engine.nothing"):
    try:
        __import__(absent)
    except ImportError:
        pass
    else:
        raise AssertionError(absent)
transformer_engine.common.recipe.DelayedScaling = 5
from transformer_engine.common.recipe import DelayedScaling
assert DelayedScaling == 5
transformer_engine.pytorch = 6
assert shims.pytorch == 6
print("all is well")
"""


@pytest.mark.cover(0)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_gives_one_module_a_name_and_the_metadata(way, enter):
    begin, folders, variables = enter(way)
    assert "all is well" in run(begin + CHECKS, *folders, **variables)


@pytest.mark.long
@pytest.mark.cover(0)
@pytest.mark.parametrize("way", ["install", "files"])
def test_a_folder_that_is_no_package_does_not_hinder(way, enter, tmp_path):
    (tmp_path / "folder" / "transformer_engine").mkdir(parents=True)
    (tmp_path / "folder" / "transformer_engine" / "test_mine.py").touch()
    begin, folders, variables = enter(way)
    assert "all is well" in run(begin + CHECKS, tmp_path / "folder", *folders, **variables)


@pytest.mark.long
def test_searches_of_given_folders_do_not_find_the_distribution(tmp_path):
    body = (
        f"{INSTALL}; from importlib.metadata import distributions\n"
        f"assert not list(distributions(path=[{str(tmp_path)!r}]))\n"
        "assert len(list(distributions(name='transformer_engine'))) == 1\n"
        "assert not list(distributions(name='transformer-engine-torch'))"
    )
    run(body)


@pytest.mark.long
def test_a_version_can_be_claimed():
    body = (
        f"{INSTALL}; import transformer_engine, importlib.metadata as m\n"
        "print(transformer_engine.__version__, m.version('transformer-engine'))"
    )
    first, second = run(body, APEX_TE_TE_VERSION="1.13.0").split()
    assert first == second
    assert first.startswith("1.13.0+apexte.")
    output = run(body, check=False, APEX_TE_TE_VERSION="new")
    assert "APEX_TE_TE_VERSION must be a version such as 2.14.0, got 'new'" in output


@pytest.mark.long
def test_the_variable_is_a_boolean():
    output = run("import apex_te", check=False, APEX_TE_TRANSFORMER_ENGINE="maybe")
    assert "APEX_TE_TRANSFORMER_ENGINE must be one of 1/0" in output
    body = "import apex_te, importlib.util as u; print(u.find_spec('transformer_engine'))"
    assert run(body, APEX_TE_TRANSFORMER_ENGINE="0") == "None\n"


def test_without_the_variable_nothing_of_the_alias_is_imported():
    body = """
import apex_te, sys
assert not [name for name in sys.modules if "integrations" in name or "transformer_engine" in name]
assert not [finder for finder in sys.meta_path if "aliases" in type(finder).__module__]
"""
    run(body)


def test_installing_twice_and_uninstalling_leave_nothing():
    body = """
import sys
from apex_te.integrations import transformer_engine as shims
before = list(sys.meta_path)
assert shims.install() is True
assert shims.install() is True
assert len(sys.meta_path) == len(before) + 2
import transformer_engine.common.recipe as recipe
import transformer_engine_torch
assert shims.install() is True
shims.uninstall()
assert sys.meta_path == before
assert not [name for name in sys.modules if name.startswith("transformer_engine")]
import importlib.util, importlib.metadata
assert importlib.util.find_spec("transformer_engine") is None
assert importlib.util.find_spec("transformer_engine_torch") is None
try:
    importlib.metadata.version("transformer-engine")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    raise AssertionError("the distribution is still found")
shims.uninstall()
shims.install()
import transformer_engine.common.recipe as again
assert again is recipe
"""
    run(body)


def make_distribution(folder, kind):
    """Makes part of a real Transformer Engine in ``folder``; returns what an error says of it."""
    if kind.startswith("module "):
        name = kind.removeprefix("module ")
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("__version__ = '2.9'\n")
        return f"a module {name} is in {folder}/{name}; remove it"
    if kind == "editable":
        info = folder / "transformer_engine.egg-info"
        info.mkdir()
        (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: transformer_engine\n")
        return f"transformer-engine is installed in {folder}; pip uninstall transformer-engine"
    name = kind.removeprefix("broken ")
    info = folder / f"{name.replace('-', '_')}-2.9.0.dist-info"
    info.mkdir()
    if kind == name:
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.9.0\n")
        (info / "INSTALLER").write_text("pip\n")
        return f"{name} 2.9.0 is installed in {folder}; pip uninstall {name} removes it"
    return f"{name} is installed in {folder}; pip uninstall {name} removes it"


REAL = [
    "transformer-engine", "transformer-engine-torch", "transformer-engine-cu12",
    "transformer-engine-cu13", "transformer-engine-jax", "broken transformer-engine", "editable",
    "module transformer_engine", "module transformer_engine_torch",
]  # fmt: skip


@pytest.mark.parametrize("kind", REAL)
def test_a_real_transformer_engine_refuses_each_way(kind, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)  # another test may have installed the alias
    real, other = tmp_path / "real", tmp_path / "other"
    real.mkdir()
    expected = make_distribution(real, kind)
    monkeypatch.syspath_prepend(real)
    monkeypatch.setenv("APEX_TE_TRANSFORMER_ENGINE", "1")
    before = list(sys.meta_path)
    assert te_alias.install(missing_ok=True) is False
    for owner, enter in (
        ("install()", te_alias.install),
        ("APEX_TE_TRANSFORMER_ENGINE=1", te_alias.install_from_environment),
        ("install-alias", lambda: files.write_files(TE, other, "2.14.0+apexte.1")),
    ):
        with pytest.raises(te_alias.AliasError) as error:
            enter()
        assert f"{owner}: there must be no real Transformer Engine" in str(error.value)
        assert f"beside apex_te's alias, got: {expected}" in str(error.value)
    assert sys.meta_path == before
    assert not list(other.iterdir())


@pytest.mark.long
def test_a_real_transformer_engine_in_the_prefix_refuses_the_files(tmp_path):
    make_distribution(tmp_path, "module transformer_engine")
    (tmp_path / "transformer_engine" / "linear.py").touch()
    body = (
        "from apex_te.compatibility.aliases import TRANSFORMER_ENGINE as TE, files\n"
        "from pathlib import Path\n"
        f"files.write_files(TE, Path({str(tmp_path)!r}), '2.14.0+apexte.1')"
    )
    assert f"is in {tmp_path}/transformer_engine; remove it" in run(body, check=False)
    assert [path.name for path in tmp_path.iterdir()] == ["transformer_engine"]
    text = (tmp_path / "transformer_engine" / "__init__.py").read_text()
    assert text == "__version__ = '2.9'\n"


@pytest.mark.long
def test_an_imported_transformer_engine_refuses_and_is_left_alone():
    body = """
import sys, types
real = sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
below = sys.modules["transformer_engine.pytorch"] = types.ModuleType("transformer_engine.pytorch")
from apex_te.integrations import transformer_engine as shims
try:
    shims.install()
except shims.AliasError as error:
    print(error)
shims.uninstall()
assert sys.modules["transformer_engine"] is real
assert sys.modules["transformer_engine.pytorch"] is below
"""
    assert "transformer_engine is imported already; start a new process" in run(body)


@pytest.mark.long
@pytest.mark.cover(0)
@pytest.mark.parametrize("way", ["install", "files"])
def test_a_real_distribution_that_comes_later_is_warned_of_once(way, enter, tmp_path):
    begin, folders, variables = enter(way)
    body = f"""{begin}
import os, sys
os.mkdir({str(tmp_path / "transformer_engine_torch-2.9.0.dist-info")!r})
sys.path.append({str(tmp_path)!r})
import transformer_engine
import transformer_engine.common
import transformer_engine as again
assert again.common.recipe.DelayedScaling
"""
    output = run(body, *folders, **variables)
    assert (
        output.count(
            "UserWarning: transformer_engine is apex_te's alias, but transformer-engine-torch"
        )
        == 1
    )
    assert output.count("python -m apex_te remove-alias") == 1


def test_the_machinery_needs_no_torch(tmp_path):
    body = f"""
import sys, types
sys.modules["torch"] = None
for name, folders in (
    ("apex_te", [{str(ROOT / "apex_te")!r}, {str(ROOT)!r}]),
):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = folders
import pathlib, importlib.metadata
from apex_te.compatibility.aliases import TRANSFORMER_ENGINE as TE, commands, files, process
folder = pathlib.Path({str(tmp_path)!r})
assert files.write_files(TE, folder, "2.14.0+apexte.1") == "installed"
sys.path.insert(0, str(folder))
assert importlib.metadata.version("transformer_engine") == "2.14.0+apexte.1"
import importlib.util
assert importlib.util.find_spec("transformer_engine").origin.startswith(str(folder))
assert commands.facts(TE)["claimed"] == "2.14.0+apexte.1"
assert len(files.remove_files(TE, folder)) == 6
process.install(TE)
assert importlib.metadata.version("transformer_engine").startswith("2.14.0+apexte.")
assert not [name for name in sys.modules if name.startswith("torch.")]
"""
    run(body)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_report_says_which_way_is_active(tmp_path):
    def report(*folders, **variables):
        # By one process: starting it takes longer than reporting.
        body = """
import runpy, sys
for options in ([], ["--json"]):
    sys.argv = ["apex_te", "report", *options]
    try:
        runpy.run_module("apex_te", None, "__main__")
    except SystemExit as end:
        assert not end.code, end.code
    print("=====")
"""
        text, facts, _ = run(body, *folders, **variables).split("=====\n")
        lines = " ".join(text.split())
        return json.loads(facts)["alias"], lines[lines.index("alias transformer_engine") :]

    facts, text = report()
    assert facts == {"claimed": None, "ways": [], "files": None, "problem": ""}
    assert text.startswith("alias transformer_engine is not an alias here")
    facts, text = report(APEX_TE_TRANSFORMER_ENGINE="1", APEX_TE_TE_VERSION="2.6.0")
    assert facts["claimed"].startswith("2.6.0+apexte.")
    assert f"{facts['claimed']}, by APEX_TE_TRANSFORMER_ENGINE=1" in text
    folder = write_alias(tmp_path, "--version", "2.7.0")
    facts, text = report(folder, APEX_TE_TRANSFORMER_ENGINE="1")
    assert facts["claimed"].startswith("2.7.0+apexte.")
    assert facts["ways"] == [f"files in {folder}", "APEX_TE_TRANSFORMER_ENGINE=1"]
    assert facts["files"] == str(folder)
    (folder / "transformer_engine_torch-2.9.0.dist-info").mkdir()
    facts, text = report(folder)
    assert facts["problem"].startswith("transformer-engine-torch is installed in")
    assert "pip uninstall transformer-engine-torch" in text


WITHOUT_TORCH = """
import importlib.abc, sys
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")
sys.meta_path.insert(0, NoTorch())
"""


def needs_jax():
    for name in ("jax", "flax"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")


JAX_NAMES = """
import importlib.metadata as metadata, importlib.util, sys
import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common import recipe
from transformer_engine import jax as again
from transformer_engine.jax.activation import activation
from transformer_engine.jax.checkpoint_policies import te_gemms_saveable
from transformer_engine.jax.dense import dense, grouped_dense
from transformer_engine.jax.flax.module import TransformerEngineBase
from transformer_engine.jax.flax.transformer import TransformerLayer
from transformer_engine.jax.layernorm import layernorm
from transformer_engine.jax.layernorm_dense import layernorm_dense
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.quantize import QuantizerFactory, autocast, noop_quantizer_set
from transformer_engine.jax.sharding import MeshResource, global_shard_guard
from transformer_engine.jax.softmax import SoftmaxFusionType, softmax
import transformer_engine, apex_te.jax, apex_te.jax.dense as ours
assert te is again is transformer_engine.jax is apex_te.jax is sys.modules["apex_te.jax"]
assert sys.modules["transformer_engine.jax.dense"] is ours is te.dense
assert te.__spec__.name == te.__name__ == "apex_te.jax"
assert importlib.util.find_spec("transformer_engine.jax.dense") is ours.__spec__
assert te_flax is te.flax and te_flax.TransformerLayer is TransformerLayer
for name in ("NVTE_FP8_COLLECTION_NAME autocast fp8_autocast update_collections "
             "MeshResource").split():
    assert getattr(te, name)
for name in ("DenseGeneral LayerNorm LayerNormDenseGeneral LayerNormMLP DotProductAttention "
             "make_dot_general_cls extend_logical_axis_rules MultiHeadAttention "
             "RelativePositionBiases TransformerLayer TransformerLayerType").split():
    assert getattr(te_flax, name)
assert metadata.version("transformer-engine") == transformer_engine.__version__
made = recipe.Float8CurrentScaling()
with te.autocast(enabled=True, recipe=made):
    assert QuantizerFactory.create_set().recipe == made.plain()
try:
    import transformer_engine.jax.nothing
except ImportError:
    pass
else:
    raise AssertionError("nothing")
torch = sorted({name.partition(".")[0] for name in sys.modules} & {"torch"})
try:
    import transformer_engine.pytorch
except ModuleNotFoundError as error:
    assert error.name == "torch"
    absent = True
else:
    absent = False
print("torch:", *torch, absent)
"""


@pytest.mark.cover(0)
@pytest.mark.parametrize("way", ["install", "environment", "files"])
def test_each_way_serves_jax_without_torch(way, enter):
    needs_jax()
    begin, folders, variables = enter(way)
    assert run(WITHOUT_TORCH + begin + JAX_NAMES, *folders, **variables).strip() == "torch: True"


@pytest.mark.cover(0)
def test_where_torch_is_installed_it_is_not_imported(enter):
    needs_jax()
    begin, folders, variables = enter("install")
    assert run(begin + JAX_NAMES, *folders, **variables).strip() == "torch: False"


README = """
import flax
import jax
import jax.numpy as jnp
import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common import recipe

BATCH = 32
SEQLEN = 128
HIDDEN = 1024

# Initialize RNG and inputs.
rng = jax.random.PRNGKey(0)
init_rng, data_rng = jax.random.split(rng)
inp = jax.random.normal(data_rng, [BATCH, SEQLEN, HIDDEN], jnp.float32)

# Create an FP8 recipe. Note: All input args are optional.
fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)

# Enable autocasting for the forward pass
with te.autocast(enabled=True, recipe=fp8_recipe):
    model = te_flax.DenseGeneral(features=HIDDEN)

    def loss_fn(params, other_vars, inp):
      out = model.apply({'params':params, **other_vars}, inp)
      return jnp.mean(out)

    # Initialize models.
    variables = model.init(init_rng, inp)
    other_variables, params = flax.core.pop(variables, 'params')

    # Construct the forward and backward function
    fwd_bwd_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))

    for _ in range(10):
      loss, (param_grads, other_grads) = fwd_bwd_fn(params, other_variables, inp)
"""
AFTER = """
assert jnp.isfinite(loss)
assert param_grads["kernel"].value.shape == (HIDDEN, HIDDEN)
metas = other_grads["fp8_metas"]
expected = [float(jnp.abs(x).max()) for x in (inp, params["kernel"].value)]
assert metas["amax_history_fwd"][0, :2].tolist() == expected
assert float(metas["amax_history_bwd"][0, 0]) == 1 / (BATCH * SEQLEN * HIDDEN)  # of the mean
print("done")
"""


@pytest.mark.long
@pytest.mark.cover(0)
def test_the_readme_program_of_transformer_engine_runs_unmodified_without_torch(enter):
    """Ten steps of a layer, 4096 tokens of width 1024: its README of 2.20."""
    needs_jax()
    begin, folders, variables = enter("files")
    assert run(WITHOUT_TORCH + begin + README + AFTER, *folders, **variables).strip() == "done"


@pytest.mark.cover(0)
def test_uninstall_removes_the_names_and_leaves_the_modules(enter):
    needs_jax()
    begin, folders, variables = enter("install")
    body = """
import sys, transformer_engine.jax.dense
from apex_te.integrations import transformer_engine as shims
shims.uninstall()
assert not [name for name in sys.modules if name.startswith("transformer_engine")]
assert "apex_te.jax.dense" in sys.modules
try:
    import transformer_engine.jax
except ModuleNotFoundError as error:
    print(error.name)
"""
    found = run(WITHOUT_TORCH + begin + body, *folders, **variables).strip()
    assert found.startswith("transformer_engine")
