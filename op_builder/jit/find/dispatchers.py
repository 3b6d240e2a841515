"""Dispatchers in caches and packages that were compiled for other Pythons than the running one."""

from __future__ import annotations

import contextlib
from typing import Any

from ...spec import OpSpec
from ..backends import pythons
from ..backends.dispatcher import DispatcherSpec
from ..errors import CacheError
from ..platform import soabi
from .cache import Location
from .inventory import entries
from .key import key_of


def key_for(spec: DispatcherSpec, manifest: dict[str, Any]) -> tuple[str, str]:
    """Returns the up-to-date key and the Python of a manifest's dispatcher; "" for unknown ones."""
    extras = manifest.get("extras")
    if not (isinstance(extras, list) and len(extras) == 1 and isinstance(extras[0], str)):
        return "", ""
    version = pythons.name_of(extras[0])
    python = pythons.Python(version, extras[0], "")
    return key_of(DispatcherSpec(spec.root, python), "cpu"), version


def prebuilt_for(spec: DispatcherSpec) -> list[str]:
    """Returns the Python versions for which the installed package has an up-to-date dispatcher."""
    found = set()
    place = Location(spec.prebuilt_folder, False, "prebuilt")
    with contextlib.suppress(CacheError, OSError):
        for entry in entries(place, spec.library_name("cpu"), check=False):
            key, version = key_for(spec, entry.manifest)
            if version and key.startswith(entry.digits):
                found.add(version)
    return sorted(found, key=lambda version: (int(version[2:].rstrip("t")), version))


def why_missing(spec: OpSpec) -> str:
    """Returns why ``spec``, this Python's dispatcher, is not prebuilt but others are, or ""."""
    if not isinstance(spec, DispatcherSpec) or spec.python is not None:
        return ""
    others = prebuilt_for(spec)
    if not others:
        return ""
    return (
        f"this installation's dispatchers are for Python {', '.join(others)}, this is Python"
        f" {pythons.name_of(soabi())} (a wheel carries those that {pythons.VARIABLE} names)"
    )
