"""Programs that embed Python, or are frozen: a build never starts the program once more."""

import ctypes
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from programs import captured
from tiny_op import CHECKOUT, Tiny, quick_compiler

from op_builder.jit import platform
from op_builder.jit.backends import archs, toolchain
from op_builder.jit.build.service import open_library
from op_builder.jit.errors import BuildInterruptedError

REAL = os.path.realpath(sys.executable)


@pytest.fixture
def host(tmp_path):
    """A program that notes that it was started, and its notes."""
    program, notes = tmp_path / "host", tmp_path / "started"
    program.write_text(f'#!/bin/sh\necho x >> {notes}\nexec {REAL} "$@"\n')
    program.chmod(0o755)
    return program, notes


def unloadable(folder):
    """A compiler that makes whole libraries that cannot be loaded."""
    script = quick_compiler(folder)
    source, library = folder / "lost.cpp", folder / "quick.so"
    source.write_text("int lost(); int found() { return lost(); }\n")
    command = ["g++", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return script


@pytest.mark.parametrize("name", ["host", "python", "python3", "", None])
def test_host_program_is_not_started(
    root, tmp_path, host, monkeypatch,
    name
):  # fmt: skip
    """Whatever sys.executable names, a new library is verified by a Python of the same version."""
    program, notes = host
    if name:
        program = program.rename(tmp_path / name)
    for attribute in ("executable", "_base_executable"):
        monkeypatch.setattr(sys, attribute, str(program) if name else name)
    found = platform.python_program()
    assert found is not None
    assert os.path.realpath(found) == REAL
    archs.ask_driver()
    assert ctypes.CDLL(Tiny(root).open().proc_path).tiny() == 1
    monkeypatch.setenv("CXX", str(unloadable(tmp_path)))
    with pytest.raises(BuildInterruptedError, match=r"undefined symbol: .*lost"):
        open_library(Tiny(root), "cpu", force=True)
    assert not notes.exists()


def test_frozen_program(monkeypatch):
    """A frozen program's executable is not taken for an interpreter, though it is this process."""
    assert platform.python_program() == sys.executable
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert platform.python_program() != sys.executable


def test_no_interpreter_at_all(root, host, tmp_path, monkeypatch):
    """Where no Python is found, or one of another version, libraries are checked without it."""
    program, notes = host
    other = tmp_path / "bin"
    other.mkdir()
    (other / "python3").write_text("#!/bin/sh\necho cpython 3 2 1\n")
    (other / "python3").chmod(0o755)
    for attribute in ("executable", "_base_executable"):
        monkeypatch.setattr(sys, attribute, str(program))
    for attribute in ("base_exec_prefix", "base_prefix", "exec_prefix"):
        monkeypatch.setattr(sys, attribute, str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "/nonexistent")
    platform._find_python.cache_clear()
    try:
        assert platform.python_program() is None
        assert "no interpreter" in archs.ask_driver()["problem"]
        assert toolchain.find_ninja()
        assert ctypes.CDLL(Tiny(root).open().proc_path).tiny() == 1
    finally:
        platform._find_python.cache_clear()
    assert not notes.exists()


HOST = """
#include <Python.h>
#include <cstdio>
#include <cstring>
int main(int count, char** words) {
  std::FILE* notes = std::fopen(NOTES, "a");
  std::fputs("x", notes);
  std::fclose(notes);
  if (count > 2) return 3;  // as an interpreter would be started
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  PyConfig_SetBytesString(&config, &config.executable, words[0]);
  if (PyStatus_Exception(Py_InitializeFromConfig(&config))) return 4;
  const int failed = PyRun_SimpleString(words[1]);
  return Py_FinalizeEx() || failed;
}
"""


def flags_of_python():
    """The flags that compile and link a program with Python in it; skips where there are none."""
    folder, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDLIBRARY")
    include = sysconfig.get_paths()["include"]
    if not os.path.isfile(f"{include}/Python.h") or not name or not name.endswith(".so"):
        pytest.skip("no Python to embed")
    return [f"-I{include}", f"-L{folder}", f"-Wl,-rpath,{folder}", f"-l{name[3:-3]}"]


def test_embedded_python_builds(root, tmp_path, finish_host):
    """A C++ program with Python in it builds an op, and is not started a second time."""
    source, program, notes = tmp_path / "host.cpp", tmp_path / "program", tmp_path / "notes"
    source.write_text(HOST.replace("NOTES", f'"{notes}"'))
    command = ["g++", "-o", str(program), str(source), *flags_of_python()]
    made = captured(command, check=False)
    if made.returncode != 0:
        pytest.skip(f"no Python to embed: {made.stderr[-200:]}")
    code = (
        f"import sys, ctypes; sys.path[:0] = [{str(CHECKOUT)!r}, {str(Path(__file__).parent)!r}]\n"
        f"from tiny_op import Tiny\n"
        f"print(ctypes.CDLL(Tiny({str(root)!r}).open().proc_path).tiny(), sys.executable)\n"
    )
    assert finish_host([str(program), code]) == f"1 {program}\n"
    assert notes.read_text() == "x"


@pytest.fixture
def finish_host():
    """Runs a program to its end; its output, or what it wrote on stderr."""
    site = [path for path in sys.path if path.endswith("site-packages")]
    variables = {**os.environ, "PYTHONPATH": ":".join(site), "PYTHONHOME": sys.base_prefix}

    def finish(command):
        done = captured(command, check=False, env=variables)
        return done.stdout or done.stderr

    return finish
