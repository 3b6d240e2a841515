"""Errors of a program that its user can mend: they end it with one line in place of a traceback."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["UserError", "make_folder", "needs", "run"]


class UserError(ValueError):
    """What the user gave cannot be used; the text says what to change."""


def needs(package: str, wanted_by: str) -> Any:
    """Imports a package that is no dependency of apex_te.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        top = package.partition(".")[0]
        raise UserError(
            f"{wanted_by} needs {top}: pip install {top} (got {type(error).__name__}: {error})"
        ) from error


def make_folder(option: str, folder: Path) -> None:
    """Makes a folder unless it is there.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK) else "not writable"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise UserError(f"{option} must be a folder that can be written, got {folder} ({problem})")


def run(main: Callable[[], Any]) -> None:
    """Calls ``main``; a ``UserError`` ends the program with one line and status 2."""
    try:
        main()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
