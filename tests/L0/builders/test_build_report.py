"""``report``, ``why`` and ``list``: what they say, and that they need and change nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from planted import contents, plant, too_long
from programs import captured
from tiny_op import CHECKOUT, Tiny, TinyCuda, write_op

import op_builder
from op_builder.jit import cli
from op_builder.jit.backends import archs, toolchain
from op_builder.jit.build import failure
from op_builder.jit.errors import CompileError, UnknownOpError
from op_builder.jit.find import cache
from op_builder.jit.inspect import facts as report
from op_builder.jit.inspect import machine, report_command, why_command
from op_builder.jit.platform import installed_torch
from op_builder.jit.text import size


def run(*arguments, **environment):
    """The command line in a process that knows no installed package: no torch, no pybind11."""
    return captured(
        [sys.executable, "-S", "-B", "-m", "op_builder.jit.cli", *arguments],
        check=False,
        cwd=CHECKOUT,
        env={**os.environ, **environment},
    )


def state(builder, device="cpu"):
    return report.library_facts(builder, device, report.here())


# Nothing is needed --------------------------------------------------------------------------------


def test_report_needs_nothing_and_changes_nothing(tmp_path):
    home = tmp_path / "home"
    nowhere = {"HOME": str(home), "PATH": "", "APEX_TE_CACHE_DIR": "", "LD_LIBRARY_PATH": ""}
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        nowhere[name] = ""
    done = run("report", "--json", **nowhere)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    rows = {(row["op"], row["device"]): row for row in facts["libraries"]}
    builders = op_builder.all_builders()
    wanted = {(name, "cpu") for name, builder in builders.items() if "cpu" in builder.DEVICES}
    wanted.add(("apex_te_core", "cpu"))
    assert wanted <= set(rows)
    for op, device in wanted:
        row = rows[op, device]
        assert row["state"] == "cannot"
        assert "no C++ compiler found" in row["reason"]
        assert row["key"] == op_builder.get_builder(op).key(device)
    assert facts["torch"]["version"] is None
    assert {tool["name"]: tool["missing"] for tool in facts["tools"]}["pybind11"]
    (user,) = [place for place in facts["caches"] if place["kind"] == "cache"]
    assert (user["path"], user["exists"]) == (f"{home}/.cache/apex_te", False)
    assert not home.exists()


@pytest.mark.long
def test_report_text_without_anything(tmp_path):
    home = tmp_path / "home"
    done = run("report", HOME=str(home), PATH="", APEX_TE_CACHE_DIR="", CXX="")
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("missing: no C++ compiler", "torch      not installed", "rms_norm", "cannot"):
        assert part in done.stdout
    assert not home.exists()


@pytest.mark.long
def test_report_of_the_package_fits_80_columns(cache_dir):
    short = {"APEX_TE_CACHE_DIR": "/nonexistent/apex"}
    done = captured(
        [sys.executable, "-B", "-m", "apex_te", "report"],
        check=False,
        cwd=CHECKOUT,
        env={**os.environ, **short},
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert too_long(lines) == []
    assert any(re.match(r"rms_norm +cpu ", line) for line in lines)


# A library's state --------------------------------------------------------------------------------


def test_states_in_the_order_of_a_life(root, gpus, cache_dir, forget):
    builder = Tiny(root)
    row = state(builder)
    assert (row["state"], row["key"], row["path"]) == ("can build", builder.key("cpu"), "")
    assert contents(cache_dir) == []
    opened = builder.open()
    row = state(builder)
    assert (row["state"], row["path"]) == ("cached", opened.path)
    assert row["size"] == os.path.getsize(opened.path)
    assert row["seconds"] > 0
    assert abs(row["built"] - time.time()) < 60
    assert row["compiler"] == toolchain.cxx_version()
    shutil.copytree(cache_dir, root / "prebuilt")
    os.chmod(root / "prebuilt", 0o755)
    assert state(builder)["state"] == "prebuilt"


def test_a_build_that_just_failed(root, gpus, forget, monkeypatch):
    write_op(root, body="return no_such_name;")
    with pytest.raises(CompileError):
        Tiny(root).open()
    row = state(Tiny(root))
    assert row["state"] == "failed"
    assert "no_such_name" in row["reason"]
    (step,) = (why_command._next(Tiny(root), "cpu", report.here()),)
    assert step["raises"]
    monkeypatch.setenv("APEX_TE_JIT_RETRY", "1")
    assert state(Tiny(root))["state"] == "can build"
    monkeypatch.delenv("APEX_TE_JIT_RETRY")
    monkeypatch.setattr(failure, "KEPT_SECONDS", -1.0)
    assert state(Tiny(root))["state"] == "can build"


def test_what_is_missing_is_what_a_build_would_raise(root, gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", "1")
    assert "APEX_TE_DISABLE_JIT forbids" in state(Tiny(root))["reason"]
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", "perhaps")
    assert "must be one of 1/0" in state(Tiny(root))["reason"]
    monkeypatch.delenv("APEX_TE_DISABLE_JIT")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(op_builder.BuildError) as caught:
        Tiny(root).open()
    assert state(Tiny(root))["reason"] == str(caught.value)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(toolchain, "find_ninja", lambda: (_ for _ in ()).throw(UnknownOpError("x")))
    assert state(Tiny(root))["state"] == "cannot"


def test_gpus_and_archs(root, gpus, cache_dir, monkeypatch):
    monkeypatch.setattr(report.library, "check", lambda *ignored: None)
    monkeypatch.setattr(report, "recent_failure", lambda *ignored: None)
    builder = TinyCuda(root)
    assert "no GPU is visible" in state(builder, "cuda")["reason"]
    gpus((8, 9))
    assert (state(builder, "cuda")["state"], state(builder, "cuda")["archs"]) == (
        "can build",
        ["8.9"],
    )
    plant(cache_dir, builder, "cuda", "8.0")
    assert (state(builder, "cuda")["state"], state(builder, "cuda")["archs"]) == ("cached", ["8.0"])
    gpus((8, 9), (9, 0))
    row = state(builder, "cuda")
    assert (row["state"], row["archs"], row["seconds"]) == ("can build", ["8.9", "9.0"], 1.5)
    monkeypatch.setenv("APEX_TE_CUDA_ARCH_LIST", "9.0+PTX")
    gpus()
    assert state(builder, "cuda")["archs"] == ["9.0+PTX"]
    monkeypatch.setenv("APEX_TE_CUDA_ARCH_LIST", "nine")
    assert "unknown CUDA arch 'nine'" in state(builder, "cuda")["reason"]


# The rest of the report ---------------------------------------------------------------------------


def test_cache_folders(root, gpus, cache_dir, tmp_path, monkeypatch):
    extra = tmp_path / "extra"
    extra.mkdir()
    extra.chmod(0o777)
    monkeypatch.setenv("APEX_TE_CACHE_PATH", str(extra))
    entry = plant(cache_dir, Tiny(root))
    (cache_dir / "locks").mkdir()
    package, user, shared = (
        report.cache_folder(place) for place in report.cache.locations(str(root / "prebuilt"))
    )
    assert (package["kind"], package["exists"], package["problem"]) == ("prebuilt", False, "")
    assert (user["from"], user["mode"], user["entries"]) == ("APEX_TE_CACHE_DIR", "0700", 1)
    assert user["bytes"] == sum(path.stat().st_size for path in entry.iterdir())
    assert user["writable"]
    assert user["free"] > 0
    assert (shared["from"], shared["mode"]) == ("APEX_TE_CACHE_PATH", "0777")
    assert "must not be writable by group or others" in shared["problem"]
    facts = report.collect([])
    assert report_command.setting_problems(facts) == []
    cache_dir.chmod(0o755)
    facts = report.collect([])
    (problem,) = report_command.setting_problems(facts)
    assert problem.startswith(f"APEX_TE_CACHE_DIR={cache_dir}: ")
    assert "chmod 700" in "\n".join(report_command.lines(facts)).replace("\n           ", " ")


def test_unwritable_folders_are_seen(tmp_path):
    assert cache.is_writable(str(tmp_path / "not" / "there"))
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").write_text("")
    assert not cache.is_writable(str(tmp_path / "file" / "inside"))
    (tmp_path / "read-only").mkdir(mode=0o500)
    said = cache.is_writable(str(tmp_path / "read-only" / "inside"))
    try:  # root may, unless it lacks a capability
        (tmp_path / "read-only" / "inside").mkdir()
    except PermissionError:
        assert not said
    else:
        assert said


def test_settings_that_cannot_be_are_named(gpus, monkeypatch, capsys):
    monkeypatch.setenv("APEX_TE_JIT_VERBOSE", "perhaps")
    monkeypatch.setenv("APEX_TE_CASH_DIR", "/x")
    monkeypatch.setenv("MAX_JOBS", "0")
    problems = {item["name"]: item["problem"] for item in machine.settings()}
    assert problems["APEX_TE_CASH_DIR"] == "nothing reads it"
    assert "must be one of 1/0" in problems["APEX_TE_JIT_VERBOSE"]
    assert "MAX_JOBS must be an integer >= 1" in problems["MAX_JOBS"]
    assert problems["APEX_TE_CACHE_DIR"] == ""
    assert cli.main(["report", "--json"]) == 1
    for name in ("APEX_TE_JIT_VERBOSE", "MAX_JOBS"):
        monkeypatch.delenv(name)
    assert cli.main(["report", "--json"]) == 0


def test_every_variable_that_is_read_is_known():
    read, everything = set(), ""
    for folder in ("apex_te", "op_builder", "compatibility", "csrc", "benchmarks"):
        for path in (CHECKOUT / folder).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp", ".cu"):
                text = path.read_text(encoding="utf-8")
                asked = (
                    r'getenv\("(APEX_TE_[A-Z_]+)"' if folder == "csrc" else r'"(APEX_TE_[A-Z_]+)"'
                )
                found = re.findall(asked, text)
                if path.name not in ("machine.py", "hipify.py"):  # the latter names macros
                    read.update(found)
                    everything += text
    assert "APEX_TE_CPU_ISA" in read
    assert "APEX_TE_CACHE_DIR" in read
    assert read <= set(machine._READ)
    ours = [name for name in machine._READ if name.startswith("APEX_TE_")]
    # and nothing is known that nobody reads any more
    assert [name for name in ours if f'"{name}"' not in everything] == []


DRIVER = """
#include <cstring>
extern "C" {
int cuDriverGetVersion(int* v) { *v = 12040; return 0; }
int cuInit(unsigned) { return FAIL; }
int cuGetErrorName(int, const char** n) { *n = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; return 0; }
int cuDeviceGetCount(int* n) { *n = 2; return 0; }
int cuDeviceGetName(char* n, int, int) { strcpy(n, "NVIDIA Test"); return 0; }
int cuDeviceTotalMem_v2(size_t* n, int) { *n = 80000000000; return 0; }
int cuDeviceGetAttribute(int* v, int which, int) { *v = which == 75 ? 9 : 0; return 0; }
int nvmlInit_v2() { return 0; }
int nvmlSystemGetDriverVersion(char* n, int) { strcpy(n, "550.54.15"); return 0; }
}
"""


@pytest.mark.parametrize("code", [0, 803])
def test_driver_is_asked_without_a_context(code, tmp_path, monkeypatch):
    source = tmp_path / "driver.cpp"
    source.write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    command = ["g++", "-shared", "-fPIC", f"-DFAIL={code}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    shutil.copy(library, tmp_path / "libnvidia-ml.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    facts = machine.gpus([])
    assert (facts["driver"], facts["cuda"]) == ("550.54.15", "12.4")
    if code:
        assert facts["devices"] == []
        assert facts["problem"] == "the driver answers CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
    else:
        device = {"name": "NVIDIA Test", "memory": 80000000000, "arch": "9.0"}
        assert facts["devices"] == [device, device]
        assert archs.visible_capabilities() == [(9, 0)]


def test_torch_is_read_off_its_files():
    torch = pytest.importorskip("torch")
    found = installed_torch()
    assert found.version == torch.__version__
    assert (found.cuda, found.hip) == (torch.version.cuda, torch.version.hip)


def test_tools_say_where_they_come_from(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    (cxx,) = [tool for tool in machine.tools() if tool["name"] == "C++"]
    assert cxx["path"] == " ".join(toolchain.find_cxx())
    assert (cxx["version"], cxx["origin"]) == (toolchain.cxx_version(), "PATH")
    monkeypatch.setenv("CXX", "g++ -m64")
    (cxx,) = [tool for tool in machine.tools() if tool["name"] == "C++"]
    assert cxx["path"].endswith("g++ -m64")
    assert cxx["origin"] == "CXX"
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text('#!/bin/sh\necho "Cuda compilation tools, release 12.8, V12.8.93"\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    (found,) = [tool for tool in machine.tools() if tool["name"] == "nvcc"]
    assert (found["path"], found["version"]) == (os.path.realpath(nvcc), "12.8.93")
    assert found["origin"] == "CUDA_HOME"
    monkeypatch.setenv("APEX_TE_CUDA_HOME", str(tmp_path))
    (found,) = [tool for tool in machine.tools() if tool["name"] == "nvcc"]
    assert "holds no bin/nvcc" in found["missing"]


def test_text_of_a_large_machine(gpus, root, cache_dir):
    facts = report.collect([])
    device = {"name": "NVIDIA H200", "memory": 150_000_000_000, "arch": "9.0"}
    facts["gpus"] = {"driver": "580.1", "cuda": "13.0", "problem": "", "devices": [device] * 8}
    facts["archs"].update(archs=["9.0"], problem="", **{"from": "the visible GPUs"})
    row = facts["libraries"][0]
    row.update(
        archs=["8.0", "8.6", "8.9", "9.0a", "10.0a", "12.0+PTX"], size=123_456_789, seconds=1234.5
    )
    row.update(op="an_op_with_a_name_that_is_longer_than_others", state="cached", path="/x/y.so")
    lines = list(report_command.lines(facts, paths=True))
    assert any("8 x NVIDIA H200, arch 9.0, 150 GB" in line for line in lines)
    assert "  /x/y.so" in lines
    assert too_long(lines) == []


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9949, "9.9 kB"),
        (99_500, "100 kB"),
        (999_600, "1.0 MB"),
        (1_250_000_000, "1.2 GB"),
        (5e12, "5000 GB"),
    ],
)
def test_sizes_are_short(number, text):
    assert size(number) == text
