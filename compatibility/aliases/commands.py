"""Commands ``install-alias`` and ``remove-alias``, and the aliases in the command ``report``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apex_te.op_builder.jit.text import complain

from apex_te._version import __version__

from . import files, process
from .conflicts import AliasError, find_real
from .files import on_path, purelib, remove_files, write_files
from .metadata import claimed_version
from .names import ALIASES, TRANSFORMER_ENGINE, Alias


def add_install_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``install-alias`` to its parser."""
    _add_common(parser)
    levels = ", ".join(f"{alias.level} of {alias.title}" for alias in ALIASES.values())
    parser.add_argument(
        "--version",
        metavar="V",
        help=f"version of the library to claim (default: APEX_TE_TE_VERSION, else {levels})",
    )


def add_remove_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``remove-alias`` to its parser."""
    _add_common(parser)
    parser.add_argument("--force", action="store_true", help="remove files that were changed, too")


def install(args: argparse.Namespace) -> int:
    """Installs an alias in an environment."""
    alias = ALIASES[args.name]

    def act() -> str:
        version = claimed_version(alias, args.version)
        folder = _folder("install-alias", args.prefix)
        done = write_files(alias, folder, version)
        return f"{alias.name} {version}: {done} in {folder}"

    return _run(act)


def remove(args: argparse.Namespace) -> int:
    """Removes an alias from an environment."""
    alias = ALIASES[args.name]

    def act() -> str:
        folder = _folder("remove-alias", args.prefix)
        if remove_files(alias, folder, args.force):
            return f"{alias.name}: removed from {folder}"
        other = on_path(alias)
        elsewhere = "" if other is None else f"; there is one in {other.folder}"
        return f"{alias.name}: no alias in {folder}{elsewhere}"

    return _run(act)


def _folder(command: str, prefix: str | None) -> Path:
    """Returns the folder of packages to write to."""
    if prefix == "":
        raise AliasError(f"{command}: --prefix must be the folder of an environment, got ''")
    folder = purelib(prefix)
    if prefix is not None and not folder.resolve().is_relative_to(Path(prefix).resolve()):
        raise AliasError(
            f"{command}: {folder} must be in {prefix}, got a link to {folder.resolve()}"
        )
    return folder


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        choices=ALIASES,
        default=TRANSFORMER_ENGINE.name,
        help="the name (default: %(default)s)",
    )
    parser.add_argument("--prefix", metavar="DIR", help="the environment (default: this Python's)")


def _run(act: Callable[[], str]) -> int:
    """Prints what a command did, or its error; returns the exit status."""
    try:
        print(act())
    except (AliasError, ValueError) as error:
        complain(str(error))
        return 1
    return 0


def facts(alias: Alias) -> dict[str, Any]:
    """Returns the state of an alias as plain values.

    "claimed" is the version of the library that programs see, or None without the alias; "ways"
    the active ways; "files" the folder that holds the alias's files, or None; "problem" why the
    alias does not work, or "".
    """
    written = files.on_path(alias)
    ways = process.ways(alias)
    problem = find_real(alias) or ""
    claimed = None
    if written is not None:
        ways = [f"files in {written.folder}", *ways]
        claimed = written.version
        if not problem and written.made_for != __version__:
            problem = "its files were written by another apex_te; install-alias renews them"
    elif ways:
        claimed = claimed_version(alias)
    folder = None if written is None else str(written.folder)
    return {"claimed": claimed, "ways": ways, "files": folder, "problem": problem}


def lines(alias: Alias, state: dict[str, Any]) -> list[str]:
    """Returns the lines of the report about an alias."""
    if state["claimed"] is None:
        told = [f"{alias.name} is not an alias here"]
    else:
        told = [f"{alias.name} {state['claimed']}, by {' and '.join(state['ways'])}"]
    return [*told, state["problem"]] if state["problem"] else told
