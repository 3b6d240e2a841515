"""Version and metadata of an alias's distribution."""

from __future__ import annotations

import os
import re
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

from apex_te._version import __version__

from .names import Alias

INSTALLER = "apex_te"


def metadata_text(alias: Alias, version: str) -> str:
    """Returns the text of the file METADATA."""
    return (
        "Metadata-Version: 2.1\n"
        f"Name: {alias.distribution}\n"
        f"Version: {version}\n"
        "Summary: alias of apex_te\n"
        "Requires-Dist: apex_te\n"
        "Provides-Extra: pytorch\n"
    )


class AliasDistribution(Distribution):
    """Distribution of importlib.metadata without files."""

    def __init__(self, alias: Alias, version: str) -> None:
        self._texts = {
            "METADATA": metadata_text(alias, version),
            "INSTALLER": f"{INSTALLER}\n",
            "top_level.txt": f"{alias.name}\n",
        }

    def read_text(self, filename: str | os.PathLike[str]) -> str | None:
        """Returns the text of a file of the dist-info folder; None if it does not exist."""
        return self._texts.get(os.fspath(filename))

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Returns the path that a file of the distribution would have."""
        return Path(__file__).parent.parent / path


def is_ours(distribution: Distribution) -> bool:
    """Returns True if a distribution is an alias, in this process or as files."""
    return (distribution.read_text("INSTALLER") or "").strip() == INSTALLER


def named_in(context: DistributionFinder.Context, alias: Alias) -> bool:
    """Returns True if a search for distributions includes the alias."""
    import sys

    if list(context.path) != sys.path:
        return False
    return context.name is None or _normal(context.name) == alias.distribution


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


_LEVEL = re.compile(r"\d+(\.\d+)+((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")


def claimed_version(alias: Alias, level: str | None = None) -> str:
    """Returns the alias's version, such as ``"2.14.0+apexte.0.1.0"``."""
    owner = "claimed_version: level"
    if level is None:
        level, owner = os.environ.get(alias.version_variable, "").strip(), alias.version_variable
        level = level or alias.level
    if not _LEVEL.fullmatch(level):
        raise ValueError(f"{owner} must be a version such as {alias.level}, got {level!r}")
    local = re.sub("[^a-z0-9]+", ".", __version__.lower()).strip(".")
    return f"{level}+apexte.{local}"
