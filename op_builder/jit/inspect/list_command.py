"""Command ``python -m apex_te list``: prints the entries of all cache folders."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ...spec import DISPATCHER, JAX_HANDLERS
from ..errors import CacheError, unknown_op
from ..find import cache, inventory
from ..text import Column, field, short, since, size, table
from . import stale
from .op_names import add_ops, ops_of

_COLUMNS = (
    Column("library", 23, most=23),
    Column("archs", 13, most=13, ending=".."),
    Column("key", 8),
    Column("size", 7, right=True),
    Column("built", 7, right=True),
    Column("age", 6, right=True),
    Column(""),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``list`` to its parser."""
    add_ops(parser, "only the entries of these ops")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints each cache folder's entries, and which are stale; returns 1 if a folder is unsafe."""
    from ... import all_builders, get_builder, user_builders

    ops = ops_of(args)
    core, handlers = get_builder(DISPATCHER), get_builder(JAX_HANDLERS)
    builders = {each.NAME: each for each in (core, handlers)} | all_builders() | user_builders()
    now = stale.current(builders.values())
    names = set(builders)
    folders: list[dict[str, Any]] = []
    for place in cache.locations(core.prebuilt_folder):
        folder: dict[str, Any] = {"kind": place.kind, "path": place.path, "problem": ""}
        folder["entries"] = []
        try:
            for entry in inventory.entries(place):
                names.add(inventory.op_of(entry))
                if not ops or inventory.op_of(entry) in ops:
                    folder["entries"].append(_facts(entry, now))
        except (CacheError, OSError) as error:
            folder["problem"] = str(error)
        folders.append(folder)
    for name in ops:
        if name not in names:
            raise unknown_op(name, sorted(names))
    if args.json:
        print(json.dumps(folders, indent=1))
    else:
        _print(folders)
    return 1 if any(folder["problem"] for folder in folders) else 0


def _facts(entry: inventory.Entry, now: stale.Current) -> dict[str, Any]:
    """Returns the facts of an entry as a dict for JSON."""
    return {
        "op": inventory.op_of(entry),
        "library": entry.library,
        "archs": list(entry.archs),
        "key": str(entry.manifest.get("key", entry.digits)),
        "path": entry.path,
        "bytes": entry.bytes(),
        "seconds": entry.seconds(),
        "built": entry.built(),
        "compiler": entry.manifest.get("compiler", ""),
        "stale": now.stale(entry),
        "use": now.use(entry),
    }


def _print(folders: list[dict[str, Any]]) -> None:
    """Prints the dicts of the cache folders as text."""
    for number, folder in enumerate(folders):
        if number:
            print()
        entries = folder["entries"]
        total = size(sum(entry["bytes"] for entry in entries))
        told = folder["problem"] or f"{len(entries)} entries, {total}"
        print("\n".join(field(f"{folder['kind']}:", f"{short(folder['path'])}: {told}")))
        if entries:
            print("\n".join(table(_COLUMNS, [_cells(entry) for entry in entries])))
        reasons = {entry["stale"] for entry in entries if entry["stale"]}
        for reason in sorted(reasons):
            print("\n".join(field("stale", reason)))


def _cells(entry: dict[str, Any]) -> tuple[str, ...]:
    """Returns the cells of an entry's row in the table."""
    seconds = f"{entry['seconds']:.1f} s" if entry["seconds"] is not None else ""
    note = "stale" if entry["stale"] else ("other" if entry["use"] else "")
    archs, key = "+".join(entry["archs"]), entry["key"][:8]
    return entry["library"], archs, key, size(entry["bytes"]), seconds, since(entry["built"]), note
