"""Command ``python -m apex_te build``: compiles libraries into the user's cache."""

from __future__ import annotations

import argparse
import json

from ..errors import BuildError, PrebuildError
from ..prebuild.build_report import BuildReport
from ..text import complain
from .op_names import add_ops, ops_of

HELP = "build op libraries into the user's cache before they are needed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command ``build`` to its parser."""
    add_ops(parser, "ops to build, such as rms_norm (default: all)")
    parser.add_argument(
        "--arch",
        metavar="LIST",
        help='CUDA archs, such as "8.0;9.0a" (default: APEX_TE_CUDA_ARCH_LIST, else the GPUs)',
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="only the libraries of one device (default: both, cuda if there is an arch for it)",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="compilers at once (default: what the machine allows)"
    )
    parser.add_argument("--jax", action="store_true", help="the handlers for JAX, too")
    parser.add_argument("--verbose", action="store_true", help="show the compilers' commands")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Compiles the libraries and prints their table; returns 1 if a build failed, 2 if misused."""
    from ... import all_builders, user_builders
    from ..prebuild.batch import Targets
    from ..prebuild.user_cache import choose_ops, into_cache

    try:
        builders = {**all_builders(), **user_builders()}
        targets = Targets(None) if args.device == "cpu" else Targets.find(args.arch)
        choices = choose_ops(builders, ops_of(args) or None, args.device, targets)
    except BuildError as error:
        complain(str(error))
        return 2
    try:
        report = into_cache(
            builders, choices, targets, jobs=args.jobs, verbose=args.verbose, jax=args.jax
        )
    except PrebuildError as error:
        if error.report is not None:
            _show(error.report, args.json)
        complain(str(error))
        return 1
    except BuildError as error:
        complain(str(error))
        return 1
    _show(report, args.json)
    return 0


def _show(report: BuildReport, as_json: bool) -> None:
    """Prints the report as a table or as JSON."""
    print(json.dumps(report.to_dict(), indent=1) if as_json else report, flush=True)
