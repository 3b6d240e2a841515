"""Cache key of a library: a hash of its sources and flags, not of places, times and compilers."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from typing import Any

from ...spec import SUITE, OpSpec
from ..backends.library import key_extras, key_flags
from ..errors import UnknownOpError
from ..platform import machine
from ..sources import closure

OP_ABI = 1  # the number in csrc/common/abi/op.h


def normalise(flags: Iterable[str], root: str) -> list[str]:
    """Returns flags with "<root>" and "<system>" for absolute paths, so that keys do not differ."""
    own = (flag.replace(root, "<root>") for flag in flags)
    return [re.sub(r"^(-I|-L|-isystem)/.*", r"\1<system>", flag) for flag in own]


def _named_sources(spec: OpSpec, device: str) -> dict[str, bytes]:
    """Returns the SHA-256 digests of a library's sources and headers by name, sorted."""
    root, suite = str(spec.root), str(SUITE)

    def name(path: str) -> str:
        if not path.startswith(root + os.sep) and path.startswith(suite + os.sep):
            return f"<suite>/{os.path.relpath(path, suite)}"
        return os.path.relpath(path, root)

    sources = [os.path.join(root, source) for source in spec.device_sources(device)]
    files = closure(sources, spec.include_folders())
    return dict(sorted((name(path), digest) for path, digest in files.items()))


def key_of(spec: OpSpec, device: str) -> str:
    """Returns the cache key of the library for ``device``, 64 hexadecimal digits."""
    try:
        sources = _named_sources(spec, device)
    except FileNotFoundError as error:
        raise UnknownOpError(f"{spec.NAME}: {error}") from None
    flags = normalise(key_flags(spec, device), str(spec.root))
    head = [spec.NAME, device, f"abi {OP_ABI}", machine(), *flags, ""]
    digest = hashlib.sha256("\0".join([*head, *key_extras(spec, device)]).encode())
    for name, content in sources.items():
        digest.update(b"\0\0" + name.encode() + b"\0" + content)
    return digest.hexdigest()


def made_of(spec: OpSpec, device: str) -> dict[str, Any]:
    """Returns the parts of a cache key, other than the flags, that a manifest records."""
    sources = _named_sources(spec, device)
    return {
        "machine": machine(),
        "extras": key_extras(spec, device),
        "sources": {name: digest.hex()[:24] for name, digest in sources.items()},
    }
