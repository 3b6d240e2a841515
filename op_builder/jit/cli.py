"""Command line with the commands report, why, list, clean and build.

``python -m apex_te`` runs it; in a checkout without torch so does ``python -m op_builder.jit.cli``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from .errors import BuildError, UnknownOpError

# command -> (module with add_arguments and run, help)
_COMMANDS = {
    "report": ("report_command", "machine, compilers, GPUs, caches, and what each op can do here"),
    "why": ("why_command", "how an op's library is looked up, and what the next call does"),
    "list": ("list_command", "what the caches hold"),
    "clean": ("clean_command", "remove compiled libraries from the user's cache"),
    "build": ("build_command", "build op libraries into the user's cache before they are needed"),
}


def _module(command: str) -> Any:
    """Imports the module of a command, which has ``add_arguments(parser)`` and ``run(args)``."""
    return importlib.import_module(f".inspect.{_COMMANDS[command][0]}", __package__)


def _parser(command: str | None) -> argparse.ArgumentParser:
    """Returns a parser that knows all commands, but only the options of ``command``.

    The modules of other commands are not imported.
    """
    parser = argparse.ArgumentParser(
        prog="python -m apex_te", description="What is compiled, where, and why."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == command:
            _module(name).add_arguments(sub)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status of the process.

    Args:
        arguments: words of the command line; by default those of ``sys.argv``.

    Returns:
        0 if the command succeeded, 1 if the command found or ended with a problem, 2 for a bad
        request, 130 after Ctrl-C.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in given if not word.startswith("-")), None)
    args = _parser(command).parse_args(given)
    try:
        status = int(_module(args.command).run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except BuildError as error:
        print(f"apex_te: {error}", file=sys.stderr)
        return 2 if isinstance(error, UnknownOpError) else 1


if __name__ == "__main__":
    sys.exit(main())
