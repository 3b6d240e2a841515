"""Removal of compiled libraries from the user's cache: nothing but what this project wrote.

An entry goes under its lock, so that one being built stays, and with one rename, so that nobody
finds half of it; a process that has loaded it keeps it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ..build import lock
from ..errors import LockTimeoutError, UnknownOpError
from ..find import cache
from ..find.entry import MANIFEST, open_folder
from ..find.inventory import FOLDER, Entry, entries, op_of, tree_bytes
from .stale import Current

# A dead builder's folder is left to those who may look into why it died, and on a file system
# whose locks do not reach other machines nobody can tell the dead.
LEFTOVER_AGE = 3600.0  # seconds
_NOTES = re.compile(r"(log-.*\.txt|failure-.*\.json(\.\d+)?)")
_TABLE = re.compile(r"\w+-cublaslt\d+\.(json(\.lock)?|\d+)")
_TUNING = "gemm"  # tables of chosen GEMM algorithms, beside the libraries


class Removed(NamedTuple):
    """One thing that was, or would be, removed, or that was left, and the reason."""

    path: str
    what: str
    bytes: int
    reason: str
    left: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain data."""
        return self._asdict()


def folders() -> list[cache.Location]:
    """Returns the caches that are this user's own; others are not this user's business.

    Raises:
        CacheError: one of them must not be used.
    """
    found = [cache.user_cache()]
    session = cache.runtime_cache()
    if session is not None and session.path != found[0].path:
        found.append(session)
    present = []
    for place in found:
        with contextlib.suppress(FileNotFoundError):
            os.close(open_folder(place))
            present.append(place)
    return present


def strangers(folder: str, library: str) -> list[str]:
    """Returns the names in the folder of a key that no build put there."""
    found = []
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.islink(path):
            found.append(name)
        elif not os.path.isdir(path):
            if not _NOTES.fullmatch(name):
                found.append(name)
        else:
            inside = sorted(os.listdir(path))
            own = {MANIFEST, f"{library}.so"}
            found.extend(f"{name}/{each}" for each in inside if each not in own)
            found.extend(
                f"{name}/{each}"
                for each in inside
                if each in own and os.path.isdir(os.path.join(path, each))
            )
    return found


class Cleaner:
    """One run over one cache; with ``dry`` it only says what it would do."""

    def __init__(self, place: cache.Location, dry: bool) -> None:
        self.place = place
        self.dry = dry
        self.found: list[Removed] = []

    def _path(self, *parts: str) -> str:
        return os.path.join(self.place.path, *parts)

    def _note(self, path: str, what: str, reason: str, left: bool = False) -> None:
        self.found.append(Removed(path, what, 0 if left else tree_bytes(path), reason, left))

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[str]:
        """Holds the lock of ``name``; yields "" if it does, else the reason why not."""
        path = self._path(cache.LOCKS, name)
        if self.dry:
            free = not os.path.exists(path) or lock.is_free(path)
            yield "" if free else f"it is being built: {lock.holder(path, name)}"
            return
        cache.make_private(self._path(cache.LOCKS))
        problem = ""
        with contextlib.ExitStack() as stack:
            try:
                alone = stack.enter_context(lock.held(path, name, 0.0, "removing"))
                if not alone:
                    problem = "file locks do not work here, so it may be in the making"
            except LockTimeoutError:
                problem = f"it is being built: {lock.holder(path, name)}"
            yield problem
            if not problem and not os.path.lexists(self._path(name)):
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _remove(self, name: str, path: str) -> None:
        """Moves a folder out of sight with one rename, then removes it.

        A next build clears what a killed clean-up leaves.
        """
        if self.dry:
            return
        aside = self._path(cache.TEMPORARY, f"{name}.removed{os.getpid()}")
        cache.make_private(self._path(cache.TEMPORARY))
        os.rename(path, aside)
        shutil.rmtree(aside)

    def key(self, folder: str, reason_of: Callable[[Entry], str], unused: str) -> None:
        """Removes the entries of one key for which ``reason_of`` has a reason.

        The reason ``unused`` holds for a folder without entries.
        """
        path = self._path(folder)
        if os.path.islink(path) or not os.path.isdir(path):
            self._note(path, folder, "it is no folder of ours", left=True)
        elif self._doomed(folder, reason_of, unused):
            with self._locked(folder) as problem:
                problem = problem or self._stranger(folder)
                if problem:
                    self._note(path, folder, problem, left=True)
                else:  # looked at again: it may have changed before the lock was ours
                    self._remove_entries(folder, self._doomed(folder, reason_of, unused))

    def _doomed(
        self, folder: str, reason_of: Callable[[Entry], str], unused: str
    ) -> list[tuple[str, str, str]]:
        """Returns (path, name, reason) of what goes: the whole folder, or single entries."""
        mine = entries(self.place, key=folder)
        found = [(entry.path, entry.name, reason_of(entry)) for entry in mine]
        if not mine and unused:
            found = [(self._path(folder), f"logs of {folder}", unused)]
        return [item for item in found if item[2]]

    def _stranger(self, folder: str) -> str:
        match = FOLDER.fullmatch(folder)
        found = strangers(self._path(folder), match["library"] if match else "")
        return f"{found[0]} in it is not ours" if found else ""

    def _remove_entries(self, folder: str, doomed: list[tuple[str, str, str]]) -> None:
        for path, name, reason in doomed:
            self._note(path, name, reason)
        path = self._path(folder)
        tags = [name for name in os.listdir(path) if os.path.isdir(os.path.join(path, name))]
        if {os.path.join(path, tag) for tag in tags} <= {item[0] for item in doomed}:
            doomed = [(path, "", "")]  # with the logs
        for gone, _, _ in doomed:
            self._remove(folder, gone)

    def leftovers(self, oldest: float) -> None:
        """Removes folders of dead builders that nobody has touched for ``oldest`` seconds."""
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._path(cache.TEMPORARY))):
                path = self._path(cache.TEMPORARY, name)
                owner = name.rpartition(".")[0]
                if FOLDER.fullmatch(owner) is None or os.path.islink(path):
                    self._note(path, name, "it is no build folder of ours", left=True)
                    continue
                if time.time() - os.lstat(path).st_mtime < oldest:
                    continue
                with self._locked(owner) as problem:
                    self._note(path, name, problem or "its builder is dead", left=bool(problem))
                    if not problem and not self.dry:
                        shutil.rmtree(path)

    def locks(self) -> None:
        """Removes lock files of keys that are gone."""
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._path(cache.LOCKS))):
                if FOLDER.fullmatch(name) and not os.path.lexists(self._path(name)):
                    with self._locked(name):
                        pass  # releasing it removes the file

    def tuning(self) -> None:
        """Removes the tables of GEMM algorithms."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in sorted(os.listdir(self._path(_TUNING))):
                path = self._path(_TUNING, name)
                if _TABLE.fullmatch(name) is None:
                    self._note(path, name, "it is no GEMM table", left=True)
                    continue
                self._note(path, name, "all")
                if not self.dry:
                    os.unlink(path)
            if not self.dry:
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(self._path(_TUNING))


def _keys(place: cache.Location) -> list[str]:
    return [name for name in sorted(os.listdir(place.path)) if FOLDER.fullmatch(name)]


def remove_all(place: cache.Location, dry: bool = False) -> list[Removed]:
    """Removes every entry, leftover, lock and table."""
    cleaner = Cleaner(place, dry)
    for folder in _keys(place):
        cleaner.key(folder, lambda entry: "all", "all")
    cleaner.leftovers(0.0)
    cleaner.tuning()
    cleaner.locks()
    known = (cache.LOCKS, cache.TEMPORARY, _TUNING)
    for name in sorted(os.listdir(place.path)):
        if FOLDER.fullmatch(name) is None and name not in known:
            cleaner._note(cleaner._path(name), name, "it is not ours", left=True)
    return cleaner.found


def remove_stale(place: cache.Location, now: Current, dry: bool = False) -> list[Removed]:
    """Removes entries that nothing here would load again, and old leftovers."""
    cleaner = Cleaner(place, dry)
    for folder in _keys(place):
        match = FOLDER.fullmatch(folder)
        known = now.keys.get(match["library"]) if match else None
        unused = (
            "other sources or flags" if known and match and match["digits"] not in known else ""
        )
        cleaner.key(folder, now.stale, unused)
    cleaner.leftovers(LEFTOVER_AGE)
    cleaner.locks()
    return cleaner.found


def remove_ops(place: cache.Location, ops: Iterable[str], dry: bool = False) -> list[Removed]:
    """Removes the entries of some ops, whatever made them."""
    wanted = set(ops)
    cleaner = Cleaner(place, dry)
    found = {entry.folder: op_of(entry) for entry in entries(place, check=False)}
    for folder in _keys(place):
        match = FOLDER.fullmatch(folder)
        assert match is not None
        if found.get(folder, re.sub("_(cpu|cuda)$", "", match["library"])) in wanted:
            cleaner.key(folder, lambda entry: "named", "named")
    cleaner.locks()
    return cleaner.found


def check_names(ops: Iterable[str], known: Iterable[str], places: Iterable[cache.Location]) -> None:
    """Raises ``UnknownOpError`` for a name that is neither an op's nor has an entry."""
    names = set(known) | {op_of(entry) for place in places for entry in entries(place, check=False)}
    for op in ops:
        if op not in names:
            raise UnknownOpError(
                f"there is no op {op!r} and no entry of one; there are: {', '.join(sorted(names))}"
            )
