"""Version of Transformer Engine that the alias claims to be."""

from __future__ import annotations

import os
import re

from ..._version import __version__

__all__ = ["LEVEL", "VARIABLE", "claimed_version"]

# The highest version whose unguarded imports in frameworks find their names here.
LEVEL = "2.14.0"
VARIABLE = "APEX_TE_TE_VERSION"
_LEVEL = re.compile(r"\d+(\.\d+)+((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")


def claimed_version(level: str | None = None) -> str:
    """Returns the alias's version, such as ``"2.14.0+apexte.0.1.0"``.

    The part after the plus is apex_te's own version, which comparisons with a version of
    Transformer Engine ignore but for equality.

    Args:
        level: the version of Transformer Engine; by default ``APEX_TE_TE_VERSION``, else ``LEVEL``.

    Raises:
        ValueError: the level is no version, or has a local part of its own.
    """
    owner = "claimed_version: level"
    if level is None:
        level, owner = os.environ.get(VARIABLE, "").strip() or LEVEL, VARIABLE
    if not _LEVEL.fullmatch(level):
        raise ValueError(f"{owner} must be a version such as {LEVEL}, got {level!r}")
    local = re.sub("[^a-z0-9]+", ".", __version__.lower()).strip(".")
    return f"{level}+apexte.{local}"
