"""Lists of the entries in cache folders, and the dispatchers there that are for other Pythons."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import Any, NamedTuple

from ...spec import OpSpec
from ..backends import pythons
from ..backends.pythons import DispatcherSpec
from ..errors import CacheError
from ..platform import soabi
from . import cache
from .cache import Folder, open_entry, open_folder
from .elf import file_problem
from .key import key_of

# <library>-<first 24 digits of the key>
FOLDER = re.compile(r"(?P<library>[A-Za-z_]\w*)-(?P<digits>[0-9a-f]{24})")

_TEXTS = ("key", "op", "device", "machine", "compiler")


class Entry(NamedTuple):
    """One entry of a cache folder: a library and its manifest, empty if that cannot be read."""

    location: cache.Location
    folder: str
    tag: str
    library: str
    digits: str
    manifest: dict[str, Any]
    problem: str

    @property
    def path(self) -> str:
        """Path of the entry's folder."""
        return os.path.join(self.location.path, self.folder, self.tag)

    @property
    def archs(self) -> tuple[str, ...]:
        """Names of the GPU archs that the library holds; none without GPU code."""
        return tuple(str(arch) for arch in self.manifest.get("archs") or ())

    @property
    def name(self) -> str:
        """Name of the library and its archs, for messages."""
        return f"{self.library} {'+'.join(self.archs)}".strip()

    def bytes(self) -> int:
        """Returns the size of all files of the entry."""
        return tree_bytes(self.path)

    def seconds(self) -> float | None:
        """Returns the duration of the build in seconds, None if the manifest does not say."""
        seconds = self.manifest.get("seconds")
        return None if seconds is None else float(seconds)

    def built(self) -> float:
        """Returns the time of the build in seconds since the epoch, 0 if it is not recorded."""
        return float(self.manifest.get("time", 0))


def tree_bytes(path: str) -> int:
    """Returns the size of a file, or of all files below a folder; links count as themselves."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    total = 0
    for file in files if os.path.isdir(path) else [path]:
        with contextlib.suppress(OSError):
            total += os.lstat(file).st_size
    return total


def _fits(name: str, value: Any) -> bool:
    if name in ("seconds", "time", "size"):
        return isinstance(value, (int, float)) and 0 <= value < 1e15
    if name in ("archs", "flags", "extras"):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if name == "sources":
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    return name not in _TEXTS or isinstance(value, str)


def _entry(parent: Folder, folder: str, tag: str, check: bool) -> Entry | None:
    """Returns the cache entry ``tag`` of a key's folder; None for a file, such as a log."""
    match = FOLDER.fullmatch(folder)
    assert match is not None
    library, digits = match["library"], match["digits"]
    manifest: dict[str, Any] = {}
    problem = ""
    try:
        with parent.folder(tag) as entry:
            read = json.loads(entry.read_text(cache.MANIFEST))
        if not isinstance(read, dict) or not all(_fits(*item) for item in read.items()):
            raise ValueError("not a manifest")
        manifest, key = read, str(read.get("key"))
        opened = open_entry(parent, tag, library, key) if check else None
        if not key.startswith(digits) or (check and opened is None):
            problem = "its manifest is of another entry"
        if opened is not None:
            try:
                problem = problem or file_problem(f"/proc/self/fd/{opened.fd}")
            finally:
                os.close(opened.fd)
    except NotADirectoryError:
        return None
    except (CacheError, OSError, ValueError, RecursionError) as error:
        if isinstance(error, CacheError) and not os.path.isdir(f"{parent.path}/{tag}"):
            return None  # a file, such as a log
        problem = str(error) if isinstance(error, CacheError) else f"it is damaged ({error})"
    return Entry(parent.location, folder, tag, library, digits, manifest, problem)


def entries(
    location: cache.Location, library: str | None = None, check: bool = True, key: str | None = None
) -> list[Entry]:
    """Returns the cache entries in a cache folder, an empty list if the folder does not exist."""
    found: list[Entry] = []
    with contextlib.suppress(FileNotFoundError), open_folder(location) as root:
        for name in root.names():
            match = FOLDER.fullmatch(name)
            if match is None or library not in (None, match["library"]) or key not in (None, name):
                continue
            with contextlib.suppress(OSError, CacheError), root.folder(name) as folder:
                made = (_entry(folder, name, tag, check) for tag in folder.names())
                found.extend(entry for entry in made if entry is not None)
    return found


def op_of(entry: Entry) -> str:
    """Returns the op's name of a cache entry, from the manifest or else from the library's name."""
    known = entry.manifest.get("op")
    return known if isinstance(known, str) else re.sub("_(cpu|cuda)$", "", entry.library)


def last_seconds(location: cache.Location, library: str, tag: str) -> float | None:
    """Returns the seconds of a library's newest build, of ``tag`` if possible, or None."""
    try:
        found = entries(location, library, check=False)
    except (CacheError, OSError):
        return None
    known = [entry for entry in found if entry.seconds() is not None]
    newest = max(known, key=lambda entry: (entry.tag == tag, entry.built()), default=None)
    return newest.seconds() if newest else None


def key_for(spec: DispatcherSpec, manifest: dict[str, Any]) -> tuple[str, str]:
    """Returns the up-to-date key and the Python of a manifest's dispatcher; "" for unknown ones."""
    extras = manifest.get("extras")
    if not (isinstance(extras, list) and len(extras) == 1 and isinstance(extras[0], str)):
        return "", ""
    python = pythons.Python(pythons.name_of(extras[0]), extras[0], "")
    return key_of(DispatcherSpec(spec.root, python), "cpu"), python.version


def prebuilt_for(spec: DispatcherSpec) -> list[str]:
    """Returns the Python versions for which the installed package has an up-to-date dispatcher."""
    found = set()
    place = cache.Location(spec.prebuilt_folder, False, "prebuilt")
    with contextlib.suppress(CacheError, OSError):
        for entry in entries(place, spec.library_name("cpu"), check=False):
            key, version = key_for(spec, entry.manifest)
            if version and key.startswith(entry.digits):
                found.add(version)
    return sorted(found, key=lambda version: (int(version[2:].rstrip("t")), version))


def why_missing(spec: OpSpec) -> str:
    """Returns why ``spec``, this Python's dispatcher, is not prebuilt but others are, or ""."""
    if not isinstance(spec, DispatcherSpec) or spec.python or not (others := prebuilt_for(spec)):
        return ""
    return (
        f"this installation's dispatchers are for Python {', '.join(others)}, this is Python"
        f" {pythons.name_of(soabi())} (a wheel carries those that {pythons.VARIABLE} names)"
    )
