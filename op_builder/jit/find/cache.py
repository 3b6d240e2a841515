"""Cache folders: how they are searched, and that nobody else can put a library into them.

Layout: ``<cache>/<library>-<key>/<archs>/{manifest.json, <library>.so}``, where the innermost
folder is an entry; lock files in ``<cache>/locks``, folders of running builds in ``<cache>/tmp``.
Everything is opened relative to a checked folder descriptor, without following links, and a library
is loaded through the descriptor that was checked.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import json
import os
import pwd
import re
import stat
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...spec import OpSpec
from .. import env
from ..backends.archs import Arch, Capability, choose, covered, named_arch_list
from ..errors import CacheError
from ..platform import glibc, missing_features
from ..text import printable
from .key import key_of

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
        if lacking := missing_features(self.cpu_features) if self.cpu_features else []:
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


_MOST_LINKS = 40  # as many as Linux follows
_WHOLE_NAMESPACE = ["0", "0", "4294967295"]


def _trusted_owners() -> set[int]:
    """Returns this user, root, and the number of users outside of a user namespace.

    The host's root has that number, too, in a container without privileges.
    """
    owners = {os.geteuid(), 0}
    with contextlib.suppress(OSError, ValueError), open("/proc/self/uid_map") as file:
        if file.read().split() != _WHOLE_NAMESPACE:
            with open("/proc/sys/fs/overflowuid") as number:
                owners.add(int(number.read()))
    return owners


def _is_own_group(gid: int) -> bool:
    """Returns True if a group is this user's alone, as most distributions make one per user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _has_acl(path: str) -> bool:
    """Returns True if a folder has an access list, whose members its mode does not tell."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access", follow_symlinks=False))
    except OSError:
        return False


def _problem(path: str, owners: set[int]) -> str:
    """Returns the reason why another user could rename what is in a folder, "" if none could."""
    status = os.lstat(path)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in owners:
        return f"{path} belongs to user {status.st_uid}, who could exchange what is in it"
    if not stat.S_ISDIR(status.st_mode) or mode & stat.S_ISVTX:
        return ""
    if mode & 0o002:
        return f"{path} is writable by all and not sticky (chmod +t {path})"
    if mode & 0o020 and (_has_acl(path) or not _is_own_group(status.st_gid)):
        return f"{path} is writable by group {status.st_gid} and not sticky (chmod g-w {path})"
    return ""


def parent_problem(path: str) -> str:
    """Returns the reason why another user could exchange a folder above ``path``, "" if none could.

    Folders behind links count. ``path`` itself is not checked, nor are missing folders.
    """
    owners, folder, links = _trusted_owners(), "/", 0
    rest = [name for name in reversed(path.split("/")) if name not in ("", ".")]
    try:
        while rest:
            if problem := _problem(folder, owners):
                return problem
            name = rest.pop()
            inside = os.path.dirname(folder) if name == ".." else os.path.join(folder, name)
            if not rest:
                break
            if not os.path.islink(inside):
                folder = inside
                continue
            if problem := _problem(inside, owners):
                return problem
            links += 1
            if links > _MOST_LINKS:
                return f"{path} has more than {_MOST_LINKS} links"
            target = os.readlink(inside)
            folder = "/" if target.startswith("/") else folder
            rest += [part for part in reversed(target.split("/")) if part not in ("", ".")]
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    return ""


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


def wanted_archs(spec: OpSpec, device: str, capability: Capability | None) -> tuple[Arch, ...]:
    """Returns the archs to build a library for, none if it has no GPU code."""
    if not spec.needs_archs(device):
        return ()
    return choose(spec.NAME, spec.min_arch, spec.specific_archs(), capability)


def look_up(
    spec: OpSpec,
    device: str,
    capability: Capability | None = None,
    wanted: Sequence[str] | None = None,
) -> OpenedLibrary | None:
    """Returns the opened library of the first cache folder with a usable one, else None.

    Without ``capability`` it must hold the archs ``wanted``, by default those that the environment
    lists, if any.
    """
    key, library = key_of(spec, device), spec.library_name(device)
    if wanted is None:
        # without a device and a list any arch will do: opening is possible everywhere
        named = capability is None and spec.needs_archs(device) and named_arch_list() is not None
        wanted = [str(arch) for arch in wanted_archs(spec, device, None)] if named else ()
    for location in locations(spec.prebuilt_folder):
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
