"""The dispatcher, and the Pythons for which an installation compiles one each."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import sys
from typing import NamedTuple

from ...spec import DISPATCHER, OpSpec
from ..errors import HeaderNotFoundError, PythonNotFoundError, SettingError
from ..platform import output_of, soabi, suffix_on
from . import toolchain

VARIABLE = "APEX_BUILD_PYTHONS"
OLDEST = (3, 10)
_VERSION = re.compile(r"3\.(\d+)(t?)")
_ABI = re.compile(r"cpython-3\d+[a-z]*")
_QUERY = """
import importlib.machinery as m, json, sys, sysconfig
print(json.dumps([sys.implementation.name, sys.version_info[0], sys.version_info[1],
    m.EXTENSION_SUFFIXES[0], sysconfig.get_paths()["include"], sysconfig.get_platform()]))
"""


class Python(NamedTuple):
    """A Python, such as "3.12" or "3.13t" without the GIL, to compile a dispatcher for."""

    version: str
    suffix: str
    include: str


def own() -> Python:
    """Returns version, suffix and headers of the running Python."""
    return Python(name_of(soabi()), soabi(), toolchain.python_include())


def name_of(suffix: str) -> str:
    """Returns "3.13t" for ".cpython-313t-...", the running Python's version for a bare suffix."""
    found = re.search(r"cpython-3(\d+)(t?)", suffix)
    return f"3.{found[1]}{found[2]}" if found else f"3.{sys.version_info[1]}"


def suffix_for(version: str) -> str:
    """Returns the suffix of extension modules of CPython ``version``, such as "3.13t", here."""
    return _ABI.sub(f"cpython-{version.replace('.', '')}", soabi())


def _query(program: str) -> Python:
    """Runs an interpreter and returns its version, extension suffix and header folder."""
    import sysconfig

    try:
        answer = json.loads(output_of(program, "-I", "-S", "-c", _QUERY))
    except ValueError:
        raise PythonNotFoundError(f"{program} does not run as a Python") from None
    kind, major, minor, suffix, include, platform = answer
    if kind != "cpython" or (major, minor) < OLDEST:
        raise PythonNotFoundError(
            f"{program} must be CPython 3.10 or later, is {kind} {major}.{minor}"
        )
    if platform != sysconfig.get_platform():
        raise PythonNotFoundError(
            f"{program} must be a Python for {sysconfig.get_platform()}, is for {platform}"
        )
    if not os.path.isfile(os.path.join(include, "Python.h")):
        raise HeaderNotFoundError(f"{program}: Python.h is not in {include}")
    return Python(name_of(suffix), suffix_on(suffix), include)


def _programs(version: str) -> list[str]:
    """Returns paths of interpreters of a version: on PATH, of pyenv, uv and manylinux images."""
    plain = version.rstrip("t")
    tag = "cp" + plain.replace(".", "")
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    places = (
        f"{pyenv}/versions/{version}*",
        os.path.expanduser(f"~/.local/share/uv/python/cpython-{version}*"),
        f"/opt/python/{tag}-{tag}{version.removeprefix(plain)}",
    )
    on_path = shutil.which(f"python{version}")
    found = [sorted(glob.glob(f"{each}/bin/python{version}"), reverse=True) for each in places]
    return [*([on_path] if on_path else []), *(path for paths in found for path in paths)]


def _by_version(version: str) -> Python:
    """Returns the Python of a version: the running one, another interpreter, or bare headers."""
    if version == name_of(soabi()):
        return own()
    looked = []
    for program in _programs(version):
        try:
            python = _query(program)
        except (PythonNotFoundError, HeaderNotFoundError) as error:
            looked.append(str(error))
            continue
        if python.version == version:
            return python
        looked.append(f"{program} is Python {python.version}")
    for base in dict.fromkeys((sys.base_prefix, "/usr", "/usr/local")):
        include = os.path.join(base, "include", f"python{version}")
        if os.path.isfile(os.path.join(include, "Python.h")):
            return Python(version, suffix_for(version), include)
        looked.append(f"no {include}/Python.h")
    raise PythonNotFoundError(
        f"{VARIABLE} names Python {version}, which was not found: no python{version} that serves on"
        f" PATH, in ~/.pyenv, ~/.local/share/uv or /opt/python ({'; '.join(looked)});"
        f" install its headers (Debian and Ubuntu: apt install python{version}-dev)"
        " or name the path of an interpreter"
    )


def find(text: str) -> Python:
    """Returns the Python of a version such as "3.12", or of an interpreter's name or path."""
    if match := _VERSION.fullmatch(text):
        if (3, int(match[1])) < OLDEST:
            raise SettingError(f"{VARIABLE}: apex_te needs Python 3.10 or later, got {text}")
        return _by_version(text)
    if program := shutil.which(text):
        return _query(program)
    raise PythonNotFoundError(
        f"{VARIABLE} names {text!r}, which is neither a version such as 3.12 nor a program;"
        " several are separated by ;"
    )


def named() -> list[Python]:
    """Returns the Pythons that ``APEX_BUILD_PYTHONS`` lists, by default the running one."""
    texts = [part.strip() for part in re.split("[;,]", os.environ.get(VARIABLE, ""))]
    pythons = [find(text) for text in texts if text] or [own()]
    return list({python.suffix: python for python in pythons}.values())


class DispatcherSpec(OpSpec):
    """Declaration of the dispatcher for ``python``, or for the running Python if that is None."""

    NAME = DISPATCHER
    BUILD_VAR = "APEX_BUILD_CPP_OPS"  # whatever is prebuilt, the dispatcher goes along

    def __init__(
        self, root: str | os.PathLike[str] | None = None, python: Python | None = None
    ) -> None:
        super().__init__(root)
        self.python = python

    def absolute_name(self) -> str:
        return self.NAME

    def sources(self) -> list[str]:
        paths = (self.root / "csrc/core").glob("*.cpp")
        return sorted(str(path.relative_to(self.root)) for path in paths)

    def system_include_paths(self, device: str) -> list[str]:
        headers = self.python.include if self.python else toolchain.python_include()
        return [headers, toolchain.pybind11_include()]

    def library_name(self, device: str) -> str:
        return self.NAME

    def key_extras(self) -> list[str]:
        return [self.python.suffix if self.python else soabi()]
