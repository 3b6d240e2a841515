"""A compiler's own diagnostic, kept for those who wait or start shortly afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import time

from .errors import CompileError

KEPT_SECONDS = 60.0


def store(path: str, error: CompileError, compiler: str) -> None:
    """Write the failure beside the entry it belongs to; not being able to is no failure."""
    record = {
        "message": str(error),
        "first_error": error.first_error,
        "command": error.command,
        "log": error.log,
        "compiler": compiler,
        "time": time.time(),
    }
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(temporary, path)


def recall(path: str, compiler: str, since: float) -> CompileError | None:
    """The stored failure of this compiler written after ``since`` (seconds since the epoch)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, encoding="utf-8") as file:
            record = json.load(file)
        if record["compiler"] != compiler or not since <= record["time"] <= time.time() + 1:
            return None
        return CompileError(
            record["message"], record["first_error"], record["command"], record["log"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget(path: str) -> None:
    """Drop the stored failure."""
    with contextlib.suppress(OSError):
        os.unlink(path)
