"""Guesses at what a user meant by a misspelt name."""

from __future__ import annotations

import difflib
import os.path
from collections.abc import Iterable
from typing import Any

_NEAR, _BEGUN = 0.6, 0.8


def did_you_mean(given: Any, known: Iterable[str]) -> str:
    """Returns "; did you mean 'name'?" for an error about a name, "" if no known name is near."""
    name = nearest(given, known)
    return "" if name is None else f"; did you mean {name!r}?"


def nearest(given: Any, known: Iterable[str], near: float = _NEAR) -> str | None:
    """Returns the most similar name, None if none is; ``given`` is not always a string."""
    if not isinstance(given, str):
        return None
    wanted = given.lower()

    def likeness(name: str) -> tuple[float, int]:
        lower = name.lower()
        ratio = difflib.SequenceMatcher(None, wanted, lower).ratio()
        if len(wanted) > 2 and (lower.startswith(wanted) or wanted in lower.split("_")):
            ratio = max(ratio, _BEGUN)
        return ratio, len(os.path.commonprefix([wanted, lower]))

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= near else None
