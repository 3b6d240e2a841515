"""Command ``python -m apex_te clean``: removes libraries and says which, and which it left."""

from __future__ import annotations

import argparse
import json

from ...spec import DISPATCHER, JAX_HANDLERS
from ..errors import CacheError, NoPermissionError
from ..text import complain, field, short, size
from . import clean, stale
from .clean import Removed
from .op_names import add_ops, ops_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``clean`` to its parser."""
    add_ops(parser, "all entries of these ops")
    parser.add_argument("--all", action="store_true", help="every entry, and the GEMM tables")
    parser.add_argument(
        "--stale",
        action="store_true",
        help="entries of other sources, flags or compilers than the present ones, damaged entries,"
        " and what killed builds left",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--json", action="store_true", help="say it as JSON")


def run(args: argparse.Namespace) -> int:
    """Removes the libraries asked for; returns 1 if any was left, 2 if the request is unclear."""
    ops = ops_of(args)
    if sum((bool(ops), args.all, args.stale)) != 1:
        complain("clean: name ops, or one of --all and --stale")
        return 2
    from ... import all_builders, get_builder, user_builders

    places = clean.folders()
    builders = {**all_builders(), **user_builders()}
    builders.update((name, get_builder(name)) for name in (DISPATCHER, JAX_HANDLERS))
    found: list[Removed] = []
    if ops:
        clean.check_names(ops, builders, places)
    for place in places:
        try:
            if args.all:
                found += clean.remove_all(place, args.dry_run)
            elif args.stale:
                now = stale.current(builders.values())
                found += clean.remove_stale(place, now, args.dry_run)
            else:
                found += clean.remove_ops(place, ops, args.dry_run)
        except PermissionError as error:
            raise NoPermissionError(f"{error.filename or place.path}: {error.strerror}") from None
        except OSError as error:
            raise CacheError(f"{error.filename or place.path}: {error.strerror}") from None
    if args.json:
        rows = [item.to_dict() for item in found]
        print(json.dumps({"dry_run": args.dry_run, "items": rows}, indent=1))
    else:
        _print(found, [place.path for place in places], args.dry_run)
    return 1 if any(item.left for item in found) else 0


def _print(found: list[Removed], places: list[str], dry: bool) -> None:
    """Prints the files and folders removed or left, and the sum."""
    word = "would go" if dry else "removed"
    for item in found:
        if not item.left:
            print("\n".join(field(word, f"{item.what}, {size(item.bytes)} ({item.reason})")))
    for item in found:
        if item.left:
            print("\n".join(field("left", f"{short(item.path)}: {item.reason}")))
    gone = [item for item in found if not item.left]
    total = size(sum(item.bytes for item in gone))
    where = ", ".join(short(path) for path in places) or "no cache folder exists"
    print("\n".join(field("in all", f"{len(gone)} {word}, {total}: {where}")))
