"""The content key of a library: what it is made of, not where, when or with what."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence

OP_ABI = 1  # the number in csrc/common/abi/op.h
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)

# path -> ((mtime_ns, size, inode), digest, included names); shared by all ops of the process
_files: dict[str, tuple[tuple[int, int, int], bytes, tuple[str, ...]]] = {}


def _scan(path: str) -> tuple[bytes, tuple[str, ...]] | None:
    """Digest of a file and the names it includes in quotes; None if there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
    known = _files.get(path)
    if known is not None and known[0] == stamp:
        return known[1], known[2]
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.read()
    except OSError:
        return None
    digest = hashlib.sha256(content).digest()
    names = tuple(sorted({name.decode() for name in _INCLUDE.findall(content)}))
    _files[path] = (stamp, digest, names)
    return digest, names


def closure(sources: Iterable[str], include_paths: Sequence[str]) -> dict[str, bytes]:
    """Digests of the sources and of every project header they include, directly or not.

    A quoted include that is found nowhere in the project is a system header and is left out.
    """
    found: dict[str, bytes] = {}
    pending = [os.path.normpath(source) for source in sources]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        scanned = _scan(path)
        if scanned is None:
            raise FileNotFoundError(f"source file {path} does not exist")
        found[path] = scanned[0]
        folder = os.path.dirname(path)
        for name in scanned[1]:
            for base in (folder, *include_paths):
                candidate = os.path.normpath(os.path.join(base, name))
                if candidate in found or _scan(candidate) is not None:
                    pending.append(candidate)
                    break
    return found


def normalise(flags: Iterable[str], root: str) -> list[str]:
    """Flags without the places they name: the project's root and other absolute paths."""
    result = []
    for flag in flags:
        flag = flag.replace(root, "<root>")
        result.append(re.sub(r"^(-I|-L|-isystem)/.*", r"\1<system>", flag))
    return result


def relative_name(path: str, root: str, suite: str) -> str:
    """The path relative to the op's root, or to the suite's if only that holds it."""
    if suite and path.startswith(suite + os.sep) and not path.startswith(root + os.sep):
        return f"<suite>/{os.path.relpath(path, suite)}"
    return os.path.relpath(path, root)


def compute(
    name: str,
    device: str,
    root: str,
    sources: Sequence[str],
    include_paths: Sequence[str],
    flags: Iterable[str],
    extras: Iterable[str] = (),
    suite: str = "",
) -> str:
    """The key, 64 hexadecimal digits.

    ``suite`` is the suite's root where the op has one of its own: headers of the suite are then
    named after it, so that the key does not tell where either is installed.
    """
    parts = closure(sources, include_paths)
    digest = hashlib.sha256()
    head = [name, device, f"abi {OP_ABI}", os.uname().machine, *normalise(flags, root), "", *extras]
    digest.update("\0".join(head).encode())
    for relative, path in sorted((relative_name(path, root, suite), path) for path in parts):
        digest.update(b"\0\0" + relative.encode() + b"\0" + parts[path])
    return digest.hexdigest()
