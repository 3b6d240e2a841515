"""Commands ``list``, ``clean`` and ``build`` of ``python -m apex_te``, on what the caches hold."""

from __future__ import annotations

import argparse
import json

from ..errors import BuildError, CacheError, NoPermissionError
from ..find import cache, inventory
from ..prebuild.batch import Targets, choose_ops, into_cache
from ..text import Column, complain, print_field, short, since, size, table
from . import clean, facts
from .clean import Removed
from .facts import Facts

_COLUMNS = (
    Column("library", 23, most=23),
    Column("archs", 13, most=13, ending=".."),
    Column("key", 8),
    Column("size", 7, right=True),
    Column("built", 7, right=True),
    Column("age", 6, right=True),
    Column(""),
)


def add_list(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``list`` to its parser."""
    facts.add_ops(parser, "only the entries of these ops")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run_list(args: argparse.Namespace) -> int:
    """Prints each cache folder's entries, and which are stale; returns 1 if a folder is unsafe."""
    ops = facts.ops_of(args)
    builders = facts.all_libraries()
    now = facts.current(builders.values())
    names = set(builders)
    folders: list[Facts] = []
    for place in cache.locations(builders[facts.DISPATCHER].prebuilt_folder):
        folder: Facts = {"kind": place.kind, "path": place.path, "problem": "", "entries": []}
        try:
            for entry in inventory.entries(place):
                names.add(inventory.op_of(entry))
                if not ops or inventory.op_of(entry) in ops:
                    folder["entries"].append(_entry(entry, now))
        except (CacheError, OSError) as error:
            folder["problem"] = str(error)
        folders.append(folder)
    facts.check_names(ops, names)
    if args.json:
        print(json.dumps(folders, indent=1))
    else:
        _print_folders(folders)
    return 1 if any(folder["problem"] for folder in folders) else 0


def _entry(entry: inventory.Entry, now: facts.Current) -> Facts:
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


def _print_folders(folders: list[Facts]) -> None:
    for number, folder in enumerate(folders):
        print(end="\n" if number else "")
        entries = folder["entries"]
        total = size(sum(entry["bytes"] for entry in entries))
        told = folder["problem"] or f"{len(entries)} entries, {total}"
        print_field(f"{folder['kind']}:", f"{short(folder['path'])}: {told}")
        if entries:
            print("\n".join(table(_COLUMNS, [_cells(entry) for entry in entries])))
        for reason in sorted({entry["stale"] for entry in entries if entry["stale"]}):
            print_field("stale", reason)


def _cells(entry: Facts) -> tuple[str, ...]:
    seconds = f"{entry['seconds']:.1f} s" if entry["seconds"] is not None else ""
    note = "stale" if entry["stale"] else ("other" if entry["use"] else "")
    archs, key = "+".join(entry["archs"]), entry["key"][:8]
    return entry["library"], archs, key, size(entry["bytes"]), seconds, since(entry["built"]), note


def add_clean(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``clean`` to its parser."""
    facts.add_ops(parser, "all entries of these ops")
    parser.add_argument("--all", action="store_true", help="every entry, and the GEMM tables")
    stale = "entries of other sources, flags or compilers than the present ones, damaged entries,"
    stale += " and what killed builds left"
    parser.add_argument("--stale", action="store_true", help=stale)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--json", action="store_true", help="say it as JSON")


def run_clean(args: argparse.Namespace) -> int:
    """Removes the libraries asked for; returns 1 if any was left, 2 if the request is unclear."""
    ops = facts.ops_of(args)
    if sum((bool(ops), args.all, args.stale)) != 1:
        complain("clean: name ops, or one of --all and --stale")
        return 2
    places = clean.folders()
    builders = facts.all_libraries()
    if ops:
        present = [entry for place in places for entry in inventory.entries(place, check=False)]
        facts.check_names(ops, [*builders, *map(inventory.op_of, present)])
    found: list[Removed] = []
    for place in places:
        try:
            if args.all:
                found += clean.remove_all(place, args.dry_run)
            elif args.stale:
                found += clean.remove_stale(place, facts.current(builders.values()), args.dry_run)
            else:
                found += clean.remove_ops(place, ops, args.dry_run)
        except OSError as error:
            kind = NoPermissionError if isinstance(error, PermissionError) else CacheError
            raise kind(f"{error.filename or place.path}: {error.strerror}") from None
    if args.json:
        rows = [item._asdict() for item in found]
        print(json.dumps({"dry_run": args.dry_run, "items": rows}, indent=1))
    else:
        _print_removed(found, [place.path for place in places], args.dry_run)
    return 1 if any(item.left for item in found) else 0


def _print_removed(found: list[Removed], places: list[str], dry: bool) -> None:
    word = "would go" if dry else "removed"
    gone = [item for item in found if not item.left]
    for item in gone:
        print_field(word, f"{item.what}, {size(item.bytes)} ({item.reason})")
    for item in found:
        if item.left:
            print_field("left", f"{short(item.path)}: {item.reason}")
    total = size(sum(item.bytes for item in gone))
    where = ", ".join(short(path) for path in places) or "no cache folder exists"
    print_field("in all", f"{len(gone)} {word}, {total}: {where}")


def add_build(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``build`` to its parser."""
    facts.add_ops(parser, "ops to build, such as rms_norm (default: all)")
    archs = 'CUDA archs, such as "8.0;9.0a" (default: APEX_TE_CUDA_ARCH_LIST, else the GPUs)'
    parser.add_argument("--arch", metavar="LIST", help=archs)
    only = "only the libraries of one device (default: both, cuda if there is an arch for it)"
    parser.add_argument("--device", choices=["cpu", "cuda"], help=only)
    jobs = "compilers at once (default: what the machine allows)"
    parser.add_argument("--jobs", type=int, metavar="N", help=jobs)
    parser.add_argument("--jax", action="store_true", help="the handlers for JAX, too")
    parser.add_argument("--verbose", action="store_true", help="show the compilers' commands")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run_build(args: argparse.Namespace) -> int:
    """Compiles the libraries and prints their table; returns 1 if a build failed, 2 if misused."""
    from ... import all_builders, user_builders

    try:
        builders = {**all_builders(), **user_builders()}
        targets = Targets(None) if args.device == "cpu" else Targets.find(args.arch)
        choices = choose_ops(builders, facts.ops_of(args) or None, args.device, targets)
    except BuildError as error:
        complain(str(error))
        return 2
    report, problem = None, ""
    try:
        report = into_cache(
            builders, choices, targets, jobs=args.jobs, verbose=args.verbose, jax=args.jax
        )
    except BuildError as error:
        report, problem = getattr(error, "report", None), str(error)
    if report is not None:
        print(json.dumps(report.to_dict(), indent=1) if args.json else report, flush=True)
    if problem:
        complain(problem)
    return 1 if problem else 0
