"""Building into a private folder of the cache and publishing it with one rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from typing import TYPE_CHECKING

from . import cache, ninja_build
from .errors import BuildInterruptedError
from .lock import is_free

if TYPE_CHECKING:
    from .service import Request


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_leftovers(root: str) -> None:
    """Remove build folders whose builder is dead: the lock they carry in their name is free."""
    temporary, locks = os.path.join(root, "tmp"), os.path.join(root, "locks")
    with contextlib.suppress(OSError):
        for name in os.listdir(temporary):
            lock = os.path.join(locks, name.rpartition(".")[0])
            if is_free(lock):
                shutil.rmtree(os.path.join(temporary, name), ignore_errors=True)


def _write_entry(folder: str, request: Request, seconds: float, commands: list[str]) -> None:
    library = os.path.join(folder, f"{request.library}.so")
    with open(library, "rb") as file:
        content = file.read()
    os.chmod(library, 0o644)
    manifest = {
        "key": request.key,
        "op": request.op,
        "device": request.device,
        "archs": [str(arch) for arch in request.archs],
        "compiler": request.compiler,
        "flags": request.flags,
        "commands": commands,
        "seconds": round(seconds, 3),
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "time": int(time.time()),
    }
    path = os.path.join(folder, cache.MANIFEST)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
    os.chmod(path, 0o644)
    for name in (library, path, folder):
        _sync(name)


def _swap_in(entry: str, target: str, discard: str) -> None:
    """Rename ``entry`` to ``target``; what stood there goes to ``discard``."""
    for _ in range(3):
        try:
            os.rename(entry, target)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, discard)
    os.rename(entry, target)


def build(request: Request, root: str, name: str) -> str:
    """Build the library and publish it under ``root``; returns the entry's folder.

    The caller holds the lock ``name``. Raises the errors of ninja_build.run.
    """
    parent = os.path.join(root, cache.entry_folder(request.library, request.key))
    target = os.path.join(parent, request.tag)
    log = os.path.join(parent, f"log-{request.tag}.txt")
    with ninja_build.disk_errors(request.what, root):
        temporary = os.path.join(root, "tmp")
        cache.make_private(temporary)
        cache.make_private(parent)
        folder = tempfile.mkdtemp(prefix=f"{name}.", dir=temporary)
        try:
            entry = os.path.join(folder, "entry")
            os.mkdir(entry, 0o755)
            os.chmod(entry, 0o755)
            start = time.monotonic()
            steps = request.steps(folder, os.path.join(entry, f"{request.library}.so"))
            ninja_build.run(request.what, folder, steps, log, request.verbose)
            if request.builder.key(request.device) != request.key:
                raise BuildInterruptedError(f"{request.what}: sources changed while being compiled")
            commands = [" ".join(step.command).replace(folder, "<build>") for step in steps]
            _write_entry(entry, request, time.monotonic() - start, commands)
            _swap_in(entry, target, os.path.join(folder, "replaced"))
            _sync(parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return target
