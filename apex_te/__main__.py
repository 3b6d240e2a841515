"""Command line: the op libraries, and the alias ``transformer_engine``.

``python -m apex_te report | why | list | clean | build`` say which libraries are compiled, where
they lie, and why one is rebuilt; ``install-alias`` and ``remove-alias`` write and remove the alias.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .op_builder.jit.cli import Command, main


def _add_install_arguments(parser: argparse.ArgumentParser) -> None:
    from .integrations.te_alias import commands  # here, as other commands do without

    commands.add_install_arguments(parser)


def _add_remove_arguments(parser: argparse.ArgumentParser) -> None:
    from .integrations.te_alias import commands

    commands.add_remove_arguments(parser)


def _install(args: argparse.Namespace) -> int:
    from .integrations.te_alias import commands

    return commands.install(args)


def _remove(args: argparse.Namespace) -> int:
    from .integrations.te_alias import commands

    return commands.remove(args)


def _alias() -> tuple[dict[str, Any], list[str]]:
    """Returns the state of the alias, as values and as lines of the report."""
    from .integrations.te_alias import status

    facts = status.facts()
    return facts, status.lines(facts)


_MORE = {
    "install-alias": Command(
        "make apex_te importable as transformer_engine in an environment",
        _add_install_arguments,
        _install,
    ),
    "remove-alias": Command("undo install-alias", _add_remove_arguments, _remove),
}

if __name__ == "__main__":
    sys.exit(main(more=_MORE, sections={"alias": _alias}))
