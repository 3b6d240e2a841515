"""Each file of a release is installed in an environment that has torch alone, and used."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from empty_environment import EmptyEnvironment

from apex_te import __version__

CHECKOUT = Path(__file__).resolve().parents[3]
# What the wheels ask for beside torch, and need when they compile something.
DEPENDENCIES = ["torch", "ninja", "pybind11", "packaging", "numpy"]
SECONDS = 20.0

# A linear layer's first FP8 step, then a whole Transformer layer in two recipes, and which caches
# served the libraries.
STEP = """
import json, sys, torch, apex_te
from apex_te import recipe
from apex_te.op_builder import all_builders, get_builder
torch.manual_seed(0)
linear = apex_te.Linear(64, 32)
with apex_te.fp8_autocast(fp8_recipe=recipe.DelayedScaling()):
    loss = linear(torch.randn(16, 64)).square().mean()
loss.backward()
assert torch.isfinite(linear.weight.grad).all() and linear.weight.grad.abs().sum() > 0
losses = [loss.item()]
if {whole}:
    layer = apex_te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0)
    for chosen in (recipe.DelayedScaling(), recipe.Float8CurrentScaling()):
        with apex_te.fp8_autocast(fp8_recipe=chosen):
            loss = layer(torch.randn(16, 2, 64)).square().mean()
        loss.backward()
        losses.append(loss.item())
kinds = {{name: builder.find("cpu").kind for name, builder in all_builders().items()
         if "cpu" in builder.built_devices()}} if {whole} else {{}}
kinds["apex_te_core"] = get_builder("apex_te_core").find("cpu").kind
print(json.dumps([losses, kinds, apex_te.__file__, apex_te.__version__]))
"""


def only(dist, pattern):
    found = sorted(dist.glob(pattern))
    assert len(found) == 1, f"{pattern}: {[path.name for path in found]} in {dist}"
    return found[0]


def wheel(dist, label):
    """The wheel with this label for this machine; that with CUDA libraries takes long to make."""
    pattern = f"apex_te-{__version__}+{label}-*_{os.uname().machine}.whl"
    if label != "cpu" and not list(dist.glob(pattern)):
        pytest.skip(f"{pattern} was not made")
    return only(dist, pattern)


def cpu_wheel(dist):
    return wheel(dist, "cpu")


@pytest.fixture
def locked_home(tmp_path):
    """A home in which nobody can write: it is a file."""
    home = tmp_path / "home"
    home.write_text("")
    return home


def test_cpu_wheel_takes_its_first_step_without_a_compiler(dist, tmp_path, locked_home):
    took = []
    for attempt in range(3):  # other work on the machine can only add to the time
        environment = EmptyEnvironment(tmp_path / f"venv{attempt}", DEPENDENCIES)
        start = time.perf_counter()
        environment.install(cpu_wheel(dist))
        installed = time.perf_counter()
        done = environment.run(STEP.format(whole=False), HOME=str(locked_home))
        took.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        print(f"installed in {installed - start:.1f} s, first step after {took[-1]:.1f} s")
        if took[-1] <= SECONDS:
            return
    pytest.fail(f"the first step came after {took} s, not within {SECONDS}")


@pytest.mark.parametrize("label", ["cpu", "cu13"])
def test_wheel_has_every_library_of_the_cpu(dist, tmp_path, locked_home, label):
    environment = EmptyEnvironment(tmp_path / "venv", DEPENDENCIES)
    environment.install(wheel(dist, label))
    done = environment.run(STEP.format(whole=True), HOME=str(locked_home))
    assert done.returncode == 0, done.stderr
    losses, kinds, origin, version = json.loads(done.stdout)
    assert len(losses) == 3
    assert all(loss == loss and 0 < loss < 100 for loss in losses)
    assert len(kinds) > 20
    assert set(kinds.values()) == {"prebuilt"}
    assert origin == f"{environment.site}/apex_te/__init__.py"
    assert version == __version__


def test_pure_wheel_compiles_what_it_needs(dist, tmp_path):
    """With the compiler on PATH, into a cache of its own; without one it says what is missing."""
    environment = EmptyEnvironment(tmp_path / "venv", DEPENDENCIES)
    environment.install(only(dist, f"apex_te-{__version__}-py3-none-any.whl"))
    cache = tmp_path / "cache"
    done = environment.run(STEP.format(whole=False), APEX_TE_CACHE_DIR=str(cache))
    assert done.returncode != 0
    assert "CompilerNotFoundError: no C++ compiler found" in done.stderr
    path = os.environ["PATH"]
    done = environment.run(STEP.format(whole=False), APEX_TE_CACHE_DIR=str(cache), PATH=path)
    assert done.returncode == 0, done.stderr
    assert '{"apex_te_core": "cache"}' in done.stdout
    assert next(cache.rglob("cast_transpose_cpu.so"), None)


def test_sdist_makes_the_same_pure_wheel(dist, tmp_path):
    with tarfile.open(only(dist, f"apex_te-{__version__}.tar.gz")) as archive:
        archive.extractall(tmp_path)
    (sources,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for name in ("CHANGELOG.md", "SECURITY.md", "CITATION.cff", "LICENSE", "tests/conftest.py"):
        assert (sources / name).is_file(), name
    code = f"import setuptools.build_meta as b; b.build_wheel({str(tmp_path)!r})"
    variables = {k: v for k, v in os.environ.items() if not k.startswith("APEX_BUILD_")}
    command = [sys.executable, "-B", "-c", code]
    subprocess.run(command, cwd=sources, env=variables, check=True, capture_output=True)
    name = f"apex_te-{__version__}-py3-none-any.whl"
    again, released = zipfile.ZipFile(tmp_path / name), zipfile.ZipFile(only(dist, name))
    assert again.namelist() == released.namelist()
    for each in again.namelist():
        assert again.read(each) == released.read(each), each


def test_wheels_state_what_they_run_on(dist):
    """A tag for the machine and its oldest C library, and only libraries of the system."""
    machine = os.uname().machine
    name = cpu_wheel(dist).name
    found = re.fullmatch(rf"apex_te-.*-py3-none-manylinux_2_(\d+)_{machine}\.whl", name)
    assert found, name
    libc, version = os.confstr("CS_GNU_LIBC_VERSION").split()  # type: ignore[union-attr]
    assert libc == "glibc"
    assert int(found[1]) <= int(version.split(".")[1])
    archive = zipfile.ZipFile(cpu_wheel(dist))
    (metadata_file,) = (x for x in archive.namelist() if x.endswith(".dist-info/WHEEL"))
    assert f"Tag: py3-none-manylinux_2_{found[1]}_{machine}" in archive.read(metadata_file).decode()
    suffixes = {
        line
        for x in archive.namelist()
        if "apex_te_core-" in x and x.endswith("manifest.json")
        for line in re.findall(r"\.cpython-[^\"]*", archive.read(x).decode())
    }
    assert sysconfig.get_config_var("EXT_SUFFIX") in suffixes


def test_checksums(dist):
    if not (dist / "SHA256SUMS").exists() or shutil.which("sha256sum") is None:
        pytest.skip("a folder without SHA256SUMS, or no sha256sum")
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=dist, check=True)


def test_wheel_for_the_other_architecture(dist):
    """A cross-compiled wheel has libraries and keys for the other architecture alone."""
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[os.uname().machine]
    found = sorted(dist.glob(f"apex_te-*_{other}.whl"))
    if not found:
        pytest.skip(f"no {other} wheel in {dist}: no {other}-linux-gnu-g++ where it was made")
    number = {"x86_64": 62, "aarch64": 183}[other]
    archive = zipfile.ZipFile(found[0])
    libraries = [name for name in archive.namelist() if name.endswith(".so")]
    own = [n for n in zipfile.ZipFile(cpu_wheel(dist)).namelist() if n.endswith(".so")]
    assert len(libraries) == len(own) > 20
    assert not set(libraries) & set(own)  # the key in a library's folder tells machines apart
    for name in libraries:
        assert int.from_bytes(archive.read(name)[18:20], "little") == number, name
