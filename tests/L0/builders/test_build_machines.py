"""Libraries for other CPUs: for another architecture, and for CPUs with further features."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from programs import captured
from tiny_op import CHECKOUT, Tiny, quick_compiler, write_op

from op_builder.jit import platform
from op_builder.jit.backends import toolchain
from op_builder.jit.errors import CompilerNotFoundError, SettingError
from op_builder.jit.find import elf
from op_builder.jit.find.key import key_of
from op_builder.jit.prebuild import install
from op_builder.jit.prebuild.batch import Choice

sys.path.insert(0, str(CHECKOUT / "scripts"))
import wheel_platform

HERE = os.uname().machine
OTHER = {"x86_64": "aarch64"}.get(HERE, "x86_64")
FLAG = {"x86_64": ("-mavx512f", "avx512f"), "aarch64": ("-march=armv8-a+sve", "sve")}.get(HERE)


def test_key_names_the_architecture(tmp_path):
    op = Tiny(write_op(tmp_path))
    here = key_of(op, "cpu")
    with platform.compile_for(HERE):
        assert key_of(op, "cpu") == here
    with platform.compile_for(OTHER):
        assert platform.is_cross_compiling()
        assert key_of(op, "cpu") != here
        assert platform.soabi() == platform.suffix_on(platform.soabi()) != ""
        assert HERE not in platform.soabi()
    assert key_of(op, "cpu") == here
    assert HERE in platform.soabi() or "linux" not in platform.soabi()


def test_key_is_the_one_that_the_other_machine_asks_for(tmp_path, monkeypatch):
    op = Tiny(write_op(tmp_path))
    with platform.compile_for(OTHER):
        made = key_of(op, "cpu")
    uname = os.uname_result((*tuple(os.uname())[:4], OTHER))
    monkeypatch.setattr(os, "uname", lambda: uname)
    assert key_of(op, "cpu") == made


def test_compiler_for_another_machine(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    package = f"g++-{OTHER.replace('_', '-')}-linux-gnu"
    with platform.compile_for(OTHER):
        with pytest.raises(CompilerNotFoundError, match=re.escape(f"apt install {package})")):
            toolchain.find_cxx()
        compiler = tmp_path / f"{OTHER}-linux-gnu-g++"
        compiler.write_text("#!/bin/sh\n")
        compiler.chmod(0o755)
        assert toolchain.find_cxx() == [str(compiler)]


def test_library_of_this_machine_is_none_for_another(op_library):
    assert elf.file_problem(str(op_library)) == ""
    with platform.compile_for(OTHER):
        told = elf.file_problem(str(op_library))
    assert f"it is for another machine than {OTHER}" in told


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"APEX_BUILD_MACHINE": "riscv64"}, "APEX_BUILD_MACHINE must be one of x86_64, aarch64"),
        ({"APEX_BUILD_MACHINE": OTHER}, f"CUDA libraries for {OTHER} must be built on {OTHER}"),
    ],
)
def test_machine_that_cannot_be_served(variables, told, monkeypatch):
    for name, value in {**variables, "APEX_BUILD_CUDA_OPS": "1"}.items():
        monkeypatch.setenv(name, value)
    builders = {"tiny": type("T", (Tiny,), {"NAME": "tiny", "DEVICES": ("cpu", "cuda")})()}
    with pytest.raises(SettingError, match=told):
        install.check_install(builders)


@pytest.mark.parametrize("label", ["", "cpu", "cu13", "cu13.torch213"])
def test_version_label(label, monkeypatch):
    monkeypatch.setenv("APEX_BUILD_LABEL", label)
    assert install.version_label() == (f"+{label}" if label else "")


@pytest.mark.parametrize("label", ["CPU", "+cpu", "cpu-1", "c u"])
def test_version_label_that_is_none(label, monkeypatch):
    monkeypatch.setenv("APEX_BUILD_LABEL", label)
    with pytest.raises(SettingError, match="APEX_BUILD_LABEL must be lower-case letters"):
        install.version_label()


@pytest.mark.skipif(FLAG is None, reason="a machine that is neither x86-64 nor aarch64")
def test_compiler_tells_the_features_it_uses():
    flag, feature = FLAG  # type: ignore[misc]
    assert platform.compiled_for(["g++", "-O3"]) == []
    assert feature in platform.compiled_for(["g++", flag])
    assert platform.compiled_for(["/nonexistent/g++"]) == []


def test_features_that_this_machine_lacks(monkeypatch):
    monkeypatch.setattr(platform, "own_cpu_features", lambda: frozenset(("avx", "avx2")))
    assert platform.missing_features(["avx2", "avx512f", "amx"]) == ["amx", "avx512f"]
    assert platform.missing_features([]) == []
    monkeypatch.setattr(platform, "own_cpu_features", lambda: None)
    assert platform.missing_features(["avx512f"]) == []


@pytest.mark.parametrize("machine", [HERE, OTHER])
def test_library_for_better_cpus_is_not_loaded(machine, tmp_path, cache_dir, forget):
    """A manifest that asks for a feature of no CPU: the library is ignored, with one warning."""
    op = Tiny(write_op(tmp_path / "op"))
    op.open("cpu")
    (path,) = cache_dir.rglob("manifest.json")
    manifest = json.loads(path.read_text())
    assert manifest["cpu_features"] == []
    assert op.find("cpu") is not None
    path.write_text(json.dumps({**manifest, "cpu_features": ["quantum"], "machine": machine}))
    forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = op.find("cpu")
    assert (found is None) == (machine == HERE)
    told = [str(each.message) for each in caught]
    assert any("was compiled for CPUs with quantum" in text for text in told) == (machine == HERE)


def test_wheel_of_a_compiler_for_better_cpus_is_refused(tmp_path):
    """Some distributions' compilers use AVX without being asked: their wheels are for few CPUs."""
    if FLAG is None:
        pytest.skip("a machine that is neither x86-64 nor aarch64")
    compiler = tmp_path / "eager-g++"
    compiler.write_text(f'#!/bin/sh\nexec g++ {FLAG[0]} "$@"\n')
    compiler.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from tiny_op import Tiny, write_op\n"
        "from op_builder.jit.prebuild import install\n"
        "from op_builder.jit.prebuild.batch import Choice\n"
        "op = Tiny(write_op(Path(sys.argv[2])))\n"
        "install.into_package({'tiny': op}, [Choice('tiny', 'cpu', True)], sys.argv[2] + '/out')\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    variables = {**os.environ, "CXX": str(compiler)}
    done = captured(command, check=False, env=variables)
    assert f"must make code for every {HERE} CPU, got one that uses" in done.stderr
    assert FLAG[1] in done.stderr


@pytest.fixture(scope="module")
def op_library(tmp_path_factory):
    """A small shared library in C++ that needs symbols of libc and libstdc++."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "a.cpp").write_text(
        "#include <string>\n#include <cstdlib>\n#include <cmath>\n"
        'extern "C" double f(const char* x) { return std::exp(std::stod(std::string(x) + "1")); }\n'
    )
    command = ["g++", "-O1", "-shared", "-fPIC", "-o", "a.so", "a.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "a.so"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf to compare with")
def test_needs_are_those_that_readelf_prints(op_library):
    needs = wheel_platform.needs(op_library.read_bytes())
    command = ["readelf", "--wide", "--dynamic", "--version-info", str(op_library)]
    text = captured(command).stdout
    assert needs.machine == HERE
    assert needs.libraries == set(re.findall(r"Shared library: \[(.*?)\]", text))
    for family, version in needs.versions.items():
        found = re.findall(rf"Name: {family}_([\d.]+)", text)
        assert version == max(tuple(map(int, each.split("."))) for each in found)
    assert {"GLIBC", "GLIBCXX"} <= needs.versions.keys()


def test_platform_tag(op_library, monkeypatch):
    content = op_library.read_bytes()
    found = re.fullmatch(rf"manylinux_2_(\d+)_{HERE}", wheel_platform.tag({"a.so": content}))
    assert found
    assert int(found[1]) >= 17

    def tag(**changes):
        needs = wheel_platform.Needs("x86_64", frozenset(("libc.so.6",)), {"GLIBC": (2, 5)})
        monkeypatch.setattr(wheel_platform, "needs", lambda _: needs._replace(**changes))
        return wheel_platform.tag({"a.so": b""})

    assert tag() == "manylinux_2_17_x86_64"
    assert tag(versions={"GLIBC": (2, 33)}) == "manylinux_2_33_x86_64"
    assert tag(versions={"GLIBC": (2, 3, 4), "GLIBCXX": (3, 4, 29)}) == "manylinux_2_34_x86_64"
    assert tag(versions={"CXXABI": (1, 3, 15)}, machine="aarch64") == "manylinux_2_39_aarch64"
    with pytest.raises(ValueError, match="newer than those of known systems"):
        tag(versions={"GLIBCXX": (3, 4, 99)})
    with pytest.raises(ValueError, match=r"a\.so is linked with libcudart\.so\.13"):
        tag(libraries=frozenset(("libc.so.6", "libcudart.so.13")))


def test_platform_tag_of_what_is_no_library():
    with pytest.raises(ValueError, match="not a 64-bit ELF file"):
        wheel_platform.tag({"a.so": b"text"})
    with pytest.raises(ValueError, match="libraries must be for one machine, got \\[\\]"):
        wheel_platform.tag({})


def test_wheel_for_another_machine(tmp_path, monkeypatch):
    """The build is asked for in one variable, and its libraries lie under the other's keys."""
    monkeypatch.setenv("APEX_BUILD_MACHINE", OTHER)
    monkeypatch.setenv("CXX", str(quick_compiler(tmp_path)))
    monkeypatch.setattr("op_builder.jit.build.publish.file_problem", lambda path: "")
    op = Tiny(write_op(tmp_path / "op"))
    target = tmp_path / "prebuilt"
    report = install.into_package({"tiny": op}, [Choice("tiny", "cpu", True)], str(target))
    assert report.ok
    with platform.compile_for(OTHER):
        digits = key_of(op, "cpu")[:24]
    manifest = json.loads((target / f"tiny_cpu-{digits}" / "cpu" / "manifest.json").read_text())
    assert manifest["machine"] == OTHER
    (dispatcher,) = target.glob("apex_te_core-*/cpu/manifest.json")
    (extra,) = json.loads(dispatcher.read_text())["extras"]
    assert HERE not in extra
