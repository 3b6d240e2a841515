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
Gpu = Capability | None  # that a library must run on


class Location(NamedTuple):
    """A cache folder."""

    path: str
    private: bool  # all its files must belong to this user; else root may own files, too
    kind: str  # "prebuilt", "cache" (the user's) or "extra"


class OpenedLibrary(NamedTuple):
    """A checked library, opened for the dispatcher or Python to load."""

    fd: int  # which must stay open if the library is to be loaded
    path: str  # for messages
    proc_path: str  # below /proc/self/fd: it loads the opened file, whatever is at ``path``
    archs: tuple[str, ...]  # none without GPU code
    kind: str  # ``Location.kind`` of its cache folder
    file: tuple[int, int]  # device and inode number

    def is_open(self) -> bool:
        """Returns True if ``fd`` is still open on the file: a daemon closes what it inherits."""
        with contextlib.suppress(OSError):
            return _identity(self.fd) == self.file
        return False


class Unsafe(CacheError):
    """A file or folder that another user owns or may write, or that is a link."""


class Damaged(CacheError):
    """A library whose size or checksum is not what its manifest says."""


class Unfit(CacheError):
    """A library that this machine's CPU or C library does not run, or that ld.so has refused."""


refused: dict[tuple[int, int], str] = {}  # what ld.so said of a file, by ``OpenedLibrary.file``


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _proc_path(fd: int, file: tuple[int, int]) -> str:
    """Returns a path that opens the descriptor and differs for every file, below 300 bytes."""
    # dlopen returns a library that it has loaded under the same path without opening the file, even
    # if the number belongs to another file by now. So the path spells the file's identity, a binary
    # digit for each of the separators "/" and "/./", which the kernel ignores.
    digits = f"{file[0]:b}{file[1]:064b}"
    return f"/proc/self/fd/{digits.replace('0', '/').replace('1', './')}{fd}"


warned: set[str] = set()


def warn_once(text: str) -> None:
    """Gives a ``RuntimeWarning`` with ``text``, once per process."""
    if text not in warned:
        warned.add(text)
        try:
            warnings.warn(printable(f"apex_te: {text}"), RuntimeWarning, stacklevel=3)
        except Exception as error:  # whatever has replaced sys.stderr cannot show it
            if isinstance(error, Warning):  # warnings are errors here
                raise


def entry_tag(archs: Iterable[object]) -> str:
    """Returns the folder name of a cache entry: its archs joined, or "cpu" without GPU code."""
    return "_".join(map(str, archs)) or CPU_ENTRY


def entry_folder(library: str, key: str) -> str:
    """Returns the name of a key's folder in a cache: ``<library>-<first digits of the key>``."""
    return f"{library}-{key[:24]}"


_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))


def _as_safe_as_code(status: os.stat_result, path: str) -> bool:
    """Returns True if all who may write a file of this package may write this module, too."""
    # with umask 002, pip makes files that the user's own group may write
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


class Folder:
    """A checked folder of a cache, open until the end of a ``with`` block."""

    def __init__(self, fd: int, path: str, location: Location) -> None:
        self.fd, self.path, self.location = fd, path, location
        try:
            status = os.fstat(fd)
            _check(status, path, location.private, folder=True)
            mode = stat.S_IMODE(status.st_mode)
            if path == location.path and location.private and mode & 0o077:
                raise Unsafe(f"{path} must have mode 0700, it has {mode:04o} (chmod 700 {path})")
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)

    def names(self) -> list[str]:
        """Returns the sorted names of the files and folders in it."""
        return sorted(os.listdir(self.fd))

    def _open(self, name: str, flags: int) -> int:
        try:
            return os.open(name, flags, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise Unsafe(f"{self.path}/{name} must not be a link") from None
            raise

    def folder(self, name: str) -> Folder:
        """Returns a folder in it, opened and checked."""
        return Folder(self._open(name, _FOLDER), f"{self.path}/{name}", self.location)

    def file(self, name: str) -> int:
        """Returns the descriptor of a file in it, opened and checked."""
        fd = self._open(name, _FILE)
        try:
            _check(os.fstat(fd), f"{self.path}/{name}", self.location.private, folder=False)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read_text(self, name: str) -> str:
        """Returns the text of a file in it, at most its first MiB."""
        with open(self.file(name), "rb") as file:
            return file.read(_LARGEST_TEXT).decode("utf-8", "replace")


def open_folder(location: Location) -> Folder:
    """Opens and checks a cache folder."""
    try:
        fd = os.open(location.path, _FOLDER)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise Unsafe(f"{location.path} must be a real folder, not a link or a file") from None
        if isinstance(error, FileNotFoundError):
            raise
        raise CacheError(f"{location.path} cannot be opened: {error.strerror}") from None
    return Folder(fd, location.path, location)


class _Manifest(NamedTuple):
    """Part of a manifest that a look-up reads; "" stands for what it does not say."""

    key: str
    archs: list[str]
    size: int
    crc32: int
    machine: str = ""
    cpu_features: Sequence[str] = ()  # beyond the baseline of ``machine``
    glibc: str = ""  # the oldest that works

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
    try:
        data = json.loads(text)
        found = _Manifest(**{name: data[name] for name in _Manifest._fields if name in data})
    except (KeyError, TypeError, RecursionError):
        raise ValueError("not a manifest") from None
    texts, *lists = [found.glibc], found.archs, found.cpu_features or []
    strings = all(isinstance(each, list) and all(isinstance(x, str) for x in each)
                  for each in (texts, *lists))  # fmt: skip
    numbers = isinstance(found.size, int) and isinstance(found.crc32, int)
    if not strings or not numbers or not re.fullmatch(r"(\d+(\.\d+)*)?", found.glibc):
        raise ValueError("not a manifest")
    return found


def _checksum(fd: int, size: int) -> int | None:
    """Returns the CRC-32 of the first ``size`` bytes of a file, None if the file is shorter."""
    # not a hash: nothing helps against those who can write it; not mapped: it may shrink meanwhile
    value = offset = 0
    while offset < size:
        part = os.pread(fd, min(_PART, size - offset), offset)
        if not part:
            return None
        value = zlib.crc32(part, value)
        offset += len(part)
    return value


def _open_library(entry: Folder, name: str, manifest: _Manifest) -> int:
    fd = entry.file(name)
    try:
        size, path = os.fstat(fd).st_size, f"{entry.path}/{name}"
        if size != manifest.size:
            raise Damaged(f"{path} is damaged: {size} bytes instead of {manifest.size}")
        if _checksum(fd, size) != manifest.crc32:
            raise Damaged(f"{path} is damaged: its checksum is not the manifest's")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_entry(
    parent: Folder, tag: str, library: str, key: str, gpu: Gpu = None, wanted: Sequence[str] = ()
) -> OpenedLibrary | None:
    """Returns the opened library of a cache entry; None if key or archs are not those wanted."""
    with parent.folder(tag) as entry:
        manifest = _parse(entry.read_text(MANIFEST))
        archs, path = manifest.archs, f"{entry.path}/{library}.so"
        fits = set(wanted) <= set(archs) if gpu is None else covered(archs, gpu)
        if manifest.key != key or not fits:
            return None
        if reason := manifest.unfit():
            raise Unfit(f"{path} {reason}")
        fd = _open_library(entry, f"{library}.so", manifest)
    file = _identity(fd)
    if file in refused:
        os.close(fd)
        raise Unfit(f"{path} cannot be loaded here ({refused[file]})")
    return OpenedLibrary(fd, path, _proc_path(fd, file), tuple(archs), parent.location.kind, file)


_MOST_LINKS = 40  # as many as Linux follows
_WHOLE_NAMESPACE = ["0", "0", "4294967295"]


def _trusted_owners() -> set[int]:
    """Returns this user, root, and the number of users outside of a user namespace."""
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
    with contextlib.suppress(OSError):
        return bool(os.getxattr(path, "system.posix_acl_access", follow_symlinks=False))
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
    """Returns why another user could exchange a folder above ``path``, "" if none could."""
    # folders behind links count; ``path`` itself is not checked, nor are missing folders
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
    location: Location, library: str, key: str, gpu: Gpu = None, wanted: Sequence[str] = ()
) -> OpenedLibrary | None:
    """Returns the opened library that a cache folder holds for a key, None if it holds none.

    It must run on ``gpu`` or, if that is None, hold the archs ``wanted``. A library that is damaged
    or cannot run on this machine is passed over with one warning.
    """
    try:
        with open_folder(location) as root:
            folder = root.folder(entry_folder(library, key))
    except FileNotFoundError:
        return None
    with folder:
        for tag in folder.names():
            if tag != CPU_ENTRY and not (tag[0].isdigit() or tag.startswith("gfx")):
                continue  # a log or a stored failure
            try:
                if found := open_entry(folder, tag, library, key, gpu, wanted):
                    return found
            except (Damaged, Unfit) as problem:
                warn_once(f"{problem}; it is not used")
            except ValueError:
                continue  # written by something else
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):  # vanished meanwhile
                    raise
    return None


def named_cache() -> str | None:
    """Returns the user cache that ``APEX_TE_CACHE_DIR`` names, None if it is unset or empty."""
    return os.environ.get("APEX_TE_CACHE_DIR") or None


def default_cache() -> str:
    """Returns the user cache without ``APEX_TE_CACHE_DIR``; never a relative path."""
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
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # whatever the umask took away


def prepare(location: Location, *inside: str) -> None:
    """Creates a cache folder and folders in it if missing, and checks that they are safe."""
    for attempt in range(3):
        try:
            make_private(location.path)
            with open_folder(location) as root:
                if not os.access(".", os.W_OK | os.X_OK, dir_fd=root.fd, effective_ids=True):
                    raise CacheError(f"{location.path} is not writable")
                for name in inside:
                    make_private(f"{location.path}/{name}")
                    with root.folder(name):
                        pass
            return
        except FileNotFoundError:  # a clean-up is at work
            if attempt == 2:
                raise


def runtime_cache() -> Location | None:
    """Returns the cache folder in ``XDG_RUNTIME_DIR``, perhaps missing; None if unset or unsafe."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.isabs(runtime) or parent_problem(runtime):
        return None
    with contextlib.suppress(OSError, CacheError), open_folder(Location(runtime, True, "cache")):
        return Location(os.path.join(runtime, "apex_te"), True, "cache")
    return None


_fallback: Location | None = None


def fall_back(reason: str, *inside: str) -> Location:
    """Returns the session's cache or a temporary one to build in instead, and warns once."""
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
    """Returns the user cache to build in, created and checked, or that of ``fall_back``."""
    # a folder that APEX_TE_CACHE_DIR names is used, with a warning, if others could exchange it
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
    if named_cache() is None and _fallback is None and (session := runtime_cache()):
        yield session
    for path in os.environ.get("APEX_TE_CACHE_PATH", "").split(":"):
        if os.path.isabs(path):
            yield Location(os.path.normpath(path), False, "extra")


def wanted_archs(spec: OpSpec, device: str, gpu: Gpu) -> tuple[Arch, ...]:
    """Returns the archs to build a library for, none if it has no GPU code."""
    if not spec.needs_archs(device):
        return ()
    return choose(spec.NAME, spec.min_arch, spec.specific_archs(), gpu)


def look_up(
    spec: OpSpec, device: str, gpu: Gpu = None, wanted: Sequence[str] | None = None
) -> OpenedLibrary | None:
    """Returns the opened library of the first cache folder with a usable one, else None.

    Without ``gpu`` it must hold the archs ``wanted``, by default those that the environment
    lists, if any.
    """
    key, library = key_of(spec, device), spec.library_name(device)
    if wanted is None:
        # without a device and a list any arch will do: opening is possible everywhere
        named = gpu is None and spec.needs_archs(device) and named_arch_list() is not None
        wanted = [str(arch) for arch in wanted_archs(spec, device, None)] if named else ()
    for location in locations(spec.prebuilt_folder):
        try:
            if found := find(location, library, key, gpu, wanted):
                return found
            continue
        except (OSError, CacheError) as error:
            problem = f"{location.path}: {error.strerror}" if isinstance(error, OSError) else error
        if location.kind == "cache" and named_cache():
            raise CacheError(f"APEX_TE_CACHE_DIR={named_cache()} cannot be used: {problem}")
        if location.kind == "cache" and not env.jit_disabled():
            continue  # the build that follows falls back to another folder and says so
        warn_once(f"skipping a cache: {problem}")
    return None


def look_up_for_all(
    spec: OpSpec, device: str, gpus: Iterable[Gpu], wanted: Sequence[str] | None = None
) -> OpenedLibrary | None:
    """Returns the library, closed again, that the last of ``gpus`` loads; None if one has none."""
    opened = None
    for gpu in gpus:
        if (opened := look_up(spec, device, gpu, wanted)) is None:
            return None
        os.close(opened.fd)
    return opened


def is_writable(path: str) -> bool:
    """Returns True if this user may create files in folder ``path``, or the folder if missing."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        return False
    return not os.statvfs(path).f_flag & os.ST_RDONLY
