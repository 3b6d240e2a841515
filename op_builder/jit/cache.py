"""Cache folders: which ones there are, whether they can be trusted, and opening an entry.

Layout: ``<cache>/<library>-<key>/<archs>/{manifest.json, <library>.so}``; locks in ``locks``,
builds in ``tmp``. Everything is opened relative to a checked folder descriptor, without following
links, and a library is loaded through the descriptor that was checked.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from . import env
from .archs import Capability, covered
from .errors import CacheError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LARGEST_TEXT = 1 << 20
MANIFEST = "manifest.json"
CPU_ENTRY = "cpu"


class Location(NamedTuple):
    """A cache folder: ``private`` ones are the user's alone, others may also belong to root."""

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


class Unsafe(CacheError):
    """A file or folder whose owner or mode lets somebody else write it."""


def entry_folder(library: str, key: str) -> str:
    """Folder of all entries of one key."""
    return f"{library}-{key[:24]}"


def _check(status: os.stat_result, path: str, private: bool, folder: bool) -> None:
    kind = stat.S_ISDIR if folder else stat.S_ISREG
    if not kind(status.st_mode):
        raise Unsafe(f"{path} must be a {'real folder' if folder else 'regular file'}")
    owners = {os.geteuid()} if private else {os.geteuid(), 0}
    if status.st_uid not in owners:
        raise Unsafe(f"{path} must belong to user {os.geteuid()}, it belongs to {status.st_uid}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        raise Unsafe(f"{path} must not be writable by group or others, its mode is {mode:04o}")


def open_folder(location: Location) -> int:
    """Descriptor of a cache folder after the checks.

    Raises FileNotFoundError if it does not exist, CacheError if it must not be used.
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


def _open_inside(parent: int, name: str, path: str, private: bool, folder: bool) -> int:
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
    """Text of a checked file of a checked folder."""
    fd = _open_inside(parent, name, path, private, folder=False)
    try:
        return os.read(fd, _LARGEST_TEXT).decode("utf-8", "replace")
    finally:
        os.close(fd)


def _serves(manifest: dict[str, Any], capability: Capability | None, wanted: Sequence[str]) -> bool:
    archs = manifest["archs"]
    if capability is not None:
        return covered(archs, capability)
    return set(wanted) <= set(archs)


def _open_entry(
    parent: int,
    folder: str,
    location: Location,
    library: str,
    key: str,
    capability: Capability | None,
    wanted: Sequence[str],
) -> OpenedLibrary | None:
    private = location.private
    fd = _open_inside(parent, os.path.basename(folder), folder, private, folder=True)
    try:
        manifest = json.loads(read_text(fd, MANIFEST, f"{folder}/{MANIFEST}", private))
        if manifest["key"] != key or not _serves(manifest, capability, wanted):
            return None
        name = f"{library}.so"
        path = f"{folder}/{name}"
        opened = _open_inside(fd, name, path, private, folder=False)
    finally:
        os.close(fd)
    if os.fstat(opened).st_size != manifest["size"]:
        os.close(opened)
        return None
    return OpenedLibrary(
        opened, path, f"/proc/self/fd/{opened}", tuple(manifest["archs"]), location.kind
    )


def find(
    location: Location,
    library: str,
    key: str,
    capability: Capability | None = None,
    wanted: Sequence[str] = (),
) -> OpenedLibrary | None:
    """The entry of ``location`` that serves, opened; None if there is none.

    Serves: covers ``capability`` if given, else holds all archs of ``wanted``.
    Raises CacheError when the folder or the entry must not be used.
    """
    try:
        root = open_folder(location)
    except FileNotFoundError:
        return None
    try:
        folder = f"{location.path}/{entry_folder(library, key)}"
        try:
            fd = _open_inside(
                root, entry_folder(library, key), folder, location.private, folder=True
            )
        except FileNotFoundError:
            return None
        try:
            for name in sorted(os.listdir(fd)):
                if name != CPU_ENTRY and not name[0].isdigit():
                    continue  # a log or a stored failure
                try:
                    found = _open_entry(
                        fd, f"{folder}/{name}", location, library, key, capability, wanted
                    )
                except (FileNotFoundError, ValueError, KeyError, TypeError):
                    continue  # vanished meanwhile, or written by something else
                if found is not None:
                    return found
        finally:
            os.close(fd)
    finally:
        os.close(root)
    return None


def named_cache() -> str | None:
    """APEX_TE_CACHE_DIR, or None."""
    return os.environ.get("APEX_TE_CACHE_DIR") or None


def default_cache() -> str:
    """The user cache when none is named; a relative or empty XDG_CACHE_HOME does not count."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return os.path.join(base, "apex_te")


def make_private(path: str) -> None:
    """Create a folder of mode 0700 with its parents, if it does not exist."""
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        os.makedirs(parent, 0o700, exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    os.chmod(path, 0o700)  # whatever the umask took away


_fallback: Location | None = None


def _make_fallback(reason: str) -> Location:
    """A checked folder of the session, else a fresh one of this process; warns once."""
    global _fallback
    if _fallback is not None:
        return _fallback
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    chosen = None
    if os.path.isabs(runtime):
        candidate = Location(os.path.join(runtime, "apex_te"), True, "cache")
        try:
            os.close(open_folder(Location(runtime, True, "cache")))
            make_private(candidate.path)
            _check_writable(candidate)
            chosen = candidate
        except (OSError, CacheError):
            chosen = None
    if chosen is None:
        chosen = Location(_fresh_folder(), True, "cache")
    warnings.warn(
        f"apex_te: {reason}; libraries built now go to {chosen.path}"
        " (name a folder with APEX_TE_CACHE_DIR)",
        RuntimeWarning,
        stacklevel=2,
    )
    _fallback = chosen
    return chosen


def _fresh_folder() -> str:
    import atexit
    import shutil
    import tempfile

    path = tempfile.mkdtemp(prefix="apex_te-")
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child must not
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


def _check_writable(location: Location) -> None:
    fd = open_folder(location)
    os.close(fd)
    if not os.access(location.path, os.W_OK | os.X_OK, effective_ids=True):
        raise CacheError(f"{location.path} is not writable")


def user_cache() -> Location:
    """The user cache for looking up; raises CacheError if the user named an unsafe one."""
    if _fallback is not None:
        return _fallback
    named = named_cache()
    return Location(os.path.abspath(named) if named else default_cache(), True, "cache")


def writable_cache() -> Location:
    """The user cache for building: created, checked; falls back unless the user named it."""
    location = user_cache()
    try:
        make_private(location.path)
        _check_writable(location)
    except (OSError, CacheError) as error:
        text = str(error) if isinstance(error, CacheError) else f"{location.path}: {error.strerror}"
        if named_cache():
            raise CacheError(f"APEX_TE_CACHE_DIR={named_cache()} cannot be used: {text}") from None
        return _make_fallback(f"the default cache cannot be used: {text}")
    return location


def locations(package: str) -> Iterator[Location]:
    """Where a library is looked up, in order; ``package`` is the installed prebuilt folder."""
    yield Location(package, False, "prebuilt")
    yield user_cache()
    for path in os.environ.get("APEX_TE_CACHE_PATH", "").split(":"):
        if os.path.isabs(path):
            yield Location(os.path.normpath(path), False, "extra")


_warned: set[str] = set()


def look_up(
    package: str,
    library: str,
    key: str,
    capability: Capability | None = None,
    wanted: Sequence[str] = (),
) -> OpenedLibrary | None:
    """The first entry that serves; unsafe folders are skipped with one warning each.

    Raises CacheError if the folder named in APEX_TE_CACHE_DIR is unsafe.
    """
    for location in locations(package):
        try:
            found = find(location, library, key, capability, wanted)
        except OSError as error:
            problem: Exception = CacheError(f"{location.path}: {error.strerror}")
        except CacheError as error:
            problem = error
        else:
            if found is not None:
                return found
            continue
        if location.kind == "cache" and named_cache():
            raise CacheError(
                f"APEX_TE_CACHE_DIR={named_cache()} cannot be used: {problem}"
            ) from None
        if location.kind == "cache" and not env.jit_disabled():
            continue  # the build that follows falls back to another folder and says so
        if str(problem) not in _warned:
            _warned.add(str(problem))
            warnings.warn(f"apex_te: skipping a cache: {problem}", RuntimeWarning, stacklevel=2)
    return None
