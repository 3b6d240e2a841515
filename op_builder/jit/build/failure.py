"""Stored compile errors, which waiting processes and later ones, for 60 s, raise again."""

from __future__ import annotations

import contextlib
import json
import os
import time

from ..errors import CompileError

KEPT_SECONDS = 60.0
_PARTS = ("first_error", "command", "log", "hint")  # of a CompileError, in its order
NEXT_TRY = (
    f"after {KEPT_SECONDS:.0f} s, when a source or the compiler changes, or with"
    " APEX_TE_JIT_RETRY=1"
)


def store(path: str, error: CompileError, compiler: str) -> None:
    """Writes a compile error to a file in the folder of the library's key; ignores OSError."""
    record = {"message": str(error), **{name: getattr(error, name) for name in _PARTS}}
    record |= {"compiler": compiler, "time": time.time()}
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


def stamp(path: str) -> tuple[int, int] | None:
    """Returns a value that changes whenever an error is stored in ``path``, None without one."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def recall(path: str, compiler: str, since: float | None) -> CompileError | None:
    """Returns the stored error of this ``compiler``, not older than ``since``, or None."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, encoding="utf-8") as file:
            record = json.load(file)
        if record["compiler"] != compiler:
            return None
        if since is not None and not since <= record["time"] <= time.time() + 1:
            return None
        return CompileError(record["message"], *(record[name] for name in _PARTS))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def forget(path: str) -> None:
    """Removes the stored compile error, if there is one."""
    with contextlib.suppress(OSError):
        os.unlink(path)
