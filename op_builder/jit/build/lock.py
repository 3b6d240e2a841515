"""File locks (flock) that let one process at a time build a library or write a table."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator

from ..errors import CacheError, LockTimeoutError
from ..find import cache
from ..text import tell

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
# what file systems without locks answer: NFS without lockd, Lustre without -o flock, some FUSE
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_VANISHED = (errno.ENOENT, errno.ESTALE)
_ATTEMPTS = 20
_MARK = "alive"
_MAKER = re.compile(r"\.(?P<kernel>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>\d+)-\w+$")
MESSAGE_EVERY = 10.0  # seconds
FRESH_EVERY, ABANDONED_AFTER = 60.0, 3600.0  # seconds

_held: set[int] = set()
_guard = threading.RLock()  # held while a descriptor gets its lock, so that no fork falls between


def _forked() -> None:
    """Closes a forked child's copies of the parent's locks, which would outlive the parent."""
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forked)


def _release(fd: int) -> None:
    """Unlocks and closes a lock's descriptor; does nothing in a forked child of the holder."""
    with _guard:
        if fd in _held:
            _held.discard(fd)
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child of a C library's fork may have a copy
            os.close(fd)


def _is_named(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except OSError as error:
        if error.errno not in _VANISHED:
            raise
        return False


def _try_lock(path: str, locked: list[int]) -> bool:
    """Locks a file, created if missing, without waiting; False if another process holds it."""
    for _ in range(_ATTEMPTS):
        with _guard:
            try:
                fd = os.open(path, _FLAGS, 0o600)
            except OSError as error:
                if error.errno not in _VANISHED:
                    raise
                cache.make_private(os.path.dirname(path))  # a clean-up removed the folder
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _held.add(fd)
                locked.append(fd)
            except BlockingIOError:
                os.close(fd)
                return False
            except BaseException:
                _held.discard(fd)
                os.close(fd)
                raise
        if _is_named(fd, path):
            return True
        locked.clear()
        _release(fd)  # a clean-up removed the file meanwhile: the lock of its successor counts
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)


def holder(path: str, what: str) -> str:
    """Returns what a lock's holder has written about itself, with ``what`` if that is missing."""
    text = ""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            text = os.read(fd, 500).decode("utf-8", "replace").strip()
        finally:
            os.close(fd)
    return text if what in text else f"{text or 'another process'}, for {what}"


def is_free(path: str) -> bool:
    """Returns True if no process holds the lock file ``path``; False if locks do not work."""
    locked: list[int] = []
    try:
        return _try_lock(path, locked)
    except OSError:
        return False
    finally:
        for fd in locked:
            _release(fd)


@functools.cache
def _kernel() -> str:
    """Returns eight digits that processes share whose process ids are of one numbering."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            parts[0] = file.read().strip()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _started(pid: int) -> str:
    """Returns the moment at which a process started, in ticks; "" if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def builder_name() -> str:
    """Returns text that tells this process from all others, for the name of a build folder."""
    return f"{_kernel()}-{os.getpid()}-{_started(os.getpid()) or 0}"


@contextlib.contextmanager
def marked(folder: str) -> Iterator[None]:
    """Shows other processes, while the block runs, that the builder in ``folder`` lives."""
    # by a lock and, since locks may not reach other machines, by the folder's time
    locked: list[int] = []
    done = threading.Event()

    def keep_fresh() -> None:
        while not done.wait(FRESH_EVERY):
            with contextlib.suppress(OSError):
                os.utime(folder)

    keeper = threading.Thread(target=keep_fresh, daemon=True)
    try:
        with contextlib.suppress(OSError):
            _try_lock(os.path.join(folder, _MARK), locked)
        with contextlib.suppress(RuntimeError):  # no thread to be had, or the interpreter ends
            keeper.start()
        yield
    finally:
        done.set()
        if keeper.is_alive():
            keeper.join(1.0)
        for fd in locked:
            _release(fd)


def is_abandoned(folder: str, now: float) -> bool:
    """Returns True if the process that made the build folder ``folder`` has died."""
    mark = os.path.join(folder, _MARK)
    if os.path.lexists(mark) and not is_free(mark):
        return False
    maker = _MAKER.search(folder)
    if maker is None:  # what a clean-up has moved aside, or an earlier version's
        return True
    if maker["kernel"] == _kernel():
        return _started(int(maker["pid"])) != maker["started"]
    try:
        return now - os.stat(folder, follow_symlinks=False).st_mtime > ABANDONED_AFTER
    except OSError:
        return False


def _wait(path: str, what: str, timeout: float, locked: list[int]) -> None:
    """Takes the lock within ``timeout`` s; says on stderr every 10 s which process holds it."""
    start = time.monotonic()
    next_message = MESSAGE_EVERY
    pause = 0.02
    while not _try_lock(path, locked):
        waited = time.monotonic() - start
        if waited >= timeout:
            raise LockTimeoutError(
                f"waited {waited:.0f} s for {holder(path, what)} (lock {path});"
                " APEX_TE_LOCK_TIMEOUT sets the limit in seconds"
            )
        if waited >= next_message:
            tell(f"apex_te: waiting for {holder(path, what)}: {waited:.0f} s so far (lock {path})")
            next_message += MESSAGE_EVERY
        time.sleep(min(pause, max(0.0, timeout - waited)))
        pause = min(pause * 1.5, 0.25)


def _wait_elsewhere(
    path: str, problem: OSError, what: str, timeout: float, locked: list[int]
) -> None:
    """Waits for a lock in ``XDG_RUNTIME_DIR`` instead, and warns; without one takes no lock."""
    text = f"file locks do not work in {os.path.dirname(path)} ({problem.strerror})"
    session = cache.runtime_cache()
    with contextlib.suppress(OSError, CacheError):  # no lock at all, then
        if session is not None:
            cache.prepare(session, cache.LOCKS)
            local = os.path.join(session.path, cache.LOCKS, os.path.basename(path))
            cache.warn_once(f"{text}: only the processes of this machine share a build")
            _wait(local, what, timeout, locked)
            return
    cache.warn_once(f"{text}: processes that start together may each build")


@contextlib.contextmanager
def held(path: str, what: str, timeout: float, doing: str = "building") -> Iterator[bool]:
    """Holds a lock file; yields False on a file system without locks, where two may build."""
    # then the one rename that publishes an entry still keeps it whole
    locked: list[int] = []
    try:
        alone = True
        try:
            _wait(path, what, timeout, locked)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            alone = False
            _wait_elsewhere(path, error, what, timeout, locked)
        text = f"pid {os.getpid()} on host {socket.gethostname()}, {doing} {what}\n"
        # who holds the lock is only told to those who wait; a full disk must not matter here
        for fd in locked:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, text.encode(), 0)
        yield alone
    finally:
        for fd in locked:
            if fd in _held:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)
            _release(fd)
