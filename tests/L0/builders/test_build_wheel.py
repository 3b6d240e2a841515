"""Wheels and editable installs: what they hold, what fails them, and where they run."""

import json
import os
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from programs import captured

from op_builder import all_builders
from op_builder.core import CoreBuilder
from op_builder.jit.find import inventory


def run_hook(checkout, call, **variables):
    """A hook of the build backend, as pip calls it, without pip and without a network."""
    return captured(
        [sys.executable, "-B", "-c", f"import setuptools.build_meta as b; b.{call}"],
        check=False,
        cwd=checkout,
        env={**os.environ, **variables},
    )


def make_wheel(checkout, target, **variables):
    """A wheel and what making it printed."""
    target.mkdir()
    done = run_hook(checkout, f"build_wheel({str(target)!r})", **variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = target.glob("*.whl")
    return wheel, done.stdout


def cpu_library(op):
    """The variables that ask for one op's CPU library alone, whatever GPU and torch are there."""
    others = {b.BUILD_VAR: "0" for name, b in all_builders().items() if name != op}
    return {"APEX_BUILD_CPP_OPS": "1", **others}


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_wheel_holds_every_source(checkout, tmp_path):
    before = listing(checkout)
    wheel, output = make_wheel(checkout, tmp_path / "wheel")
    assert listing(checkout) == before
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "ahead of time" not in output
    names = set(zipfile.ZipFile(wheel).namelist())
    for part in ("csrc", "op_builder", "compatibility"):
        for path in (checkout / part).rglob("*"):
            if path.is_file():
                assert f"apex_te/{path.relative_to(checkout)}" in names
    for path in (checkout / "apex_te").rglob("*.py"):
        assert str(path.relative_to(checkout)) in names
    tops = {name.split("/")[0] for name in names}
    assert all(top == "apex_te" or top.endswith(".dist-info") for top in tops)
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]
    # the installed copy builds under the same key as the checkout
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    for name, builder in all_builders().items():
        installed = type(builder)(tmp_path / "site" / "apex_te")
        assert installed.key("cpu") == type(builder)(checkout).key("cpu"), name


def test_installation_asks_for_what_it_needs_alone(checkout):
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11 and later
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    assert set(project["dependencies"]) == {"torch", "ninja", "pybind11", "packaging"}
    for path in (checkout / "setup.py", *(checkout / "op_builder").rglob("*.py")):
        assert "distutils" not in path.read_text(), path


ARCH = {"APEX_TE_CUDA_ARCH_LIST": "9.0"}  # without a GPU nvcc needs it


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"APEX_BUILD_CPP_OPS": "maybe"}, "APEX_BUILD_CPP_OPS must be one of"),
        ({"APEX_BUILD_CPP_OPS": "1", "CXX": "/nowhere/g++"}, "no C++ compiler found"),
        *(
            pytest.param(variables, told, marks=pytest.mark.long)
            for variables, told in (
                ({"APEX_BUILD_SWIGLUU": "1"}, "did you mean APEX_BUILD_SWIGLU?"),
                (
                    {"APEX_BUILD_SWIGLU": "1", "APEX_BUILD_PYTHONS": "3.77", **ARCH},
                    "names Python 3.77, which",
                ),
                (
                    {"APEX_BUILD_CUDA_OPS": "1", "APEX_TE_CUDA_ARCH_LIST": "9.x"},
                    "unknown CUDA arch '9.x'",
                ),
                (
                    {"APEX_BUILD_SWIGLU": "1", "CXX": "g++ -march=native", **ARCH},
                    "for this machine's CPU alone",
                ),
            )
        ),
    ],
)
def test_failing_request_fails_the_installation(variables, told, checkout, tmp_path):
    before = listing(checkout)
    done = run_hook(checkout, f"build_wheel({str(tmp_path)!r})", **variables)
    assert done.returncode != 0
    assert told in done.stdout + done.stderr
    assert "Traceback" not in done.stderr.splitlines()[-1]
    assert list(tmp_path.glob("*.whl")) == []
    assert listing(checkout) == before


def test_option_of_apex_fails_the_installation(checkout, tmp_path):
    settings = {"--build-option": ["--cuda_ext"]}
    done = run_hook(checkout, f"build_wheel({str(tmp_path)!r}, {settings})")
    assert done.returncode != 0
    assert "--cuda_ext is apex's option; set APEX_BUILD_CUDA_OPS=1 instead" in done.stderr


def libraries(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    return sorted(Path(name).name for name in names)


@pytest.mark.long  # of one op: test_apex_readme
def test_wheel_of_a_group(checkout, tmp_path, fake_compiler):
    others = {"APEX_BUILD_CPP_OPS": "1", "APEX_BUILD_ROPE": "0", "CXX": fake_compiler}
    wheel, output = make_wheel(checkout, tmp_path / "wheel", **others)
    ops = [name for name, builder in all_builders().items() if "cpu" in builder.DEVICES]
    names = [f"{name}_cpu.so" for name in ops if name != "rope"]
    assert libraries(wheel) == sorted([*names, "apex_te_core.so", "apex_te_jax_cpu.so"])
    table = output[output.index("libraries built ahead of time") :].splitlines()
    assert table[1].split() == ["op", "device", "archs", "state", "seconds", "size"]
    assert table[3].split()[:4] == ["apex_te_jax", "cpu", "-", "built"]
    assert table[4].split()[:4] == ["activation", "cpu", "-", "built"]
    assert "skipped (cpu): rope: APEX_BUILD_ROPE=0" in table
    assert any("APEX_BUILD_CPP_OPS asks for CPU libraries" in line for line in table)
    assert any(line.startswith(f"{len(names) + 2} built, 0 present") for line in table)


@pytest.mark.long
def test_wheel_for_several_pythons(checkout, tmp_path, fake_compiler):
    """The named ones are found by version or path; one library per op serves them all."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    other = tmp_path / "base" / "python3.29"
    headers = tmp_path / "base" / "include"
    headers.mkdir(parents=True)
    (headers / "Python.h").touch()
    suffix = sysconfig.get_config_var("EXT_SUFFIX").replace(own.replace(".", ""), "329")
    answer = ["cpython", 3, 29, suffix, str(headers), sysconfig.get_platform()]
    other.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    other.chmod(0o755)
    wheel, output = make_wheel(
        checkout,
        tmp_path / "wheel",
        **cpu_library("amax_scale_update"),
        APEX_BUILD_PYTHONS=f"{own}; {other}",
        CXX=fake_compiler,
    )
    dispatcher, handlers = "apex_te_core.so", "apex_te_jax_cpu.so"
    assert libraries(wheel) == ["amax_scale_update_cpu.so", dispatcher, dispatcher, handlers]
    assert f"dispatcher {own} " in output
    assert "dispatcher 3.29 " in output
    assert f"-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl" in wheel.name
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    root = tmp_path / "site" / "apex_te"
    for path in (root, *root.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o022)
    assert CoreBuilder(root).find() is not None
    assert inventory.prebuilt_for(CoreBuilder(root)) == [own, "3.29"]


USE = """
import sys, torch, apex_te
from apex_te.ops.amax_scale_update import amax_scale_update
from apex_te.op_builder import get_builder
print(apex_te.__file__)
print(get_builder("amax_scale_update").find("cpu").kind, get_builder("apex_te_core").find().kind)
linear = apex_te.Linear(8, 4)
print(tuple(linear(torch.ones(2, 8)).shape))
"""


@pytest.mark.long
def test_prebuilt_wheel_runs_without_compiling(checkout, tmp_path):
    """Other folder, no program on PATH, no writable home, compiling forbidden."""
    wheel, _ = make_wheel(checkout, tmp_path / "wheel", **cpu_library("amax_scale_update"))
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    for path in (site, *site.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    environment = {"PYTHONPATH": str(site), "PATH": "", "HOME": "/proc/1"}
    done = captured(
        [sys.executable, "-B", "-c", USE],
        check=False,
        cwd="/",
        env={**environment, "APEX_TE_DISABLE_JIT": "1"},
    )
    for path in (site, *site.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
    assert done.stdout == f"{site}/apex_te/__init__.py\nprebuilt prebuilt\n(2, 4)\n", done.stderr
    assert done.stderr == ""


FIND = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import op_builder
found = op_builder.get_builder("rope").find("cpu")
print(found and found.kind)
"""


@pytest.mark.long
def test_package_is_trusted_as_its_code_is(checkout, tmp_path, fake_compiler):
    """pip installs with the user's umask: 002 makes modules and libraries the group's to write."""
    variables = {**cpu_library("rope"), "CXX": fake_compiler}
    wheel, _ = make_wheel(checkout, tmp_path / "wheel", **variables)
    package = tmp_path / "site" / "apex_te"
    zipfile.ZipFile(wheel).extractall(package.parent)
    code = [package / "op_builder", *(package / "op_builder").rglob("*")]
    libraries = [package / "prebuilt", *(package / "prebuilt").rglob("*")]

    def found(code_may, libraries_may):
        for paths, mode in ((code, code_may), (libraries, libraries_may)):
            for path in paths:
                path.chmod(mode | (mode >> 2 & 0o111) if path.is_dir() else mode)
        command = [sys.executable, "-B", "-S", "-c", FIND, str(package)]
        return captured(command).stdout.strip()

    assert found(0o644, 0o644) == "prebuilt"
    assert found(0o664, 0o664) == "prebuilt"
    assert found(0o664, 0o644) == "prebuilt"
    assert found(0o644, 0o664) == "None"
    assert found(0o666, 0o666) == "None"
    shutil.move(package / "prebuilt", tmp_path / "elsewhere")
    (package / "prebuilt").symlink_to(tmp_path / "elsewhere")
    assert found(0o644, 0o644) == "None"


@pytest.mark.long
def test_next_installation_packs_what_the_sources_are_now(checkout, tmp_path):
    """Nothing is kept in the checkout that a later installation could pack instead."""
    header = checkout / "csrc/common/left_over.h"
    header.write_text("// soon gone\n")
    try:
        wheel, _ = make_wheel(checkout, tmp_path / "first")
    finally:
        header.unlink()
    name = "apex_te/csrc/common/left_over.h"
    assert name in zipfile.ZipFile(wheel).namelist()
    wheel, _ = make_wheel(checkout, tmp_path / "second")
    assert name not in zipfile.ZipFile(wheel).namelist()


@pytest.mark.long
def test_editable_install_fills_the_cache(checkout, tmp_path, cache_dir, fake_compiler):
    before = listing(checkout)
    variables = {**cpu_library("rope"), "CXX": fake_compiler}
    done = run_hook(checkout, f"build_editable({str(tmp_path)!r})", **variables)
    assert done.returncode == 0, done.stderr[-2000:]
    assert listing(checkout) == before
    assert sorted(path.name for path in cache_dir.rglob("*.so")) == [
        "apex_te_core.so",
        "rope_cpu.so",
    ]
    again = run_hook(checkout, f"build_editable({str(tmp_path)!r})", **variables)
    assert "0 built, 2 present" in again.stdout
