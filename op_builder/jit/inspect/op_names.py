"""Names of ops on the command line, the same in every command: ``OP ...`` or ``--ops OP ...``."""

from __future__ import annotations

import argparse


def add_ops(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds both forms of naming ops to a command's parser, ``text`` being their help."""
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"{text}; several: rope,rms_norm too")
    parser.add_argument(
        "--ops", nargs="+", dest="more_ops", default=[], metavar="OP", help="the same as OP"
    )


def ops_of(args: argparse.Namespace) -> list[str]:
    """Returns the names in both forms, each once."""
    words = ",".join([*args.ops, *args.more_ops]).split(",")
    return list(dict.fromkeys(word.strip() for word in words if word.strip()))
