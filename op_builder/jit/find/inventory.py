"""Entries of the cache folders, with their manifests and what is wrong with them."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any, NamedTuple

from ..errors import CacheError
from . import cache
from .elf import file_problem
from .entry import MANIFEST, open_entry, open_folder, open_inside, read_text

# <library>-<first 24 digits of the key>
FOLDER = re.compile(r"(?P<library>[A-Za-z_]\w*)-(?P<digits>[0-9a-f]{24})")


class Entry(NamedTuple):
    """One published library in a cache."""

    location: cache.Location
    folder: str  # of all entries of the same key
    tag: str  # its archs, or "cpu"
    library: str
    digits: str
    manifest: dict[str, Any]  # empty if it cannot be read
    problem: str  # why it would not be loaded, "" if it would

    @property
    def path(self) -> str:
        """Folder of the entry."""
        return os.path.join(self.location.path, self.folder, self.tag)

    @property
    def archs(self) -> tuple[str, ...]:
        """GPU archs that the entry holds, none for a CPU library."""
        return tuple(str(arch) for arch in self.manifest.get("archs") or ())

    @property
    def name(self) -> str:
        """Library and archs as messages name them."""
        return f"{self.library} {'+'.join(self.archs)}".strip()

    def bytes(self) -> int:
        """Returns the size of all its files."""
        return tree_bytes(self.path)

    def seconds(self) -> float | None:
        """Returns how long the build took."""
        value = self.manifest.get("seconds")
        return float(value) if isinstance(value, (int, float)) else None

    def built(self) -> float:
        """Returns the time of the build, seconds since the epoch; 0 if that is not known."""
        value = self.manifest.get("time")
        return float(value) if isinstance(value, (int, float)) else 0.0


def tree_bytes(path: str) -> int:
    """Returns the size of all files at and below ``path``; links count as themselves."""
    total = 0
    with contextlib.suppress(OSError):
        total += os.lstat(path).st_size if not os.path.isdir(path) else 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _entry(
    parent: int, location: cache.Location, folder: str, tag: str, check: bool
) -> Entry | None:
    """Returns the entry ``tag`` of the opened ``folder``; None for a log or a stored failure."""
    match = FOLDER.fullmatch(folder)
    assert match is not None
    library, path = match["library"], f"{location.path}/{folder}/{tag}"
    manifest: dict[str, Any] = {}
    problem = ""
    try:
        fd = open_inside(parent, tag, path, location.private, folder=True)
        try:
            text = read_text(fd, MANIFEST, f"{path}/{MANIFEST}", location.private)
            found = json.loads(text)
            manifest = found if isinstance(found, dict) else {}
        finally:
            os.close(fd)
        key = str(manifest.get("key"))
        opened = open_entry(parent, path, location, library, key) if check else None
        if not key.startswith(match["digits"]) or (check and opened is None):
            problem = "its manifest is of another entry"
        if opened is not None:
            try:
                problem = problem or file_problem(f"/proc/self/fd/{opened.fd}")
            finally:
                os.close(opened.fd)
    except NotADirectoryError:
        return None
    except (CacheError, OSError, ValueError) as error:
        if isinstance(error, CacheError) and not os.path.isdir(path):
            return None  # a file, such as a log
        problem = str(error) if isinstance(error, CacheError) else f"it is damaged ({error})"
    return Entry(location, folder, tag, library, match["digits"], manifest, problem)


def entries(
    location: cache.Location,
    library: str | None = None,
    check: bool = True,
    key: str | None = None,
) -> list[Entry]:
    """Returns all entries of a cache, or those of one library or one key; none without the cache.

    Args:
        location: the cache.
        library: name of the only library that counts.
        check: reads the libraries, too, and not the manifests alone.
        key: name of the only folder that counts.

    Raises:
        CacheError: the folder must not be used.
    """
    try:
        root = open_folder(location)
    except FileNotFoundError:
        return []
    found: list[Entry] = []
    try:
        for folder in sorted(os.listdir(root)):
            match = FOLDER.fullmatch(folder)
            if (
                match is None
                or library not in (None, match["library"])
                or key not in (None, folder)
            ):
                continue
            path = f"{location.path}/{folder}"
            with contextlib.suppress(OSError, CacheError):
                fd = open_inside(root, folder, path, location.private, folder=True)
                try:
                    tags = sorted(os.listdir(fd))
                    made = (_entry(fd, location, folder, tag, check) for tag in tags)
                    found.extend(entry for entry in made if entry is not None)
                finally:
                    os.close(fd)
    finally:
        os.close(root)
    return found


def op_of(entry: Entry) -> str:
    """Returns the name of the op that the entry is of."""
    known = entry.manifest.get("op")
    return known if isinstance(known, str) else re.sub("_(cpu|cuda)$", "", entry.library)


def last_seconds(location: cache.Location, library: str, tag: str) -> float | None:
    """Returns the seconds that the newest build of a library took, preferring the same archs.

    None if the cache knows of none. It is an estimate for the next build, whatever its sources.
    """
    try:
        found = entries(location, library, check=False)
        known = [entry for entry in found if entry.seconds() is not None]
    except (CacheError, OSError):
        return None
    if not known:
        return None
    return max(known, key=lambda entry: (entry.tag == tag, entry.built())).seconds()
