"""Commands ``install-alias`` and ``remove-alias``, and the alias in the command ``report``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...op_builder.jit.text import complain
from . import files, process
from .conflicts import AliasError, find_real
from .files import on_path, purelib, remove_files, write_files
from .metadata import LEVEL, claimed_version


def add_install_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``install-alias`` to its parser."""
    _add_prefix(parser)
    parser.add_argument(
        "--version",
        metavar="V",
        help=f"version of Transformer Engine to claim (default: APEX_TE_TE_VERSION, else {LEVEL})",
    )


def add_remove_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``remove-alias`` to its parser."""
    _add_prefix(parser)
    parser.add_argument("--force", action="store_true", help="remove files that were changed, too")


def install(args: argparse.Namespace) -> int:
    """Installs the alias in an environment."""

    def act() -> str:
        version = claimed_version(args.version)
        folder = _folder("install-alias", args.prefix)
        done = write_files(folder, version)
        return f"transformer_engine {version}: {done} in {folder}"

    return _run(act)


def remove(args: argparse.Namespace) -> int:
    """Removes the alias from an environment."""

    def act() -> str:
        folder = _folder("remove-alias", args.prefix)
        if remove_files(folder, args.force):
            return f"transformer_engine: removed from {folder}"
        other = on_path()
        elsewhere = "" if other is None else f"; there is one in {other.folder}"
        return f"transformer_engine: no alias in {folder}{elsewhere}"

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


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefix", metavar="DIR", help="the environment (default: this Python's)")


def _run(act: Callable[[], str]) -> int:
    """Prints what a command did, or its error; returns the exit status."""
    try:
        print(act())
    except (AliasError, ValueError) as error:
        complain(str(error))
        return 1
    return 0


def facts() -> dict[str, Any]:
    """Returns the state of the alias as plain values.

    "claimed" is the version of Transformer Engine that programs see, or None without the alias;
    "ways" the active ways; "files" the folder that holds the alias's files, or None; "problem" why
    the alias does not work, or "".
    """
    written = files.on_path()
    ways = process.ways()
    problem = find_real() or ""
    claimed = None
    if written is not None:
        ways = [f"files in {written.folder}", *ways]
        claimed = written.version
        if not problem and written.made_for != __version__:
            problem = "its files were written by another apex_te; install-alias renews them"
    elif ways:
        claimed = claimed_version()
    folder = None if written is None else str(written.folder)
    return {"claimed": claimed, "ways": ways, "files": folder, "problem": problem}


def lines(state: dict[str, Any]) -> list[str]:
    """Returns the lines of the report about the alias."""
    if state["claimed"] is None:
        told = ["transformer_engine is not an alias here"]
    else:
        told = [f"transformer_engine {state['claimed']}, by {' and '.join(state['ways'])}"]
    return [*told, state["problem"]] if state["problem"] else told
