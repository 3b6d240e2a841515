"""Compares results with committed ones by ratios, and names what got slower or takes more memory.

python benchmarks/slower.py rms_norm transformer
python benchmarks/slower.py --against v0.9 --folder fresh --tolerance 0.05

Times of different days, clocks and cards are not compared: only figures of one run that relate a
contender to another one or to a copy, and peaks of memory. Without names all files are compared
that differ. Ends with status 1 if something got worse.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
# More is better in the first, less in the second; other figures are no ratios.
GAINS = re.compile(r"over |ratio\b|of copy$")
COSTS = re.compile(r"of torch$|of bf16$|over share$|peak GiB")
TIMES = ("ms sustained", "ms", "us")
CONTENDERS = ("stack", "contender", "method")

Row = dict[str, Any]
Key = tuple[str, ...]


def key_of(row: Row, without: tuple[str, ...] = ()) -> Key:
    """Returns what a row is about: all of it but its figures and the columns ``without``."""
    return tuple(
        f"{name} {value}"
        for name, value in row.items()
        if not isinstance(value, float) and value is not None and name not in without
    )


def figures(rows: list[Row]) -> dict[tuple[Key, str], tuple[float, bool]]:
    """Returns each ratio, of times to the first contender's, and whether more is better."""
    found: dict[tuple[Key, str], tuple[float, bool]] = {}
    first: dict[Key, Row] = {}
    for row in rows:
        key = key_of(row, ("path",))
        for name, value in row.items():
            is_cost = bool(COSTS.match(name))
            if isinstance(value, float) and (is_cost or GAINS.match(name)):
                found[key, name] = value, not is_cost
        if not any(name in row for name in CONTENDERS):
            continue
        base = first.setdefault(key_of(row, (*CONTENDERS, "path")), row)
        for name in TIMES:
            if base is not row and row.get(name) and base.get(name):
                found[key, f"{name} to the first"] = row[name] / base[name], False
    return found


def worse(old: list[Row], new: list[Row], tolerance: float) -> Iterator[str]:
    before = figures(old)
    for place, (value, more) in figures(new).items():
        if place not in before:
            continue
        known = before[place][0]
        if value < known * (1 - tolerance) if more else value > known * (1 + tolerance):
            yield f"{', '.join(place[0])}: {place[1]} {known:.3f} -> {value:.3f}"


def committed(name: str, revision: str) -> list[Row]:
    """Returns the rows of a results file of a revision, none if it has no such file."""
    path = f"{revision}:./{name}.json"
    shown = subprocess.run(["git", "show", path], cwd=RESULTS, capture_output=True, check=False)
    return json.loads(shown.stdout).get("rows", []) if shown.returncode == 0 else []


def main(words: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--against", default="HEAD", metavar="REVISION")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the fresh files")
    parser.add_argument("--tolerance", type=float, default=0.03, help="as a part of a ratio")
    args = parser.parse_args(words)
    count = 0
    for name in args.names or sorted(path.stem for path in args.folder.glob("*.json")):
        path = args.folder / f"{name}.json"
        if not path.exists():
            parser.error(f"NAME must be a file of {args.folder}, got {name}")
        rows = json.loads(path.read_text(encoding="utf-8")).get("rows", [])
        lines = list(worse(committed(name, args.against), rows, args.tolerance))
        count += len(lines)
        for line in lines:
            print(f"{name}: {line}")
    print(f"{count} figures got worse by more than {args.tolerance:.0%}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
