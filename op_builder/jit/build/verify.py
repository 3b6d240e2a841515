"""Checks a library that was just linked, before it is published: a whole file that loads.

A compiler or a wrapper around it may write half a file and report success. Once published, such a
library would fail in every process from then on, because its key and checksum are right.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

from ..errors import UnknownOpError
from .hints import is_not_executable

if TYPE_CHECKING:
    from ...builder import OpBuilder

_SECONDS = 120  # a loaded machine may take long to start an interpreter
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SEGMENT = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SHARED_OBJECT, _LOADED, _DYNAMIC, _NO_BITS = 3, 1, 2, 8
_MACHINES = {"x86_64": 62, "aarch64": 183}

# Prints "ok", or what is wrong; the arguments are the library and, for each function that the
# header declares, its name and signature. In a process of its own: a broken library may crash it.
_LOAD = """
import ctypes, os, sys
path, *expected = sys.argv[1:]
try:
    library = ctypes.CDLL(path, os.RTLD_NOW | os.RTLD_LOCAL)
except OSError as error:
    sys.exit(print(error))
try:
    if expected:
        ctypes.c_int32.in_dll(library, "apex_te_abi")
except ValueError:
    sys.exit(print("it does not export apex_te_abi"))
for name, signature in zip(expected[::2], expected[1::2]):
    try:
        found = ctypes.c_char_p.in_dll(library, "apex_te_" + name + "_signature").value
    except ValueError:
        continue  # a function that this device does not define
    if found != signature.encode():
        sys.exit(print(name, "has the signature", found, "instead of", signature.encode()))
print("ok")
"""


def _truncation(file_size: int, content: bytes) -> str:
    """Return what an ELF shared library lacks, or "" where every part that it names is there."""
    if len(content) < _HEADER.size or content[:4] != b"\x7fELF":
        return f"it is no ELF file ({file_size} bytes)"
    header = _HEADER.unpack_from(content)
    ident, kind, machine = header[:3]
    segments_at, sections_at = header[5:7]
    segment_size, segments, section_size, sections = header[9:13]
    if ident[4:6] != b"\x02\x01" or kind != _SHARED_OBJECT:
        return "it is no 64-bit shared library"
    expected = _MACHINES.get(os.uname().machine)
    if expected is not None and machine != expected:
        return f"it is for another machine than {os.uname().machine} (ELF machine {machine})"
    tables = ((segments_at, segment_size, segments), (sections_at, section_size, sections))
    if any(at + size * count > file_size for at, size, count in tables):
        return f"it ends after {file_size} bytes, before its tables do"
    if segment_size != _SEGMENT.size or (sections and section_size != _SECTION.size):
        return "its tables have entries of an unknown size"
    kinds = set()
    for index in range(segments):
        kind, _, offset, _, _, size, _, _ = _SEGMENT.unpack_from(
            content, segments_at + index * segment_size
        )
        kinds.add(kind)
        if offset + size > file_size:
            return f"it ends after {file_size} bytes, inside a segment"
    for index in range(sections):
        _, kind, _, _, offset, size, _, _, _, _ = _SECTION.unpack_from(
            content, sections_at + index * section_size
        )
        if kind != _NO_BITS and offset + size > file_size:
            return f"it ends after {file_size} bytes, inside a section"
    if not {_LOADED, _DYNAMIC} <= kinds:
        return "it has nothing that could be loaded"
    return ""


def file_problem(path: str) -> str:
    """Return why the file is no whole shared library of this machine, or "" if it is one."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        return error.strerror or str(error)
    return _truncation(len(content), content)


def _load_problem(path: str, expected: list[str]) -> str:
    """Return why a process of its own cannot load the library, or "" if it can or cannot start."""
    if not sys.executable:
        return ""  # an embedded interpreter
    command = [sys.executable, "-I", "-S", "-c", _LOAD, path, *expected]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    answer = done.stdout.strip()
    # The exit status can be lost in a program that ignores SIGCHLD; the word cannot.
    if answer == "ok":
        return ""
    if is_not_executable(answer):
        return ""  # the file system's doing, not the library's; loading it says so with advice
    return answer or f"loading it ended a process with status {done.returncode}"


def problem(builder: OpBuilder, device: str, path: str) -> str:
    """Return why the library at ``path`` must not be published, or "" if it may.

    Every library must be a whole file. One that exports plain C functions is loaded, too, and the
    signatures in it are compared with the header's. Extension modules need a Python or torch of
    their own and are not loaded here.
    """
    found = file_problem(path)
    if found or not builder.exports_c_functions:
        return found
    try:
        functions = builder.functions()
    except UnknownOpError:  # no header: an op that its owner binds in another way
        functions = {}
    expected = [
        text
        for name, spec in functions.items()
        if device in spec.devices
        for text in (name, spec.signature)
    ]
    return _load_problem(path, expected)
