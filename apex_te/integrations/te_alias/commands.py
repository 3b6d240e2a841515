"""Commands ``python -m apex_te install-alias`` and ``remove-alias``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ...op_builder.jit.text import complain
from .conflicts import AliasError
from .files import on_path, purelib, remove_files, write_files
from .version import LEVEL, claimed_version


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
    """Installs the alias in an environment.

    Args:
        args: options, as ``add_install_arguments`` declares them.

    Returns:
        Exit status: 0, or 1 if a real Transformer Engine is there or nothing can be written.
    """

    def act() -> str:
        version = claimed_version(args.version)
        folder = _folder("install-alias", args.prefix)
        done = write_files(folder, version)
        return f"transformer_engine {version}: {done} in {folder}"

    return _run(act)


def remove(args: argparse.Namespace) -> int:
    """Removes the alias from an environment.

    Args:
        args: options, as ``add_remove_arguments`` declares them.

    Returns:
        Exit status: 0, also if there was no alias, or 1 if its files were changed.
    """

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
