"""An alias as files of an environment: a stub package, and a dist-info that pip accepts."""

from __future__ import annotations

import base64
import contextlib
import csv
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from apex_te._version import __version__

from .conflicts import AliasError, alias_made_for, find_real
from .metadata import INSTALLER, metadata_text
from .names import MARK, Alias

_TEMPORARY = ".apex_te_alias-"
_SHOWN = 200  # characters of a line of RECORD
_LONGEST = 1 << 20  # bytes of a text file; those of the alias have a few hundred
_STUB = '''"""Alias of apex_te, which serves the modules of this package.

Written by `python -m apex_te install-alias`; `python -m apex_te remove-alias {name}` removes it.
"""

{mark} = "{made_for}"
__version__ = "{version}"

try:
    from {server} import serve
except ImportError as error:
    raise ImportError(
        "{name} is an alias of apex_te, which cannot be imported; "
        "pip uninstall {distribution} removes the alias"
    ) from error
serve({mark}, __version__)
'''


class Written(NamedTuple):
    """Named tuple of the alias's files in a folder."""

    folder: Path
    info: Path
    version: str
    made_for: str


def purelib(prefix: str | None = None) -> Path:
    """Returns the folder of an environment's Python packages."""
    if prefix is None:
        return Path(sysconfig.get_path("purelib"))
    base = os.path.abspath(prefix)
    scheme = sysconfig.get_preferred_scheme("prefix")
    return Path(sysconfig.get_path("purelib", scheme, {"base": base, "platbase": base}))


def installed_in(alias: Alias, folder: Path) -> Written | None:
    """Returns the alias's files in a folder of packages; None if there are none."""
    infos = _infos(alias, folder)
    if not infos:
        return None
    version = infos[-1].name.removesuffix(".dist-info").partition("-")[2]
    made_for = alias_made_for(str(folder / alias.name / "__init__.py")) or ""
    return Written(folder, infos[-1], version, made_for)


def write_files(alias: Alias, folder: Path, version: str) -> str:
    """Writes the alias into a folder of packages, or renews the alias that is there.

    Processes that do so at the same time wait for each other. A process that imports meanwhile
    finds either nothing or all: the files are moved into place, the dist-info last.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            real = find_real(alias, str(folder))
            if real is not None:
                raise AliasError(
                    f"install-alias: there must be no real {alias.title} beside apex_te's "
                    f"alias, got: {real}"
                )
            _refuse_links(alias, "install-alias", folder)
            files = _contents(alias, version)
            before = _infos(alias, folder)
            info = folder / _info_name(alias, version)
            if before == [info] and all(_is_same(folder / p, data) for p, data in files.items()):
                return "kept"
            _move_into(alias, folder, files, info)
            for other in before:
                if other != info:
                    shutil.rmtree(other)
            return "renewed" if before else "installed"
    except OSError as error:
        raise AliasError(
            f"install-alias: {folder} must be a folder that can be written, got {error}; "
            "--prefix names another environment"
        ) from error


def remove_files(alias: Alias, folder: Path, force: bool = False) -> list[Path]:
    """Removes the alias from a folder of packages."""
    if not _infos(alias, folder):
        return []
    _refuse_links(alias, "remove-alias", folder)
    try:
        with _locked(folder):
            removed: list[Path] = []
            for info in _infos(alias, folder):
                removed += _remove(alias, folder, info, force)
            return removed
    except OSError as error:
        raise AliasError(f"remove-alias: files in {folder} cannot be removed: {error}") from error


def _info_name(alias: Alias, version: str) -> str:
    return f"{alias.name}-{version}.dist-info"


def _infos(alias: Alias, folder: Path) -> list[Path]:
    """Returns the alias's dist-info folders in ``folder``."""
    found = []
    for info in sorted(folder.glob(f"{alias.name}-*.dist-info")):
        with contextlib.suppress(OSError, ValueError):
            if _text(info / "INSTALLER").strip() == INSTALLER:
                found.append(info)
    return found


def _refuse_links(alias: Alias, command: str, folder: Path) -> None:
    """Raises AliasError if a folder of the alias is a link, which would lead out of ``folder``."""
    package = folder / alias.name
    for path in (package, package / "__pycache__", *folder.glob(f"{alias.name}-*.dist-info")):
        if path.is_symlink():
            raise AliasError(f"{command}: {path} must be a folder, got a link to {path.readlink()}")


def _text(path: Path) -> str:
    """Returns the text of a regular file of at most a MiB."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, encoding="utf-8") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LONGEST:
            raise ValueError(f"{path} must be a file of at most {_LONGEST} bytes")
        return file.read()


def _contents(alias: Alias, version: str) -> dict[str, bytes]:
    """Returns the contents of the alias's files by their paths below the folder of packages."""
    info = _info_name(alias, version)
    stub = _STUB.format(
        mark=MARK,
        made_for=__version__,
        version=version,
        name=alias.name,
        server=alias.server,
        distribution=alias.distribution,
    )
    texts = {
        f"{alias.name}/__init__.py": stub,
        f"{info}/METADATA": metadata_text(alias, version),
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: apex_te\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
        f"{info}/INSTALLER": f"{INSTALLER}\n",
        f"{info}/top_level.txt": f"{alias.name}\n",
    }
    files = {path: text.encode() for path, text in texts.items()}
    rows = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    return files


def _digest(data: bytes) -> str:
    """Returns the SHA-256 of ``data`` as RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _is_same(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def _move_into(alias: Alias, folder: Path, files: dict[str, bytes], info: Path) -> None:
    """Writes files to a temporary folder beside their places, and moves them there."""
    for stale in folder.glob(f"{_TEMPORARY}*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder) as name:
        made = Path(name)
        for path, data in files.items():
            (made / path).parent.mkdir(exist_ok=True)
            (made / path).write_bytes(data)
        for new in (made / alias.name, made / info.name):
            target = folder / new.name
            if not target.exists():
                new.rename(target)
                continue
            for file in sorted(new.iterdir()):  # each at once in the place of its former self
                file.replace(target / file.name)
                _drop_bytecode(target / file.name)


def _remove(alias: Alias, folder: Path, info: Path, force: bool) -> list[Path]:
    """Removes what the RECORD of one dist-info folder lists, the dist-info first."""
    listed = _listed(alias, folder, info)
    changed = [path for path, digest in listed.items() if digest and not _has(path, digest)]
    if changed and not force:
        raise AliasError(
            f"remove-alias: {changed[0]} must be as apex_te wrote it, got another content; "
            "--force removes it all the same"
        )
    present = [path for path in listed if path.is_file()]
    for path in sorted(present, key=lambda path: path.parent != info):
        path.unlink()
        _drop_bytecode(path)
    for path in listed:
        for place in (path.parent / "__pycache__", path.parent):
            if place != folder:
                with contextlib.suppress(OSError):  # others' files are in it, or it is gone
                    place.rmdir()
    return present


def _drop_bytecode(path: Path) -> None:
    """Removes what Python has cached of a source file, which Python would believe for a second."""
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()


def _listed(alias: Alias, folder: Path, info: Path) -> dict[Path, str]:
    """Returns the files that a RECORD lists, with their digests; none lies outside ``folder``."""
    try:
        rows = [*csv.reader(_text(info / "RECORD").splitlines())]
    except FileNotFoundError:
        rows = []
    except (csv.Error, ValueError) as error:
        raise AliasError(f"remove-alias: {info}/RECORD must be a list of files, {error}") from error
    found = {info / "INSTALLER": "", info / "RECORD": ""}
    for row in rows:
        path = folder / row[0] if len(row) == 3 else folder
        if path.name == ".." or path.parent not in (folder / alias.name, info):
            shown = ",".join(row)[:_SHOWN]
            raise AliasError(
                f"remove-alias: {info}/RECORD must list files of the alias, got {shown!r}"
            )
        found[path] = row[1].removeprefix("sha256=")
    return found


def _has(path: Path, digest: str) -> bool:
    """Returns True if a file has a digest, or is gone."""
    try:
        return _digest(path.read_bytes()) == digest
    except FileNotFoundError:
        return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder, which needs no file of its own."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks on folders
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def on_path(alias: Alias) -> Written | None:
    """Returns the files of the alias that imports of this process find; None if there are none."""
    for entry in sys.path:
        found = installed_in(alias, Path(entry or os.curdir))
        if found is not None:
            return found
    return None
