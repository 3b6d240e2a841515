"""Check, before publication, that a library just linked is complete and can be loaded.

A compiler or a wrapper around it may write half a file and report success. Once published, such a
library would fail in every process from then on, because its key and checksum are right.
"""

from __future__ import annotations

import subprocess

from ...spec import OpSpec
from ..errors import UnknownOpError
from ..find.elf import file_problem
from ..platform import is_cross_compiling, python_program
from .hints import is_not_executable

_SECONDS = 120  # a loaded machine may take long to start an interpreter
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


def _load_problem(fd: int, expected: list[str]) -> str:
    """Returns why a library must not be published, "" if it loads or no process can be started.

    It is loaded in a process of its own, and its functions' signatures are compared.
    """
    python = python_program()
    if python is None:
        return ""  # in a program that embeds Python
    path = f"/proc/self/fd/{fd}"
    command = [python, "-I", "-S", "-c", _LOAD, path, *expected]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            pass_fds=(fd,),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    answer = done.stdout.strip().removeprefix(f"{path}: ")
    # The exit status can be lost in a program that ignores SIGCHLD; the word cannot.
    if answer == "ok":
        return ""
    if is_not_executable(answer):
        return ""  # the file system's doing, not the library's; loading it says so with advice
    return answer or f"loading it ended a process with status {done.returncode}"


def problem(spec: OpSpec, device: str, fd: int) -> str:
    """Returns the reason why a library must not be published, "" if it may be.

    A library for this CPU architecture that exports plain C functions is loaded, too; an extension,
    which needs a Python or torch of its own, is only checked to be a complete file.
    """
    found = file_problem(fd)
    if found or not spec.exports_c_functions or is_cross_compiling():
        return found
    try:
        functions = spec.functions()
    except UnknownOpError:  # no header: an op that its owner binds in another way
        functions = {}
    expected = [
        text
        for name, function in functions.items()
        if device in function.devices
        for text in (name, function.signature)
    ]
    return _load_problem(fd, expected)
