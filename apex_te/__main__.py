"""Command line: the op libraries, and the alias ``transformer_engine``.

``python -m apex_te report | why | list | clean | build`` say which libraries are compiled, where
they lie, and why one is rebuilt; ``install-alias`` and ``remove-alias`` write and remove the alias.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .op_builder.jit.cli import Command, main


def _command(name: str) -> Callable[..., Any]:
    """Returns a function of ``te_alias.commands``, which other commands do not import."""

    def call(args: Any) -> Any:
        from .integrations.te_alias import commands

        return getattr(commands, name)(args)

    return call


def _alias() -> tuple[dict[str, Any], list[str]]:
    """Returns the state of the alias, as values and as lines of the report."""
    from .integrations.te_alias import commands

    facts = commands.facts()
    return facts, commands.lines(facts)


_MORE = {
    "install-alias": Command(
        "make apex_te importable as transformer_engine in an environment",
        _command("add_install_arguments"),
        _command("install"),
    ),
    "remove-alias": Command(
        "undo install-alias", _command("add_remove_arguments"), _command("remove")
    ),
}

if __name__ == "__main__":
    sys.exit(main(more=_MORE, sections={"alias": _alias}))
