"""Command ``python -m apex_te doctor``: says in one line whether apex_te runs here."""

from __future__ import annotations

import argparse
import json

from ..text import field
from . import report
from .verdict import verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``doctor`` to its parser."""
    parser.add_argument("--json", action="store_true", help="the same, as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the verdict and every problem; returns 0 if apex_te is ready, else 1."""
    found = verdict(report.of_all_ops())
    if args.json:
        print(json.dumps(found._asdict(), indent=1))
        return 0 if found.ready else 1
    print(found.text)
    for problem in found.problems[1:]:
        print("\n".join(field("also", problem)))
    return 0 if found.ready else 1
