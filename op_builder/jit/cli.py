"""Command line of ``python -m apex_te``, and without torch of ``python -m op_builder.jit.cli``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .errors import BuildError, UnknownOpError
from .inspect.machine import suite_version
from .text import Printable, complain, did_you_mean

# command -> (module with add_<command> and run_<command>, help)
_COMMANDS = {
    "doctor": ("report_command", "whether apex_te runs here, in one line, and what is in the way"),
    "report": ("report_command", "machine, compilers, GPUs, caches, and what each op can do here"),
    "why": ("why_command", "how an op's library is looked up, and what the next call does"),
    "list": ("cache_commands", "what the caches hold"),
    "clean": ("cache_commands", "remove compiled libraries from the user's cache"),
    "build": ("cache_commands", "build op libraries into the user's cache before they are needed"),
}


class Command(NamedTuple):
    """Help text of a command, adder of its options, and function that returns the exit status."""

    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _own(command: str) -> Command:
    name, text = _COMMANDS[command]
    module = importlib.import_module(f".inspect.{name}", __package__)
    return Command(text, getattr(module, f"add_{command}"), getattr(module, f"run_{command}"))


def _parser(command: str | None, more: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Returns a parser of all commands that imports, and has the options of, ``command`` alone."""
    parser = argparse.ArgumentParser(
        prog="python -m apex_te", description="What is compiled, where, and why."
    )
    parser.add_argument("--version", action="version", version=f"apex_te {suite_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    own = {name: text for name, (_, text) in _COMMANDS.items()}
    for name, text in {**own, **{name: added.text for name, added in more.items()}}.items():
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == command:
            (more.get(name) or _own(name)).add_arguments(sub)
    return parser


def main(
    arguments: Sequence[str] | None = None,
    more: Mapping[str, Command] | None = None,
    sections: Mapping[str, Callable[[], tuple[Any, list[str]]]] | None = None,
) -> int:
    """Runs one command and returns 0, 1 for a problem, 2 for a bad request or 130 for Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in given if not word.startswith("-")), None)
    more = more or {}
    known = [*_COMMANDS, *more]
    if command is not None and command not in known:
        hint = did_you_mean(command, known) or f"; there are: {', '.join(known)}"
        complain(f"there is no command {command!r}{hint}")
        return 2
    parser = _parser(command, more)
    args = parser.parse_args(given, argparse.Namespace(sections=sections or {}))
    if args.command is None:
        parser.print_help()
        return 0
    shown: Any = Printable(sys.stdout)
    try:
        with contextlib.redirect_stdout(shown):
            status = int((more.get(args.command) or _own(args.command)).run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except BuildError as error:
        complain(str(error))
        return 2 if isinstance(error, UnknownOpError) else 1


if __name__ == "__main__":
    sys.exit(main())
