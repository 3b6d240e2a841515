"""Compilation in a private folder of the cache, and publication of the result with one rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable

from ..backends.library import build_steps, cpu_features
from ..errors import BuildInterruptedError, CompileError
from ..find import cache, inventory
from ..find.cache import OpenedLibrary, open_entry, open_folder, open_inside, warn_once
from ..find.elf import needed_glibc
from ..find.key import key_of, made_of
from . import ninja, verify
from .lock import builder_name, is_abandoned, is_free, marked
from .request import Request

# a rename that lost against another builder's, and what a network file system may answer in passing
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_PASSING = (errno.ESTALE, errno.EBUSY, errno.ENOENT, errno.EAGAIN)
_ATTEMPTS = 6


class Vanished(BuildInterruptedError):
    """The folder of a running build was removed, as a clean-up of the whole cache does."""


def _sync(fd: int) -> None:
    """Writes a file's content through to the disk, if its file system can."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise


def _sync_folder(path: str) -> None:
    """Writes a folder's list of files through to the disk (``fsync``), and ignores errors.

    Without it, a crash can lose a whole cache entry, but never leaves a broken one.
    """
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _sync(fd)
        finally:
            os.close(fd)


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
    entry: int, library: int, request: Request, seconds: float, commands: list[str]
) -> None:
    """Writes the manifest beside a library just compiled, and both through to the disk."""
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
        "flags": request.flags,
        **made_of(request.spec, request.device),
        "commands": commands,
        "seconds": round(seconds, 3),
        "size": len(content),
        "crc32": zlib.crc32(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "time": int(time.time()),
    }
    fd = os.open(cache.MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, dir_fd=entry)
    with open(fd, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fchmod(fd, 0o644)
        _sync(fd)
    _sync(library)
    with contextlib.suppress(OSError):
        _sync(entry)


def _open_linked(entry: int, name: str, path: str) -> int:
    """Opens a library just linked, before anything of it runs, and sets its mode to 0644."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=entry)
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            os.fchmod(fd, 0o644)
    finally:
        os.close(fd)
    return open_inside(entry, name, path, True, folder=False)


def _own_copy(parent: int, folder: str, target: str, request: Request, kind: str) -> OpenedLibrary:
    """Opens a library before its entry is renamed: later removal does not affect this process."""
    location = cache.Location(folder, True, kind)
    opened = open_entry(parent, f"{folder}/entry", location, request.library, request.key)
    if opened is None:
        raise BuildInterruptedError(f"{request.what}: another build wrote into {folder}")
    return opened._replace(path=os.path.join(target, f"{request.library}.so"))


def _publish(
    entry: str, target: str, folder: str, winner: Callable[[], OpenedLibrary | None]
) -> OpenedLibrary | None:
    """Renames the new entry to its place, unless another builder has put a valid one there.

    That builder's library, which ``winner`` opens, is returned, else None. An invalid entry in the
    place is moved away. If all attempts fail, only this process has the library; a warning says so.
    """
    problem = None
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
        found = winner()
        if found is not None:
            return found
        with contextlib.suppress(OSError):
            os.rename(target, os.path.join(folder, f"replaced-{attempt}"))
    warn_once(f"{target} could not be published ({problem}); only this process uses it")
    return None


def _compile(request: Request, location: cache.Location, parent: str, folder: str) -> OpenedLibrary:
    """Compiles and checks a library and writes its manifest.

    The output is opened through the folder that the compilers were started in, even if replaced.
    """
    entry = os.path.join(folder, "entry")
    os.mkdir(entry, 0o755)
    os.chmod(entry, 0o755)
    start = time.monotonic()
    library = os.path.join(entry, f"{request.library}.so")
    steps = build_steps(request.spec, request.device, request.archs, folder, library)
    estimate = inventory.last_seconds(location, request.library, request.tag)
    log = os.path.join(parent, f"log-{request.tag}.txt")
    with contextlib.ExitStack() as closing:

        def opened(fd: int) -> int:
            closing.callback(os.close, fd)
            return fd

        outer = opened(open_folder(cache.Location(folder, True, location.kind)))
        inner = opened(open_inside(outer, "entry", entry, True, folder=True))
        ninja.run(request.what, folder, steps, log, request.verbose, request.jobs, estimate)
        if key_of(request.spec, request.device) != request.key:
            raise BuildInterruptedError(f"{request.what}: sources changed while being compiled")
        try:
            fd = opened(_open_linked(inner, os.path.basename(library), library))
            problem = verify.problem(request.spec, request.device, fd)
        except FileNotFoundError as error:
            problem = str(error.strerror)
        if problem:
            raise BuildInterruptedError(
                f"{request.what}: {steps[-1].command[0]} reported success and left a library that"
                f" cannot be used: {problem}; check the compiler, what wraps it, and the disk"
            )
        commands = [" ".join(step.command).replace(folder, "<build>") for step in steps]
        _write_entry(inner, fd, request, time.monotonic() - start, commands)
        target = os.path.join(parent, request.tag)
        return _own_copy(outer, folder, target, request, location.kind)


def build(
    request: Request,
    location: cache.Location,
    name: str,
    winner: Callable[[], OpenedLibrary | None],
) -> OpenedLibrary:
    """Compiles a library and publishes it in a cache; the caller holds the library's lock."""
    temporary = os.path.join(location.path, cache.TEMPORARY)
    parent = os.path.join(location.path, name)
    folder = tempfile.mkdtemp(prefix=f"{name}.{builder_name()}-", dir=temporary)
    try:
        with marked(folder):
            mine = _compile(request, location, parent, folder)
            target = os.path.join(parent, request.tag)
            other = _publish(os.path.join(folder, "entry"), target, folder, winner)
            _sync_folder(parent)
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
