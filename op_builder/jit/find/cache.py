"""Cache folders: the order in which they are searched, checks of their safety, search for an entry.

Layout: ``<cache>/<library>-<key>/<archs>/{manifest.json, <library>.so}``, where the innermost
folder is an entry; lock files in ``<cache>/locks``, folders of running builds in ``<cache>/tmp``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from .. import env
from ..backends.archs import Capability
from ..errors import CacheError
from .entry import (
    CPU_ENTRY,
    MANIFEST,
    Damaged,
    Location,
    OpenedLibrary,
    Unfit,
    Unsafe,
    entry_folder,
    entry_tag,
    open_entry,
    open_folder,
    open_inside,
    read_text,
    warn_once,
    warned,
)
from .parents import parent_problem

__all__ = [
    "CPU_ENTRY",
    "MANIFEST",
    "Location",
    "OpenedLibrary",
    "Unsafe",
    "entry_folder",
    "entry_tag",
    "read_text",
    "warned",
]

LOCKS, TEMPORARY = "locks", "tmp"


def find(
    location: Location,
    library: str,
    key: str,
    capability: Capability | None = None,
    wanted: Sequence[str] = (),
) -> OpenedLibrary | None:
    """Returns the opened library that a cache folder holds for a key, None if it holds none.

    It must run on ``capability`` or, if that is None, hold the archs ``wanted``. A library that is
    damaged or cannot run on this machine is passed over with one warning.
    """
    try:
        root = open_folder(location)
    except FileNotFoundError:
        return None
    name = entry_folder(library, key)
    folder = f"{location.path}/{name}"
    try:
        fd = open_inside(root, name, folder, location.private, folder=True)
    except FileNotFoundError:
        return None
    finally:
        os.close(root)
    try:
        for tag in sorted(os.listdir(fd)):
            if tag != CPU_ENTRY and not (tag[0].isdigit() or tag.startswith("gfx")):
                continue  # a log or a stored failure
            try:
                found = open_entry(
                    fd, f"{folder}/{tag}", location, library, key, capability, wanted
                )
            except (Damaged, Unfit) as problem:
                warn_once(f"{problem}; it is not used")
            except ValueError:
                continue  # written by something else
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):  # vanished meanwhile
                    raise
            else:
                if found is not None:
                    return found
    finally:
        os.close(fd)
    return None


def named_cache() -> str | None:
    """Returns the user cache that ``APEX_TE_CACHE_DIR`` names, None if it is unset or empty."""
    return os.environ.get("APEX_TE_CACHE_DIR") or None


def default_cache() -> str:
    """Returns the path of the user cache that is used if ``APEX_TE_CACHE_DIR`` is not set.

    For a user without a home folder it is one that only root can make, never a relative path.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        base = os.path.join(home if os.path.isabs(home) else "/", ".cache")
    return os.path.join(base, "apex_te")


def make_private(path: str) -> None:
    """Creates a folder and its missing parents with mode 0700; leaves existing folders alone."""
    parent = os.path.dirname(path)
    if parent != path and not os.path.isdir(parent):
        make_private(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    os.chmod(path, 0o700)  # whatever the umask took away


def prepare(location: Location, *inside: str) -> None:
    """Creates a cache folder and folders in it if missing, and checks that they are safe."""
    for attempt in range(3):
        try:
            return _prepare(location, inside)
        except FileNotFoundError:  # a clean-up is at work
            if attempt == 2:
                raise


def _prepare(location: Location, inside: Sequence[str]) -> None:
    """Creates and checks the folders of ``prepare`` once."""
    make_private(location.path)
    root = open_folder(location)
    try:
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=root, effective_ids=True):
            raise CacheError(f"{location.path} is not writable")
        for name in inside:
            path = f"{location.path}/{name}"
            make_private(path)
            os.close(open_inside(root, name, path, True, folder=True))
    finally:
        os.close(root)


def runtime_cache() -> Location | None:
    """Returns the cache folder in ``XDG_RUNTIME_DIR``, perhaps missing; None if unset or unsafe."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(runtime) or parent_problem(runtime):
        return None
    try:
        os.close(open_folder(Location(runtime, True, "cache")))
    except (OSError, CacheError):
        return None
    return Location(os.path.join(runtime, "apex_te"), True, "cache")


_fallback: Location | None = None


def fall_back(reason: str, *inside: str) -> Location:
    """Returns a cache folder to build in instead of the user cache, with one warning per process.

    It lies in ``XDG_RUNTIME_DIR``, or is a temporary folder that is removed when the process ends.
    """
    global _fallback
    if _fallback is None:
        chosen = runtime_cache()
        try:
            if chosen is not None:
                prepare(chosen, *inside)
        except (OSError, CacheError):
            chosen = None
        if chosen is None:
            chosen = Location(_fresh_folder(reason), True, "cache")
        warn_once(
            f"{reason}; libraries built now go to {chosen.path}"
            " (name a folder with APEX_TE_CACHE_DIR)"
        )
        _fallback = chosen
    prepare(_fallback, *inside)
    return _fallback


def _fresh_folder(reason: str) -> str:
    """Creates a temporary folder that is removed when this process ends."""
    import atexit
    import shutil
    import tempfile

    try:
        base = os.path.realpath(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise CacheError(f"{reason}, and {error}; name one with APEX_TE_CACHE_DIR") from None
    if problem := parent_problem(os.path.join(base, "apex_te")):
        raise CacheError(
            f"{reason}, and a temporary one would not be safe: {problem};"
            " name a folder with APEX_TE_CACHE_DIR"
        )
    path = tempfile.mkdtemp(prefix="apex_te-", dir=base)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child must not
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


def user_cache() -> Location:
    """Returns the user cache to search, or the folder that replaced it in this process."""
    if _fallback is not None:
        return _fallback
    named = named_cache()
    return Location(os.path.abspath(named) if named else default_cache(), True, "cache")


def writable_cache(*inside: str) -> Location:
    """Returns the user cache to build in, created and checked.

    If the default one cannot be used, or others could exchange a folder above it, it is that of
    ``fall_back``; a folder that ``APEX_TE_CACHE_DIR`` names gets a warning in the second case.
    """
    location = user_cache()
    if _fallback is None and (problem := parent_problem(location.path)):
        if not named_cache():
            return fall_back(f"the default cache cannot be used: {problem}", *inside)
        warn_once(f"APEX_TE_CACHE_DIR={named_cache()} is not safe while it is built in: {problem}")
    try:
        prepare(location, *inside)
    except (OSError, CacheError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = str(error) if isinstance(error, CacheError) else f"{location.path}: {error.strerror}"
        if named_cache():
            raise CacheError(f"APEX_TE_CACHE_DIR={named_cache()} cannot be used: {text}") from None
        return fall_back(f"the default cache cannot be used: {text}", *inside)
    return location


def locations(package: str) -> Iterator[Location]:
    """Yields the cache folders to search: prebuilt, user's, session's, ``APEX_TE_CACHE_PATH``."""
    yield Location(package, False, "prebuilt")
    yield user_cache()
    if named_cache() is None and _fallback is None:
        session = runtime_cache()
        if session is not None:
            yield session
    for path in os.environ.get("APEX_TE_CACHE_PATH", "").split(":"):
        if os.path.isabs(path):
            yield Location(os.path.normpath(path), False, "extra")


def look_up(
    package: str,
    library: str,
    key: str,
    capability: Capability | None = None,
    wanted: Sequence[str] = (),
) -> OpenedLibrary | None:
    """Returns the opened library of the first cache folder with a usable one, else None."""
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
        warn_once(f"skipping a cache: {problem}")
    return None


def is_writable(path: str) -> bool:
    """Returns True if this user may create files in folder ``path``, or the folder if missing."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        return False
    return not os.statvfs(path).f_flag & os.ST_RDONLY
