"""Digests of a library's source files and of the project headers that they include."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)

# path -> ((mtime_ns, size, inode), digest, included names); shared by all ops of the process
_files: dict[str, tuple[tuple[int, int, int], bytes, tuple[str, ...]]] = {}


def _scan(path: str) -> tuple[bytes, tuple[str, ...]] | None:
    """Returns SHA-256 digest and quoted includes of a file, None if unreadable; caches them."""
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
    """Returns the SHA-256 digests, by path, of sources and of all project headers they include."""
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
