"""Command line: the op libraries, and the aliases ``transformer_engine`` and ``apex``.

``python -m apex_te report | why | list | clean | build`` say which libraries are compiled, where
they lie, and why one is rebuilt; ``install-alias`` and ``remove-alias`` write and remove an alias.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .op_builder.jit.cli import Command, main


def _command(name: str) -> Callable[..., Any]:
    """Returns a function of ``aliases.commands``, which other commands do not import."""

    def call(args: Any) -> Any:
        from .compatibility.aliases import commands

        return getattr(commands, name)(args)

    return call


def _section(name: str) -> Callable[[], tuple[dict[str, Any], list[str]]]:
    """Returns a function with the state of an alias, as values and as lines of the report."""

    def state() -> tuple[dict[str, Any], list[str]]:
        from .compatibility.aliases import ALIASES, commands

        facts = commands.facts(ALIASES[name])
        return facts, commands.lines(ALIASES[name], facts)

    return state


_MORE = {
    "install-alias": Command(
        "make apex_te importable as transformer_engine or apex in an environment",
        _command("add_install_arguments"),
        _command("install"),
    ),
    "remove-alias": Command(
        "undo install-alias", _command("add_remove_arguments"), _command("remove")
    ),
}

_SECTIONS = {"alias": _section("transformer_engine"), "apex_alias": _section("apex")}

if __name__ == "__main__":
    sys.exit(main(more=_MORE, sections=_SECTIONS))
