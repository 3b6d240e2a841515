"""Cache folders: which ones there are, if they can be used, and the entries they hold.

Layout: ``<cache>/<library>-<key>/<archs>/{manifest.json, <library>.so}``; locks in ``locks``,
builds in ``tmp``.
"""

from __future__ import annotations

import errno
import os
import stat
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
    """Returns the entry of ``location`` that serves, opened; None if there is none.

    An entry serves if it covers ``capability`` where that is given, else if it holds all archs of
    ``wanted``. A damaged library is passed over with one warning.

    Raises:
        CacheError: the folder or an entry must not be used.
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
            except Damaged as problem:
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
    """Returns ``APEX_TE_CACHE_DIR``, or None."""
    return os.environ.get("APEX_TE_CACHE_DIR") or None


def default_cache() -> str:
    """Returns the user cache when none is named; a relative or empty XDG_CACHE_HOME is ignored.

    Without a home (none in HOME, none in the user database) it is one that only root can make, and
    never one relative to the current folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        base = os.path.join(home if os.path.isabs(home) else "/", ".cache")
    return os.path.join(base, "apex_te")


def make_private(path: str) -> None:
    """Creates a folder of mode 0700 with its parents, if it does not exist."""
    parent = os.path.dirname(path)
    if parent != path and not os.path.isdir(parent):
        make_private(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    os.chmod(path, 0o700)  # whatever the umask took away


def prepare(location: Location, *inside: str) -> None:
    """Makes and checks a cache and the folders in it that are written to.

    Raises:
        OSError, CacheError: a folder cannot be made or must not be used.
    """
    for attempt in range(3):
        try:
            return _prepare(location, inside)
        except FileNotFoundError:  # a clean-up is at work
            if attempt == 2:
                raise


def _prepare(location: Location, inside: Sequence[str]) -> None:
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
    """Returns the folder of the user's session for what finds no other place, if it is safe."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(runtime):
        return None
    try:
        os.close(open_folder(Location(runtime, True, "cache")))
    except (OSError, CacheError):
        return None
    return Location(os.path.join(runtime, "apex_te"), True, "cache")


_fallback: Location | None = None


def fall_back(reason: str, *inside: str) -> Location:
    """Returns a checked folder of the session, else a fresh one of this process; warns once."""
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
    import atexit
    import shutil
    import tempfile

    try:
        base = os.path.realpath(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise CacheError(f"{reason}, and {error}; name one with APEX_TE_CACHE_DIR") from None
    folder = base
    while True:
        mode = os.stat(folder).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise CacheError(
                f"{reason}, and a temporary one would not be safe: {folder} is writable by all and"
                f" not sticky (chmod +t {folder}); name a folder with APEX_TE_CACHE_DIR"
            )
        if folder == os.path.dirname(folder):
            break
        folder = os.path.dirname(folder)
    path = tempfile.mkdtemp(prefix="apex_te-", dir=base)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child must not
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


def user_cache() -> Location:
    """Returns the user cache for looking up."""
    if _fallback is not None:
        return _fallback
    named = named_cache()
    return Location(os.path.abspath(named) if named else default_cache(), True, "cache")


def writable_cache(*inside: str) -> Location:
    """Returns the user cache for building, with the folders ``inside`` it created and checked.

    Another folder takes its place where it cannot be used, unless the user named it.

    Raises:
        CacheError: the folder that the user named cannot be used.
        OSError: there is no space.
    """
    location = user_cache()
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
    """Yields the places where a library is looked up, in order.

    Args:
        package: folder of the libraries that were installed prebuilt.
    """
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
    """Returns the first entry that serves; unsafe folders are skipped with one warning each.

    Raises:
        CacheError: the folder named in ``APEX_TE_CACHE_DIR`` is unsafe.
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
        warn_once(f"skipping a cache: {problem}")
    return None


def is_writable(path: str) -> bool:
    """Returns True if this user may make files in the folder, or the folder itself."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        return False
    return not os.statvfs(path).f_flag & os.ST_RDONLY
