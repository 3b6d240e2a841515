"""pytest plugin: writes down calls of bound functions that succeed, for run.py to change.

    APEX_TE_FUZZ_CALLS=calls.jsonl pytest -p fuzz.record tests/L0/ops

APEX_TE_FUZZ_SECONDS ends a test run before its end, with what was recorded until then;
the order of the tests is then a fixed shuffle.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

from fuzz.calls import describe, elements

from apex_te.runtime import dispatcher

MOST = 60  # calls of a function that are kept, chosen among all
SMALL = 1 << 15  # elements of a call's tensors
LARGEST = 1 << 18
FEW = 10  # calls of a function, made up with larger ones where there are fewer small ones

_kept: dict[tuple[str, ...], list[str]] = {}
_seen: dict[tuple[str, ...], int] = {}


class Recorded:
    """A bound function that remembers what it was called with."""

    def __init__(self, op: str, function: Any) -> None:
        self._op, self._function = op, function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = [part.split(":")[0].strip() for part in self._function.signature.split(",")]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        described = {name: describe(value) for name, value in given.items()}
        result = self._function(*args, **kwargs)
        key, size = (self._op, self._function.__name__), sum(map(elements, described.values()))
        if size <= SMALL:
            keep(key, json.dumps(described))
        elif size <= LARGEST:
            keep((*key, "large"), json.dumps(described))
        return result


def keep(key: tuple[str, ...], line: str) -> None:
    """A fair choice of MOST calls, the same in every run with the same tests."""
    kept, seen = _kept.setdefault(key, []), _seen.get(key, 0)
    _seen[key] = seen + 1
    if len(kept) < MOST:
        kept.append(line)
        return
    at = random.Random(f"{key} {seen}").randrange(seen + 1)
    if at < MOST:
        kept[at] = line


class Recording(dict[tuple[str, str], Any]):
    """The dispatcher's table of bound functions, which whoever calls one takes it from."""

    def setdefault(self, key: tuple[str, str], default: Any = None) -> Any:
        return super().setdefault(key, Recorded(key[0], default))


_start = time.monotonic()


def pytest_configure(config: Any) -> None:
    dispatcher._functions = Recording()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if "APEX_TE_FUZZ_SECONDS" in os.environ:  # what is left out is then a fair choice
        random.Random(1).shuffle(items)


def pytest_runtest_teardown(item: Any) -> None:
    limit = float(os.environ.get("APEX_TE_FUZZ_SECONDS", "inf"))
    if time.monotonic() - _start > limit:
        item.session.shouldstop = f"{limit:g} s of recording are over"


def pytest_sessionfinish(session: Any) -> None:
    path = os.environ.get("APEX_TE_FUZZ_CALLS")
    if not path:
        return
    with open(path, "a", encoding="utf-8") as file:
        for op, name in sorted({(key[0], key[1]) for key in _kept}):
            lines = _kept.get((op, name), [])
            large = _kept.get((op, name, "large"), [])
            for line in [*lines, *large[: max(0, FEW - len(lines))]]:
                file.write(json.dumps([op, name, json.loads(line)]) + "\n")
