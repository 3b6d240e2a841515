"""Texts for users: named lines, tables, byte counts, durations, and guesses at misspelt names."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

WIDTH = 80
_INDENT = 11


def tell(line: str) -> None:
    """Writes a line to stderr; no replacement of ``sys.stderr`` can make the caller fail."""
    with contextlib.suppress(Exception):
        if sys.stderr is not None:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def printable(text: str) -> str:
    """Returns text with control characters, bidi overrides and other invisible ones as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Printable:
    """Text stream for output with names from elsewhere: ``printable``, except for line ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes ``text`` and returns its length."""
        self._stream.write("\n".join(map(printable, text.split("\n"))))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def complain(text: str) -> None:
    """Prints an error of a command to stderr."""
    print(f"apex_te: {text}", file=Printable(sys.stderr))


def short(path: str) -> str:
    """Returns a path with ``~`` in place of the user's home folder."""
    home = os.path.expanduser("~")
    inside = os.path.isabs(home) and home != "/" and path.startswith(home + os.sep)
    return f"~{path[len(home) :]}" if inside else path


def field(name: str, text: str) -> Iterator[str]:
    """Yields lines of ``name`` and ``text``, wrapped at ``WIDTH``; long words are not broken."""
    indents: Any = {"initial_indent": f"{name:<{_INDENT - 1}} ", "subsequent_indent": " " * _INDENT}
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}
    yield from textwrap.wrap(text, WIDTH, **indents, **whole)


def print_field(name: str, text: str) -> None:
    """Prints the lines of ``field``."""
    print("\n".join(field(name, text)))


def since(moment: float) -> str:
    """Returns the time since ``moment``, in seconds since the epoch, such as "3 h"; "" for 0."""
    if not moment:
        return ""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def size(number: float) -> str:
    """Returns a number of bytes as text of two or three digits: "123 kB", "1.2 MB"."""
    units = iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while number >= 999.5 and unit != "GB":
        number, unit = number / 1000, next(units)
    return f"{number:.0f} {unit}" if unit == "B" or number >= 9.95 else f"{number:.1f} {unit}"


class Column(NamedTuple):
    """One column of a table; cells wider than ``most`` are cut, and get the ``ending``."""

    title: str
    width: int = 0
    most: int | None = None
    right: bool = False
    ending: str = ""  # put where a cell is cut

    def fit(self, cells: Sequence[str]) -> int:
        """Returns the width that shows the title and all ``cells``, within the limits."""
        wanted = max([self.width, len(self.title), *map(len, cells)])
        return wanted if self.most is None else min(wanted, self.most)

    def show(self, cell: str, width: int) -> str:
        """Returns a cell padded to ``width`` characters, and cut if the column has a limit."""
        if len(cell) > width and self.most is not None:
            cell = cell[: width - len(self.ending)] + self.ending
        return cell.rjust(width) if self.right else cell.ljust(width)


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], gap: str = " "
) -> Iterator[str]:
    """Yields the lines of a table: the titles, then one line for each row."""
    widths = [column.fit([row[i] for row in rows]) for i, column in enumerate(columns)]
    for row in ([column.title for column in columns], *rows):
        shown = zip(columns, row, widths, strict=True)
        yield gap.join(column.show(cell, width) for column, cell, width in shown).rstrip()


def did_you_mean(given: Any, known: Iterable[str]) -> str:
    """Returns "; did you mean 'name'?" for an error about a name, "" if no known name is near."""
    name = nearest(given, known)
    return "" if name is None else f"; did you mean {name!r}?"


def nearest(given: Any, known: Iterable[str], near: float = 0.6) -> str | None:
    """Returns the most similar name, None if none is; ``given`` is not always a string."""
    if not isinstance(given, str):
        return None
    wanted = given.lower()

    def likeness(name: str) -> tuple[float, int]:
        lower = name.lower()
        ratio = difflib.SequenceMatcher(None, wanted, lower).ratio()
        if len(wanted) > 2 and (lower.startswith(wanted) or wanted in lower.split("_")):
            ratio = max(ratio, 0.8)
        return ratio, len(os.path.commonprefix([wanted, lower]))

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= near else None
