"""Version and metadata of the alias's distribution, ``transformer-engine``."""

from __future__ import annotations

import os
import re
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

from ..._version import __version__

DISTRIBUTION = "transformer-engine"
INSTALLER = "apex_te"


def metadata_text(version: str) -> str:
    """Returns the text of the file METADATA."""
    return (
        "Metadata-Version: 2.1\n"
        f"Name: {DISTRIBUTION}\n"
        f"Version: {version}\n"
        "Summary: alias of apex_te\n"
        "Requires-Dist: apex_te\n"
        "Provides-Extra: pytorch\n"
    )


class AliasDistribution(Distribution):
    """Distribution of importlib.metadata without files."""

    def __init__(self, version: str) -> None:
        self._texts = {
            "METADATA": metadata_text(version),
            "INSTALLER": f"{INSTALLER}\n",
            "top_level.txt": "transformer_engine\n",
        }

    def read_text(self, filename: str | os.PathLike[str]) -> str | None:
        """Returns the text of a file of the dist-info folder; None if it does not exist."""
        return self._texts.get(os.fspath(filename))

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Returns the path that a file of the distribution would have."""
        return Path(__file__).parent.parent / path


def is_ours(distribution: Distribution) -> bool:
    """Returns True if a distribution is the alias, in this process or as files."""
    return (distribution.read_text("INSTALLER") or "").strip() == INSTALLER


def named_in(context: DistributionFinder.Context) -> bool:
    """Returns True if a search for distributions includes the alias."""
    import sys

    if list(context.path) != sys.path:
        return False
    return context.name is None or re.sub(r"[-_.]+", "-", context.name).lower() == DISTRIBUTION


# The highest version whose unguarded imports in frameworks find their names here.
LEVEL = "2.14.0"
VARIABLE = "APEX_TE_TE_VERSION"
_LEVEL = re.compile(r"\d+(\.\d+)+((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")


def claimed_version(level: str | None = None) -> str:
    """Returns the alias's version, such as ``"2.14.0+apexte.0.1.0"``."""
    owner = "claimed_version: level"
    if level is None:
        level, owner = os.environ.get(VARIABLE, "").strip() or LEVEL, VARIABLE
    if not _LEVEL.fullmatch(level):
        raise ValueError(f"{owner} must be a version such as {LEVEL}, got {level!r}")
    local = re.sub("[^a-z0-9]+", ".", __version__.lower()).strip(".")
    return f"{level}+apexte.{local}"
