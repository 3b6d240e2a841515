"""One build at a time per library: flock, which the kernel releases when the holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator

from .errors import LockTimeoutError

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
MESSAGE_EVERY = 10.0  # seconds


def _try_lock(path: str) -> int | None:
    """Descriptor of the locked file, or None if somebody else holds it."""
    while True:
        fd = os.open(path, _FLAGS, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        try:
            named = os.stat(path, follow_symlinks=False).st_ino
        except FileNotFoundError:
            named = -1
        if named == os.fstat(fd).st_ino:
            return fd
        os.close(fd)  # a clean-up removed the file meanwhile: the lock of its successor counts


def _holder(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return "another process"
    try:
        return os.read(fd, 500).decode("utf-8", "replace").strip() or "another process"
    finally:
        os.close(fd)


def is_free(path: str) -> bool:
    """Whether nobody builds under this lock now."""
    try:
        fd = _try_lock(path)
    except OSError:
        return False
    if fd is None:
        return False
    os.close(fd)
    return True


@contextlib.contextmanager
def held(path: str, what: str, timeout: float) -> Iterator[None]:
    """Hold the lock file ``path`` while building ``what``; says whom it waits for.

    Raises LockTimeoutError after ``timeout`` seconds.
    """
    start = time.monotonic()
    next_message = MESSAGE_EVERY
    pause = 0.02
    while True:
        fd = _try_lock(path)
        if fd is not None:
            break
        waited = time.monotonic() - start
        if waited >= timeout:
            raise LockTimeoutError(
                f"{what}: waited {waited:.0f} s for {_holder(path)} (lock {path});"
                " APEX_TE_LOCK_TIMEOUT sets the limit in seconds"
            )
        if waited >= next_message:
            print(
                f"apex_te: waiting for {_holder(path)}, {what}, for {waited:.0f} s (lock {path})",
                file=sys.stderr,
                flush=True,
            )
            next_message += MESSAGE_EVERY
        time.sleep(min(pause, max(0.0, timeout - waited)))
        pause = min(pause * 1.5, 0.25)
    try:
        text = f"pid {os.getpid()} on host {socket.gethostname()}, building {what}\n"
        # who holds the lock is only told to those who wait; a full disk must not matter here
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
