"""Safe opening of cache entries: no links, safe owner and mode, the content that was published.

Everything is opened relative to a checked folder descriptor, without following links, and a library
is loaded through the descriptor that was checked.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import warnings
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..backends.archs import Capability, covered
from ..cpu_features import missing
from ..errors import CacheError
from ..platform import glibc
from ..text import printable

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LARGEST_TEXT = 1 << 20
_PART = 1 << 18
MANIFEST = "manifest.json"
CPU_ENTRY = "cpu"


class Location(NamedTuple):
    """A cache folder of ``kind`` "prebuilt", "cache" (the user's) or "extra".

    If ``private``, all its files must belong to this user; else root may own files, too.
    """

    path: str
    private: bool
    kind: str


class OpenedLibrary(NamedTuple):
    """A checked library, opened for the dispatcher or Python to load.

    Attributes:
        fd: file descriptor, which must stay open if the library is to be loaded.
        path: path of the file, for messages.
        proc_path: path below ``/proc/self/fd`` that loads the opened file, whatever is at ``path``.
        archs: GPU archs that the library holds; none for one without GPU code.
        kind: "prebuilt", "cache" or "extra", the ``Location.kind`` of the library's cache folder.
        file: device and inode number of the file.
    """

    fd: int
    path: str
    proc_path: str
    archs: tuple[str, ...]
    kind: str
    file: tuple[int, int]

    def is_open(self) -> bool:
        """Returns True if ``fd`` is still open on the library's file.

        A process that becomes a daemon closes the descriptors that it inherits.
        """
        try:
            return _identity(self.fd) == self.file
        except OSError:
            return False


class Unsafe(CacheError):
    """A file or folder that another user owns or may write, or that is a link."""


class Damaged(CacheError):
    """A library whose size or checksum is not what its manifest says."""


class Unfit(CacheError):
    """A library that this machine's CPU or C library does not run, or that ld.so has refused."""


refused: dict[tuple[int, int], str] = {}  # what ld.so said of a file, by ``OpenedLibrary.file``


def _identity(fd: int) -> tuple[int, int]:
    """Returns device and inode number of an opened file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _proc_path(fd: int, file: tuple[int, int]) -> str:
    """Returns a path that opens the descriptor, differs for every file and never exceeds 300 bytes.

    dlopen returns a library that it has loaded under the same path without opening the file, even
    if the descriptor's number belongs to another file by now. So the path spells the file's
    identity, one binary digit for each of the separators "/" and "/./", which the kernel ignores.
    """
    device, inode = file
    digits = f"{device:b}{inode:064b}"
    return f"/proc/self/fd/{digits.replace('0', '/').replace('1', './')}{fd}"


warned: set[str] = set()


def warn_once(text: str) -> None:
    """Gives a ``RuntimeWarning`` with ``text``, once per process."""
    if text not in warned:
        warned.add(text)
        try:
            warnings.warn(printable(f"apex_te: {text}"), RuntimeWarning, stacklevel=3)
        except Warning:  # warnings are errors here
            raise
        except Exception:  # whatever has replaced sys.stderr cannot show it
            pass


def entry_tag(archs: Iterable[object]) -> str:
    """Returns the folder name of a cache entry: its archs joined, or "cpu" without GPU code."""
    return "_".join(map(str, archs)) or CPU_ENTRY


def entry_folder(library: str, key: str) -> str:
    """Returns the name of a key's folder in a cache: ``<library>-<first digits of the key>``."""
    return f"{library}-{key[:24]}"


_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))


def _as_safe_as_code(status: os.stat_result, path: str) -> bool:
    """Returns True if a file of this package has no more writers than this module has.

    With umask 002, pip makes files that the user's own group may write.
    """
    if not path.startswith(_PACKAGE + os.sep) or status.st_mode & 0o002:
        return False
    code = os.stat(__file__)
    same = (status.st_uid, status.st_gid) == (code.st_uid, code.st_gid)
    return same and not status.st_mode & ~code.st_mode & 0o020


def _check(status: os.stat_result, path: str, private: bool, folder: bool) -> None:
    """Raises ``Unsafe`` if another user may write a file or folder."""
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
    """Checks owner and mode of a cache folder and returns its descriptor."""
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
    """Checks owner and mode of a file or folder in a checked folder and returns its descriptor."""
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
    """Returns the text of a file in a checked folder, at most its first MiB."""
    fd = open_inside(parent, name, path, private, folder=False)
    try:
        return os.read(fd, _LARGEST_TEXT).decode("utf-8", "replace")
    finally:
        os.close(fd)


class _Manifest(NamedTuple):
    """Part of a manifest that a look-up reads; "" stands for what it does not say.

    ``cpu_features`` are those beyond the baseline of ``machine``; ``glibc`` is the oldest that
    works.
    """

    key: str
    archs: list[str]
    size: int
    crc32: int
    machine: str = ""
    cpu_features: Sequence[str] = ()
    glibc: str = ""

    def unfit(self) -> str:
        """Returns the reason why this machine cannot run the library, "" if there is none."""
        if self.machine != os.uname().machine:
            return ""
        if lacking := missing(self.cpu_features) if self.cpu_features else []:
            return f"was compiled for CPUs with {' '.join(lacking)}"
        here = glibc() if self.glibc else ()
        if here and tuple(map(int, self.glibc.split("."))) > here:
            return f"needs glibc {self.glibc}, this system has {'.'.join(map(str, here))}"
        return ""


def _parse(text: str) -> _Manifest:
    """Returns the parsed text of a manifest."""
    try:
        data = json.loads(text)
        found = _Manifest(**{name: data[name] for name in _Manifest._fields if name in data})
    except (KeyError, TypeError, RecursionError):
        raise ValueError("not a manifest") from None
    lists = (found.archs, found.cpu_features or [])
    strings = all(
        isinstance(each, list) and all(isinstance(x, str) for x in each) for each in lists
    )
    version = isinstance(found.glibc, str) and re.fullmatch(r"(\d+(\.\d+)*)?", found.glibc)
    numbers = isinstance(found.size, int) and isinstance(found.crc32, int)
    if not strings or not version or not numbers:
        raise ValueError("not a manifest")
    return found


def _checksum(fd: int, size: int) -> int | None:
    """Returns the CRC-32 of the first ``size`` bytes of a file, None if the file is shorter.

    A CRC takes a third of a SHA-256's time, and no checksum helps against those who can write the
    library. Reading, unlike mapping, cannot crash when the file shrinks meanwhile.
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
    """Returns the descriptor of a library after comparing it with its manifest."""
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
    """Returns the opened library of a cache entry; None if key or archs are not those wanted."""
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
        if reason := manifest.unfit():
            raise Unfit(f"{path} {reason}")
        opened = _open_library(fd, f"{library}.so", path, private, manifest)
    finally:
        os.close(fd)
    file = _identity(opened)
    if file in refused:
        os.close(opened)
        raise Unfit(f"{path} cannot be loaded here ({refused[file]})")
    return OpenedLibrary(opened, path, _proc_path(opened, file), tuple(archs), location.kind, file)
