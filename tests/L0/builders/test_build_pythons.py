"""Pythons that a wheel has a dispatcher for: finding them, and one that it has none for."""

import json
import sys
import sysconfig

import pytest

from op_builder.core import CoreBuilder
from op_builder.jit.backends import pythons
from op_builder.jit.errors import (
    HeaderNotFoundError,
    JitDisabledError,
    PythonNotFoundError,
    SettingError,
)
from op_builder.jit.prebuild import batch


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("3.77", PythonNotFoundError, r"Python 3\.77, which was not found: .*no /usr/include/pyth"),
        ("3.9", SettingError, "apex_te needs Python 3.10 or later, got 3.9"),
        ("3.11 3.12", PythonNotFoundError, "neither a version such as 3.12 nor a program"),
        ("/nowhere/python", PythonNotFoundError, "'/nowhere/python', which is neither"),
        ("/bin/sh", PythonNotFoundError, "/bin/sh does not run as a Python"),
    ],
)
def test_missing_python_is_named(text, error, told, monkeypatch):
    monkeypatch.setenv(pythons.VARIABLE, text)
    with pytest.raises(error, match=told):
        pythons.named()


def test_python_must_fit(tmp_path, monkeypatch):
    def answer(*values):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\necho '{json.dumps(values)}'\n")
        path.chmod(0o755)
        return str(path)

    platform = sysconfig.get_platform()
    suffix = ".cpython-313t-x86_64-linux-gnu.so"
    with pytest.raises(PythonNotFoundError, match=r"CPython 3.10 or later, is pypy 3.11"):
        pythons.find(answer("pypy", 3, 11, suffix, "/x", platform))
    with pytest.raises(PythonNotFoundError, match=r"or later, is cpython 3.9"):
        pythons.find(answer("cpython", 3, 9, suffix, "/x", platform))
    with pytest.raises(PythonNotFoundError, match=r"must be a Python for .*, is for linux-s390x"):
        pythons.find(answer("cpython", 3, 13, suffix, "/x", "linux-s390x"))
    with pytest.raises(HeaderNotFoundError, match=r"Python\.h is not in /x"):
        pythons.find(answer("cpython", 3, 13, suffix, "/x", platform))
    (tmp_path / "Python.h").touch()
    found = pythons.find(answer("cpython", 3, 13, suffix, str(tmp_path), platform))
    assert found == pythons.Python("3.13t", suffix, str(tmp_path))


def test_python_by_its_headers(tmp_path, monkeypatch):
    """No interpreter is needed, and the names are the ones that Python would use."""
    headers = tmp_path / "include" / "python3.29"
    headers.mkdir(parents=True)
    (headers / "Python.h").touch()
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setenv(pythons.VARIABLE, "3.29; 3.29,")
    (found,) = pythons.named()
    own = pythons.own()
    assert found.include == str(headers)
    assert found.suffix == own.suffix.replace(own.version.replace(".", ""), "329")
    monkeypatch.delenv(pythons.VARIABLE)
    assert pythons.named() == [own]
    assert pythons.find(sys.executable) == own


def test_python_that_was_not_named_compiles_and_says_so(root, monkeypatch, capsys):
    """Once: the next process finds the dispatcher in the cache, and hears nothing."""
    for name in ("core", "common"):
        (root / "csrc" / name).mkdir(exist_ok=True)
    (root / "csrc/core/module.cpp").write_text("int x;\n")
    other = pythons.Python("3.29", pythons.suffix_for("3.29"), pythons.own().include)
    wanted = [batch.Wanted(CoreBuilder(root, other), "cpu", label="dispatcher")]
    report = batch.build_all(wanted, cache_location(root / "prebuilt"), 1)
    assert report.ok, report.failures()
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", "1")
    with pytest.raises(JitDisabledError, match=r"dispatchers are for Python 3\.29, this is Python"):
        CoreBuilder(root).open()
    monkeypatch.delenv("APEX_TE_DISABLE_JIT")
    for told in (True, False):
        monkeypatch.setattr("op_builder.jit.build.service._opened", {})
        assert CoreBuilder(root).open().kind == "cache"
        text = capsys.readouterr().err
        assert (f"are for Python 3.29, this is Python {pythons.own().version}" in text) == told
        assert ("compiling one, once" in text) == told


def cache_location(path):
    from op_builder.jit.find.cache import Location

    path.mkdir(mode=0o700)
    return Location(str(path), True, "prebuilt")


def test_dispatcher_does_not_need_the_pybind11_it_was_made_with(monkeypatch):
    """A prebuilt one serves where pybind11 has another version, or is missing."""
    builder = CoreBuilder()
    key = builder.key("cpu")
    for version in ("2.13.6", "none"):
        monkeypatch.setattr(
            "op_builder.jit.backends.toolchain.pybind11_version", lambda v=version: v
        )
        assert builder.key("cpu") == key
        assert f"pybind11 {version}" in builder.compiler_version("cpu", [])
