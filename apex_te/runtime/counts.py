"""Check of an argument that is a count: of features, heads or experts; no framework."""

from __future__ import annotations

import numbers
from typing import Any


def check_count(owner: str, name: str, value: Any) -> None:
    """Checks that the argument ``name`` of the module ``owner`` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{owner}: {name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{owner}: {name} must be at least 1, got {value}")
