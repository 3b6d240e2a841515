"""Compilation in a private folder of the cache, and publication of the result with one rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

from ...spec import DISPATCHER, OpSpec
from ..backends.archs import Arch, Capability
from ..backends.library import build_steps, cpu_features, key_flags
from ..errors import BuildInterruptedError, CacheError, CompileError, UnknownOpError
from ..find import cache, inventory
from ..find.cache import Folder, OpenedLibrary, open_entry, open_folder, warn_once
from ..find.elf import file_problem, needed_glibc
from ..find.key import key_of, made_of
from ..platform import is_cross_compiling, python_program
from . import ninja
from .hints import NOT_EXECUTABLE
from .lock import builder_name, is_abandoned, is_free, marked

# a rename that lost against another builder's, and what a network file system may answer in passing
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_PASSING = (errno.ESTALE, errno.EBUSY, errno.ENOENT, errno.EAGAIN)
_ATTEMPTS = 6
_LOAD_SECONDS = 120  # a loaded machine may take long to start an interpreter
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


class Request(NamedTuple):
    """One library to build, and the decisions made before its build."""

    spec: OpSpec
    device: str
    key: str
    archs: tuple[Arch, ...]
    compiler: str
    capability: Capability | None  # of the GPU that it must run on
    force: bool  # even if a cache holds it
    verbose: bool
    jobs: int | None
    started: float  # seconds since the epoch

    @property
    def library(self) -> str:
        """File name of the library without ``.so``."""
        return self.spec.library_name(self.device)

    @property
    def folder(self) -> str:
        """Name of the key's folder in a cache."""
        return cache.entry_folder(self.library, self.key)

    @property
    def what(self) -> str:
        """Op and device, for messages."""
        return f"{self.spec.NAME} ({self.device})"

    @property
    def tag(self) -> str:
        """Name of the entry's folder: the archs joined, or "cpu"."""
        return cache.entry_tag(self.archs)


class Vanished(BuildInterruptedError):
    """The folder of a running build was removed, as a clean-up of the whole cache does."""


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def remove_leftovers(root: str, name: str) -> None:
    """Removes dead processes' build folders; the caller holds the lock of the library ``name``."""
    temporary, locks = os.path.join(root, cache.TEMPORARY), os.path.join(root, cache.LOCKS)
    with contextlib.suppress(OSError):
        os.utime(temporary)  # by the clock of the file system's server
        now = os.stat(temporary).st_mtime
        for folder in os.listdir(temporary):
            lock, path = folder.rpartition(".")[0], os.path.join(temporary, folder)
            free = lock == name or (lock and is_free(os.path.join(locks, lock)))
            if free and is_abandoned(path, now):
                shutil.rmtree(path, ignore_errors=True)


def _write_entry(
    entry: Folder, library: int, request: Request, seconds: float, commands: list[str]
) -> None:
    with open(library, "rb", closefd=False) as file:
        file.seek(0)
        content = file.read()
    manifest = {
        "key": request.key,
        "op": request.spec.NAME,
        "device": request.device,
        "archs": [str(arch) for arch in request.archs],
        "cpu_features": cpu_features(request.spec),
        "glibc": needed_glibc(content),
        "compiler": request.compiler,
        "flags": key_flags(request.spec, request.device),
        **made_of(request.spec, request.device),
        "commands": commands,
        "seconds": round(seconds, 3),
        "size": len(content),
        "crc32": zlib.crc32(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "time": int(time.time()),
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(cache.MANIFEST, flags, dir_fd=entry.fd)
    with open(fd, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fchmod(fd, 0o644)
        _sync(fd)
    _sync(library)
    with contextlib.suppress(OSError):
        _sync(entry.fd)


def _open_linked(entry: Folder, name: str) -> int:
    """Opens a library just linked, before anything of it runs, and sets its mode to 0644."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=entry.fd)
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            os.fchmod(fd, 0o644)
    finally:
        os.close(fd)
    return entry.file(name)


def _publish(
    entry: str, target: str, folder: str, winner: Callable[[], OpenedLibrary | None]
) -> OpenedLibrary | None:
    """Renames the new entry to its place, or returns what ``winner`` opens of another builder."""
    for attempt in range(_ATTEMPTS):
        try:
            os.rename(entry, target)
            return None
        except OSError as error:
            if error.errno not in (*_TAKEN, *_PASSING):
                raise
            problem = error
        if problem.errno in _PASSING:
            if not os.path.lexists(entry):
                return None  # a network file system did it, and lost the answer
            time.sleep(0.02 * 2**attempt)
            cache.make_private(os.path.dirname(target))
            continue
        if found := winner():
            return found
        with contextlib.suppress(OSError):
            os.rename(target, os.path.join(folder, f"replaced-{attempt}"))
    warn_once(f"{target} could not be published ({problem}); only this process uses it")
    return None


def _load_problem(fd: int, expected: list[str]) -> str:
    """Returns why a library does not load in a process of its own, "" if none can be started."""
    python = python_program()
    if python is None:
        return ""  # in a program that embeds Python
    path = f"/proc/self/fd/{fd}"
    command = [python, "-I", "-S", "-c", _LOAD, path, *expected]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=_LOAD_SECONDS, pass_fds=(fd,),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    answer = done.stdout.strip().removeprefix(f"{path}: ")
    # The exit status can be lost in a program that ignores SIGCHLD; the word cannot. A file system
    # that is mounted noexec is not the library's fault; loading it says so with advice.
    if answer == "ok" or NOT_EXECUTABLE.search(answer):
        return ""
    return answer or f"loading it ended a process with status {done.returncode}"


def library_problem(spec: OpSpec, device: str, fd: int) -> str:
    """Returns why a library must not be published, "" if it may be; loads one of C functions."""
    found = file_problem(fd)
    is_imported = spec.BINDING == "pybind11" or spec.NAME == DISPATCHER  # by Python
    if found or is_imported or is_cross_compiling():
        return found
    try:
        functions = spec.functions()
    except UnknownOpError:  # no header: an op that its owner binds in another way
        functions = {}
    mine = {name: f.signature for name, f in functions.items() if device in f.devices}
    return _load_problem(fd, [text for item in mine.items() for text in item])


def _compile(request: Request, location: cache.Location, parent: str, folder: str) -> OpenedLibrary:
    entry = os.path.join(folder, "entry")
    os.mkdir(entry, 0o755)
    os.chmod(entry, 0o755)
    start = time.monotonic()
    library = os.path.join(entry, f"{request.library}.so")
    steps = build_steps(request.spec, request.device, request.archs, folder, library)
    estimate = inventory.last_seconds(location, request.library, request.tag)
    log = os.path.join(parent, f"log-{request.tag}.txt")
    with contextlib.ExitStack() as closing:
        outer = closing.enter_context(open_folder(cache.Location(folder, True, location.kind)))
        inner = closing.enter_context(outer.folder("entry"))
        ninja.run(request.what, folder, steps, log, request.verbose, request.jobs, estimate)
        if key_of(request.spec, request.device) != request.key:
            raise BuildInterruptedError(f"{request.what}: sources changed while being compiled")
        try:
            fd = _open_linked(inner, os.path.basename(library))
            closing.callback(os.close, fd)
            problem = library_problem(request.spec, request.device, fd)
        except FileNotFoundError as error:
            problem = str(error.strerror)
        if problem:
            raise BuildInterruptedError(
                f"{request.what}: {steps[-1].command[0]} reported success and left a library that"
                f" cannot be used: {problem}; check the compiler, what wraps it, and the disk"
            )
        commands = [" ".join(step.command).replace(folder, "<build>") for step in steps]
        _write_entry(inner, fd, request, time.monotonic() - start, commands)
        # opened before its entry is renamed: later removal does not affect this process
        mine = open_entry(outer, "entry", request.library, request.key)
    if mine is None:
        raise BuildInterruptedError(f"{request.what}: another build wrote into {folder}")
    return mine._replace(path=os.path.join(parent, request.tag, f"{request.library}.so"))


def build(
    request: Request, location: cache.Location, winner: Callable[[], OpenedLibrary | None]
) -> OpenedLibrary:
    """Compiles a library and publishes it in a cache; the caller holds the library's lock."""
    temporary = os.path.join(location.path, cache.TEMPORARY)
    parent = os.path.join(location.path, request.folder)
    folder = tempfile.mkdtemp(prefix=f"{request.folder}.{builder_name()}-", dir=temporary)
    try:
        with marked(folder):
            mine = _compile(request, location, parent, folder)
            target = os.path.join(parent, request.tag)
            other = _publish(os.path.join(folder, "entry"), target, folder, winner)
            # else a crash can lose a whole cache entry, but never leaves a broken one
            place = cache.Location(parent, True, location.kind)
            with contextlib.suppress(OSError, CacheError), open_folder(place) as opened:
                _sync(opened.fd)
    except (CompileError, BuildInterruptedError, OSError) as error:
        # files go one by one: a compiler may miss one of them before the folder itself is gone
        rest = (".",) if isinstance(error, OSError) else ("entry", "build.ninja")
        if all(os.path.lexists(os.path.join(folder, name)) for name in rest):
            raise
        raise Vanished(f"{request.what}: {folder} was removed while it was built in") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if other is None:
        return mine
    os.close(mine.fd)
    return other
