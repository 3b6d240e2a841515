"""``make clean``, ``make distclean`` and ``pip uninstall``: nothing that was made is left."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from planted import contents, copy, plant
from programs import captured
from tiny_op import CHECKOUT, quick_compiler

import op_builder


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_clean_and_distclean(tmp_path, cache_dir, root):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("apex_te", "op_builder", "compatibility", "csrc", "Makefile", "README.md"):
        copy(CHECKOUT / name, checkout / name)
    before = contents(checkout)
    left = ["build/x", "dist/y.whl", "apex_te.egg-info/PKG-INFO", ".ruff_cache/x", ".mypy_cache/x"]
    left += [".pytest_cache/x", ".hypothesis/x", "op_builder/__pycache__/x.pyc", "csrc/rope/x.o"]
    left += ["apex_te/ops/x.so", "apex_te/prebuilt/manifest.json", "prebuilt/manifest.json"]
    left += ["compile_commands.json"]
    for name in left:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    (checkout / ".venv" / "lib").mkdir(parents=True)
    (checkout / ".venv" / "lib" / "torch.so").write_text("")
    plant(cache_dir, op_builder.get_builder("rope"))
    environment = {**os.environ, "PATH": os.environ["PATH"], "PYTHONPATH": ""}
    command = ["make", "-C", str(checkout), f"PYTHON={sys.executable}"]
    done = captured([*command, "clean"], env=environment)
    assert "removed    rope_cpu" in done.stdout
    assert contents(checkout) == sorted([*before, ".venv", ".venv/lib", ".venv/lib/torch.so"])
    assert contents(cache_dir) == ["locks", "tmp"]
    done = captured([*command, "distclean"], env=environment)
    assert contents(checkout) == before


@pytest.mark.long
def test_pip_uninstall_leaves_nothing(tmp_path, cache_dir):
    """A prebuilt wheel, installed, imported and uninstalled: site-packages is as it was."""
    pip_package = importlib.util.find_spec("pip")
    if pip_package is None or pip_package.origin is None:
        pytest.skip("needs pip")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("apex_te", "op_builder", "compatibility", "csrc", "setup.py", "pyproject.toml"):
        copy(CHECKOUT / name, checkout / name)
    for name in ("MANIFEST.in", "LICENSE", "README.md"):
        copy(CHECKOUT / name, checkout / name)
    compiler = quick_compiler(tmp_path)  # what is compiled is not the matter here
    code = f"import setuptools.build_meta as b; b.build_wheel({str(tmp_path)!r})"
    environment = {**os.environ, "APEX_BUILD_CPP_OPS": "1", "CXX": str(compiler), "PYTHONPATH": ""}
    captured([sys.executable, "-B", "-c", code], cwd=checkout, env=environment)
    (wheel,) = tmp_path.glob("*.whl")
    venv = tmp_path / "venv"
    subprocess.run(
        [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(venv)],
        check=True,
    )
    (site,) = venv.glob("lib/python*/site-packages")
    before = contents(site)
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    environment = {**os.environ, "PYTHONPATH": str(Path(pip_package.origin).parents[1])}
    environment["PYTHONDONTWRITEBYTECODE"] = ""

    def call(*command):
        done = captured(command, env=environment, cwd=tmp_path)
        return done.stdout

    call(*pip, "install", "--no-index", "--no-deps", "--force-reinstall", str(wheel))
    libraries = list(site.rglob("*.so"))
    assert {path.name for path in libraries} >= {"rope_cpu.so", "apex_te_core.so"}
    code = (
        "import sys, apex_te; assert sys.argv[1] in apex_te.__file__, apex_te.__file__;"
        "from apex_te.op_builder.jit import cli; sys.exit(cli.main(['report', '--json']))"
    )
    facts = json.loads(call(python, "-c", code, str(site)))
    prebuilt = {row["op"] for row in facts["libraries"] if row["state"] == "prebuilt"}
    builders = op_builder.all_builders()
    built = [name for name, builder in builders.items() if "cpu" in builder.DEVICES]
    assert prebuilt == {"apex_te_core", "apex_te_jax", *built}
    assert list(site.rglob("apex_te/**/*.pyc"))
    # pip alone: the folder that it lies in may hold another installation of apex_te
    only_pip = tmp_path / "only_pip"
    only_pip.mkdir()
    (only_pip / "pip").symlink_to(Path(pip_package.origin).parent)
    environment["PYTHONPATH"] = str(only_pip)
    call(*pip, "uninstall", "-y", "apex_te")
    assert contents(site) == before
