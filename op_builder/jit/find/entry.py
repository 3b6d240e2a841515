"""Safe opening of what a cache holds: no links, right owner and mode, the published content.

Everything is opened relative to a checked folder descriptor, without following links, and a library
is loaded through the descriptor that was checked.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import warnings
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..backends.archs import Capability, covered
from ..errors import CacheError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LARGEST_TEXT = 1 << 20
_PART = 1 << 18
MANIFEST = "manifest.json"
CPU_ENTRY = "cpu"


class Location(NamedTuple):
    """A cache folder; ``private`` ones are the user's alone, others may also belong to root."""

    path: str
    private: bool
    kind: str  # prebuilt, cache or extra


class OpenedLibrary(NamedTuple):
    """A checked library; the descriptor stays open for the life of the process."""

    fd: int
    path: str
    proc_path: str
    archs: tuple[str, ...]
    kind: str
    file: tuple[int, int]  # device and inode

    def is_open(self) -> bool:
        """Returns True if the descriptor still is this file: a daemon closes what it inherits."""
        try:
            return _identity(self.fd) == self.file
        except OSError:
            return False


class Unsafe(CacheError):
    """A file or folder whose owner or mode lets somebody else write it."""


class Damaged(CacheError):
    """A library that is not the one its manifest describes."""


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


_files_of_number: dict[int, list[tuple[int, int]]] = {}


def _proc_path(fd: int, file: tuple[int, int]) -> str:
    """Returns a path that opens the descriptor, with a slash more for each earlier file of it.

    dlopen takes a library that it knows under the very same path for the one that is asked for,
    even if the descriptor was closed since and its number given to another file.
    """
    files = _files_of_number.setdefault(fd, [])
    if file not in files:
        files.append(file)
    return f"/proc/self/fd{'/' * (files.index(file) + 1)}{fd}"


warned: set[str] = set()


def warn_once(text: str) -> None:
    """Gives a warning once per process."""
    if text not in warned:
        warned.add(text)
        warnings.warn(f"apex_te: {text}", RuntimeWarning, stacklevel=3)


def entry_tag(archs: Iterable[object]) -> str:
    """Returns the folder name of an entry for ``archs``, "cpu" without any."""
    return "_".join(map(str, archs)) or CPU_ENTRY


def entry_folder(library: str, key: str) -> str:
    """Returns the folder name of all entries of one key."""
    return f"{library}-{key[:24]}"


_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))


def _as_safe_as_code(status: os.stat_result, path: str) -> bool:
    """Returns True if a file of this package has no more writers than this module has.

    pip installs with the user's umask: where that is 002, modules and libraries alike belong to a
    user's own group that may write them. What others may write is never safe.
    """
    if not path.startswith(_PACKAGE + os.sep) or status.st_mode & 0o002:
        return False
    code = os.stat(__file__)
    same = (status.st_uid, status.st_gid) == (code.st_uid, code.st_gid)
    return same and not status.st_mode & ~code.st_mode & 0o020


def _check(status: os.stat_result, path: str, private: bool, folder: bool) -> None:
    kind = stat.S_ISDIR if folder else stat.S_ISREG
    if not kind(status.st_mode):
        raise Unsafe(f"{path} must be a {'real folder' if folder else 'regular file'}")
    if not private and _as_safe_as_code(status, path):
        return
    owners = {os.geteuid()} if private else {os.geteuid(), 0}
    if status.st_uid not in owners:
        raise Unsafe(f"{path} must belong to user {os.geteuid()}, it belongs to {status.st_uid}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        raise Unsafe(f"{path} must not be writable by group or others, its mode is {mode:04o}")


def open_folder(location: Location) -> int:
    """Returns the descriptor of a cache folder after the checks.

    Raises:
        FileNotFoundError: it does not exist.
        CacheError: it must not be used.
    """
    try:
        fd = os.open(location.path, _FOLDER)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise Unsafe(f"{location.path} must be a real folder, not a link or a file") from None
        if isinstance(error, FileNotFoundError):
            raise
        raise CacheError(f"{location.path} cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        _check(status, location.path, location.private, folder=True)
        mode = stat.S_IMODE(status.st_mode)
        if location.private and mode & 0o077:
            raise Unsafe(
                f"{location.path} must have mode 0700, it has {mode:04o}"
                f" (chmod 700 {location.path})"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_inside(parent: int, name: str, path: str, private: bool, folder: bool) -> int:
    """Returns the descriptor of a checked file or folder of a checked folder.

    The ``path`` is for messages.
    """
    try:
        fd = os.open(name, _FOLDER if folder else _FILE, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Unsafe(f"{path} must not be a link") from None
        raise
    try:
        _check(os.fstat(fd), path, private, folder)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_text(parent: int, name: str, path: str, private: bool) -> str:
    """Returns the text of a checked file of a checked folder."""
    fd = open_inside(parent, name, path, private, folder=False)
    try:
        return os.read(fd, _LARGEST_TEXT).decode("utf-8", "replace")
    finally:
        os.close(fd)


class _Manifest(NamedTuple):
    """The part of a manifest that a look-up reads."""

    key: str
    archs: list[str]
    size: int
    crc32: int


def _parse(text: str) -> _Manifest:
    """Returns the manifest; raises ``ValueError`` for anything that ``publish`` does not write."""
    try:
        data = json.loads(text)
        found = _Manifest(*(data[name] for name in _Manifest._fields))
    except (KeyError, TypeError, RecursionError):
        raise ValueError("not a manifest") from None
    strings = isinstance(found.archs, list) and all(isinstance(arch, str) for arch in found.archs)
    if not strings or not isinstance(found.size, int) or not isinstance(found.crc32, int):
        raise ValueError("not a manifest")
    return found


def _checksum(fd: int, size: int) -> int | None:
    """Returns the CRC-32 of a file of ``size`` bytes, None if it ends early.

    A CRC takes a third of a SHA-256's time, and against somebody who can write the library no
    checksum beside it helps. Reading, unlike mapping, cannot crash when the file shrinks meanwhile.
    """
    value = offset = 0
    while offset < size:
        part = os.pread(fd, min(_PART, size - offset), offset)
        if not part:
            return None
        value = zlib.crc32(part, value)
        offset += len(part)
    return value


def _open_library(parent: int, name: str, path: str, private: bool, manifest: _Manifest) -> int:
    """Returns the descriptor of the library that the manifest describes; raises ``Damaged``."""
    fd = open_inside(parent, name, path, private, folder=False)
    try:
        size = os.fstat(fd).st_size
        if size != manifest.size:
            raise Damaged(f"{path} is damaged: {size} bytes instead of {manifest.size}")
        if _checksum(fd, size) != manifest.crc32:
            raise Damaged(f"{path} is damaged: its checksum is not the manifest's")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_entry(
    parent: int,
    folder: str,
    location: Location,
    library: str,
    key: str,
    capability: Capability | None = None,
    wanted: Sequence[str] = (),
) -> OpenedLibrary | None:
    """Returns the library of the entry ``folder`` of the opened folder ``parent``, if it serves.

    An entry serves if it covers ``capability`` where that is given, else if it holds all archs of
    ``wanted``.

    Raises:
        Unsafe, Damaged, FileNotFoundError: the entry cannot be used.
        ValueError: the manifest is broken.
    """
    private = location.private
    fd = open_inside(parent, os.path.basename(folder), folder, private, folder=True)
    try:
        manifest = _parse(read_text(fd, MANIFEST, f"{folder}/{MANIFEST}", private))
        if manifest.key != key:
            return None
        archs = manifest.archs
        if capability is not None and not covered(archs, capability):
            return None
        if capability is None and not set(wanted) <= set(archs):
            return None
        path = f"{folder}/{library}.so"
        opened = _open_library(fd, f"{library}.so", path, private, manifest)
    finally:
        os.close(fd)
    file = _identity(opened)
    return OpenedLibrary(opened, path, _proc_path(opened, file), tuple(archs), location.kind, file)
