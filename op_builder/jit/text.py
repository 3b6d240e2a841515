"""Text of the commands for a terminal: named lines, tables, sizes and spans of time."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

WIDTH = 80
_INDENT = 11


def short(path: str) -> str:
    """Returns a path with the home folder as ``~``."""
    home = os.path.expanduser("~")
    inside = os.path.isabs(home) and home != "/" and path.startswith(home + os.sep)
    return f"~{path[len(home) :]}" if inside else path


def field(name: str, text: str) -> Iterator[str]:
    """Yields a named line, wrapped; a path stays in one piece."""
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{name:<{_INDENT - 1}} ",
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def age(seconds: float) -> str:
    """Returns a span of time in one word: "12 s", "3 h", "5 d"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def since(moment: float) -> str:
    """Returns how long ago a moment was, "" if it is not known."""
    return age(time.time() - moment) if moment else ""


def size(number: float) -> str:
    """Returns bytes in three digits: "123 kB", "1.2 MB"."""
    units = iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while number >= 999.5 and unit != "GB":
        number, unit = number / 1000, next(units)
    return f"{number:.0f} {unit}" if unit == "B" or number >= 9.95 else f"{number:.1f} {unit}"


class Column(NamedTuple):
    """One column of a table; ``width`` is its least width, and with ``most`` its largest."""

    title: str
    width: int = 0
    most: int | None = None
    right: bool = False
    ending: str = ""  # put where a cell is cut

    def fit(self, cells: Sequence[str]) -> int:
        """Returns the width that shows ``cells``, within the column's limits."""
        wanted = max([self.width, len(self.title), *map(len, cells)])
        return wanted if self.most is None else min(wanted, self.most)

    def show(self, cell: str, width: int) -> str:
        """Returns a cell of exactly ``width`` characters."""
        if len(cell) > width and self.most is not None:
            cell = cell[: width - len(self.ending)] + self.ending
        return cell.rjust(width) if self.right else cell.ljust(width)


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], gap: str = " "
) -> Iterator[str]:
    """Yields the titles and one line for each row."""
    widths = [column.fit([row[i] for row in rows]) for i, column in enumerate(columns)]
    for row in ([column.title for column in columns], *rows):
        shown = zip(columns, row, widths, strict=True)
        yield gap.join(column.show(cell, width) for column, cell, width in shown).rstrip()
