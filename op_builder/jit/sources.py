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
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if path not in _files or _files[path][0] != stamp:
            with open(path, "rb", buffering=0) as file:
                content = file.read()
            names = tuple(sorted({name.decode() for name in _INCLUDE.findall(content)}))
            _files[path] = (stamp, hashlib.sha256(content).digest(), names)
    except OSError:
        return None
    return _files[path][1:]


def closure(sources: Iterable[str], include_paths: Sequence[str]) -> dict[str, bytes]:
    """Returns the SHA-256 digests, by path, of sources and of all project headers they include."""
    found: dict[str, bytes] = {}
    pending = [os.path.normpath(source) for source in sources]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        if (scanned := _scan(path)) is None:
            raise FileNotFoundError(f"source file {path} does not exist")
        found[path], names = scanned
        for name in names:
            for base in (os.path.dirname(path), *include_paths):
                candidate = os.path.normpath(os.path.join(base, name))
                if candidate in found or _scan(candidate) is not None:
                    pending.append(candidate)
                    break
    return found
