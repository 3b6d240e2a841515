"""State of the alias, for ``python -m apex_te report``."""

from __future__ import annotations

from typing import Any

from ..._version import __version__
from . import files, process
from .conflicts import find_real
from .version import claimed_version


def facts() -> dict[str, Any]:
    """Returns the state of the alias as plain values.

    Returns:
        A dict: "claimed", the version of Transformer Engine that programs see, or None without the
        alias; "ways", the list of the active ways; "files", the folder that holds the alias's
        files, or None; "problem", why the alias does not work, or an empty string.
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
    """Returns the lines of the report about the alias.

    Args:
        state: what ``facts`` returned.
    """
    if state["claimed"] is None:
        told = ["transformer_engine is not an alias here"]
    else:
        told = [f"transformer_engine {state['claimed']}, by {' and '.join(state['ways'])}"]
    return [*told, state["problem"]] if state["problem"] else told
