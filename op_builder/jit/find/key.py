"""Content key of a library: what it is made of, not where, when or with what."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from typing import Any

from ...spec import OpSpec
from ..backends.library import key_extras, key_flags
from ..errors import UnknownOpError
from ..sources import closure

OP_ABI = 1  # the number in csrc/common/abi/op.h


def normalise(flags: Iterable[str], root: str) -> list[str]:
    """Returns flags without the places they name: the project's root and other absolute paths."""
    result = []
    for flag in flags:
        flag = flag.replace(root, "<root>")
        result.append(re.sub(r"^(-I|-L|-isystem)/.*", r"\1<system>", flag))
    return result


def _named_sources(spec: OpSpec, device: str) -> dict[str, bytes]:
    """Returns the digests of sources and headers by their names, sorted; names tell no place.

    A name is relative to the op's root, or to the suite's where only that holds the file.
    """
    root, suite = str(spec.root), spec.suite_root

    def name(path: str) -> str:
        if suite and path.startswith(suite + os.sep) and not path.startswith(root + os.sep):
            return f"<suite>/{os.path.relpath(path, suite)}"
        return os.path.relpath(path, root)

    files = closure(spec.source_paths(device), spec.include_folders())
    return dict(sorted((name(path), digest) for path, digest in files.items()))


def key_of(spec: OpSpec, device: str) -> str:
    """Returns the cache key of the library for ``device``, 64 hexadecimal digits.

    Raises:
        UnknownOpError: a source does not exist.
    """
    try:
        sources = _named_sources(spec, device)
    except FileNotFoundError as error:
        raise UnknownOpError(f"{spec.NAME}: {error}") from None
    flags = normalise(key_flags(spec, device), str(spec.root))
    head = [spec.NAME, device, f"abi {OP_ABI}", os.uname().machine, *flags, ""]
    digest = hashlib.sha256("\0".join([*head, *key_extras(spec, device)]).encode())
    for name, content in sources.items():
        digest.update(b"\0\0" + name.encode() + b"\0" + content)
    return digest.hexdigest()


def made_of(spec: OpSpec, device: str) -> dict[str, Any]:
    """Returns what the key of a library is made of beside its flags: for its manifest."""
    sources = _named_sources(spec, device)
    return {
        "machine": os.uname().machine,
        "extras": key_extras(spec, device),
        "sources": {name: digest.hex()[:24] for name, digest in sources.items()},
    }
