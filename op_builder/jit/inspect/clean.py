"""Removal of libraries from the user's caches, and of nothing that this project did not write."""

# under its lock, so that one being built stays, and with one rename, so that nobody finds half

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..build import lock
from ..errors import LockTimeoutError
from ..find import cache
from ..find.inventory import FOLDER, Entry, entries, op_of, tree_bytes
from .facts import Current

# A dead builder's folder is left to those who may look into why it died, and on a file system
# whose locks do not reach other machines nobody can tell the dead.
LEFTOVER_AGE = 3600.0  # seconds
_NOTES = re.compile(r"(log-.*\.txt|failure-.*\.json(\.\d+)?)")
_TABLE = re.compile(r"\w+-cublaslt\d+\.(json(\.lock)?|\d+)")
_TUNING = "gemm"  # tables of chosen GEMM algorithms, beside the libraries


class Removed(NamedTuple):
    """File or folder that a clean-up removed, or left although it was to go."""

    path: str
    what: str
    bytes: int  # 0 if left
    reason: str
    left: bool = False


def folders() -> list[cache.Location]:
    """Returns the existing caches that belong to this user: the user cache and the session's."""
    found = {cache.user_cache(), cache.runtime_cache() or cache.user_cache()}
    present = []
    for place in sorted(found, key=lambda place: place != cache.user_cache()):
        with contextlib.suppress(FileNotFoundError), cache.open_folder(place):
            present.append(place)
    return present


class Cleaner:
    """Clean-up of one cache, which collects in ``found`` what goes; with ``dry`` only lists it."""

    def __init__(self, place: cache.Location, dry: bool) -> None:
        self.place, self.dry = place, dry
        self.found: list[Removed] = []

    def _path(self, *parts: str) -> str:
        return os.path.join(self.place.path, *parts)

    def _names(self, *parts: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self._path(*parts)))
        return []

    def _note(self, path: str, what: str, reason: str, left: bool = False) -> None:
        self.found.append(Removed(path, what, 0 if left else tree_bytes(path), reason, left))

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[str]:
        """Holds a library's lock; yields why to leave it alone, "" if no process can build it."""
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

    def key(self, key: re.Match[str], reason_of: Callable[[Entry], str], unused: str) -> None:
        """Removes the entries of one key that there is a reason to remove."""
        folder, path = key[0], self._path(key[0])
        if os.path.islink(path) or not os.path.isdir(path):
            self._note(path, folder, "it is no folder of ours", left=True)
        elif self._doomed(folder, reason_of, unused):
            with self._locked(folder) as problem:
                problem = problem or self._stranger(path, key["library"])
                if problem:
                    self._note(path, folder, problem, left=True)
                else:  # looked at again: it may have changed before the lock was ours
                    self._remove(folder, self._doomed(folder, reason_of, unused))

    def _doomed(
        self, folder: str, reason_of: Callable[[Entry], str], unused: str
    ) -> list[tuple[str, str, str]]:
        """Returns ``(path, name, reason)`` of each entry of a key to remove, or of a bare key."""
        mine = entries(self.place, key=folder)
        found = [(entry.path, entry.name, reason_of(entry)) for entry in mine]
        if not mine and unused:
            found = [(self._path(folder), f"logs of {folder}", unused)]
        return [item for item in found if item[2]]

    def _stranger(self, path: str, library: str) -> str:
        """Returns text that names a file in a key's folder that no build wrote, "" without one."""
        own = {cache.MANIFEST, f"{library}.so"}
        found = []
        for name in sorted(os.listdir(path)):
            inside = os.path.join(path, name)
            if os.path.isdir(inside) and not os.path.islink(inside):
                names = sorted(os.listdir(inside))
                found += [f"{name}/{each}" for each in names if each not in own]
                found += [f"{name}/{each}" for each in own if os.path.isdir(f"{inside}/{each}")]
            elif os.path.islink(inside) or not _NOTES.fullmatch(name):
                found.append(name)
        return f"{found[0]} in it is not ours" if found else ""

    def _remove(self, folder: str, doomed: list[tuple[str, str, str]]) -> None:
        for path, name, reason in doomed:
            self._note(path, name, reason)
        if self.dry:
            return
        path = self._path(folder)
        tags = [name for name in os.listdir(path) if os.path.isdir(os.path.join(path, name))]
        gone = {item[0] for item in doomed}
        if {os.path.join(path, tag) for tag in tags} <= gone:
            gone = {path}  # with the logs
        cache.make_private(self._path(cache.TEMPORARY))
        aside = self._path(cache.TEMPORARY, f"{folder}.removed{os.getpid()}")
        for path in sorted(gone):
            os.rename(path, aside)  # one rename, so that no look-up finds half of it
            shutil.rmtree(aside)

    def leftovers(self, oldest: float) -> None:
        """Removes folders of builds whose process died, untouched for ``oldest`` seconds."""
        for name in self._names(cache.TEMPORARY):
            path = self._path(cache.TEMPORARY, name)
            owner = name.rpartition(".")[0]
            if FOLDER.fullmatch(owner) is None or os.path.islink(path):
                self._note(path, name, "it is no build folder of ours", left=True)
                continue
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                if time.time() - os.lstat(path).st_mtime < oldest:
                    continue
                with self._locked(owner) as problem:
                    if not problem and not lock.is_abandoned(path, time.time()):
                        problem = "its builder may be alive"
                    self._note(path, name, problem or "its builder is dead", left=bool(problem))
                    if not problem and not self.dry:
                        shutil.rmtree(path)

    def locks(self) -> None:
        """Removes the lock files of keys that have no folder."""
        for name in self._names(cache.LOCKS):
            if FOLDER.fullmatch(name) and not os.path.lexists(self._path(name)):
                with self._locked(name):
                    pass  # releasing it removes the file

    def tuning(self) -> None:
        """Removes the tables of tuned GEMM algorithms."""
        for name in self._names(_TUNING):
            path = self._path(_TUNING, name)
            if _TABLE.fullmatch(name) is None:
                self._note(path, name, "it is no GEMM table", left=True)
                continue
            self._note(path, name, "all")
            with contextlib.suppress(FileNotFoundError):
                if not self.dry:
                    os.unlink(path)
        if not self.dry:
            with contextlib.suppress(OSError):  # not empty, or not there
                os.rmdir(self._path(_TUNING))

    def key_folders(self) -> list[re.Match[str]]:
        """Returns the matches of the names of the cache's folders of keys, sorted."""
        return [key for name in self._names() if (key := FOLDER.fullmatch(name))]


def remove_all(place: cache.Location, dry: bool = False) -> list[Removed]:
    """Removes all that this project wrote to a cache: entries, leftovers, locks and GEMM tables."""
    cleaner = Cleaner(place, dry)
    for key in cleaner.key_folders():
        cleaner.key(key, lambda entry: "all", "all")
    cleaner.leftovers(0.0)
    cleaner.tuning()
    cleaner.locks()
    for name in cleaner._names():
        known = name in (cache.LOCKS, cache.TEMPORARY, _TUNING)
        if FOLDER.fullmatch(name) is None and not known:
            cleaner._note(cleaner._path(name), name, "it is not ours", left=True)
    return cleaner.found


def remove_stale(place: cache.Location, now: Current, dry: bool = False) -> list[Removed]:
    """Removes stale entries, as ``Current.stale`` defines them, and leftovers over an hour old."""
    cleaner = Cleaner(place, dry)
    for key in cleaner.key_folders():
        known = now.keys.get(key["library"])
        unused = "other sources or flags" if known and key["digits"] not in known else ""
        cleaner.key(key, now.stale, unused)
    cleaner.leftovers(LEFTOVER_AGE)
    cleaner.locks()
    return cleaner.found


def remove_ops(place: cache.Location, ops: Iterable[str], dry: bool = False) -> list[Removed]:
    """Removes all entries of some ops, up to date or not."""
    wanted = set(ops)
    cleaner = Cleaner(place, dry)
    found = {entry.folder: op_of(entry) for entry in entries(place, check=False)}
    for key in cleaner.key_folders():
        if found.get(key[0], re.sub("_(cpu|cuda)$", "", key["library"])) in wanted:
            cleaner.key(key, lambda entry: "named", "named")
    cleaner.locks()
    return cleaner.found
