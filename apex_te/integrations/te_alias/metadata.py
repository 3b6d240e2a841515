"""Metadata of the alias's distribution, ``transformer-engine``."""

from __future__ import annotations

import os
import re
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path

DISTRIBUTION = "transformer-engine"
INSTALLER = "apex_te"


def metadata_text(version: str) -> str:
    """Returns the text of the file METADATA.

    Args:
        version: the version that the alias claims.
    """
    return (
        "Metadata-Version: 2.1\n"
        f"Name: {DISTRIBUTION}\n"
        f"Version: {version}\n"
        "Summary: alias of apex_te\n"
        "Requires-Dist: apex_te\n"
        "Provides-Extra: pytorch\n"
    )


class AliasDistribution(Distribution):
    """Distribution of importlib.metadata that has no files.

    Args:
        version: the version that the alias claims.
    """

    def __init__(self, version: str) -> None:
        self._texts = {
            "METADATA": metadata_text(version),
            "INSTALLER": f"{INSTALLER}\n",
            "top_level.txt": "transformer_engine\n",
        }

    def read_text(self, filename: str | os.PathLike[str]) -> str | None:
        """Returns the text of a file of the dist-info folder; None if there is no such file.

        Args:
            filename: name of the file, such as ``"METADATA"``.
        """
        return self._texts.get(os.fspath(filename))

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Returns the path that a file of the distribution would have.

        Args:
            path: path of the file in the distribution.
        """
        return Path(__file__).parent.parent / path


def is_ours(distribution: Distribution) -> bool:
    """Returns True if a distribution is the alias, in this process or as files."""
    return (distribution.read_text("INSTALLER") or "").strip() == INSTALLER


def named_in(context: DistributionFinder.Context) -> bool:
    """Returns True if a search for distributions includes the alias.

    Args:
        context: what ``importlib.metadata`` passes to finders. A search of given folders, in which
            the alias is not, does not include it.
    """
    import sys

    if list(context.path) != sys.path:
        return False
    return context.name is None or re.sub(r"[-_.]+", "-", context.name).lower() == DISTRIBUTION
