#!/usr/bin/env python3
"""Runs each recipe with each seed, one run a GPU at a time, and compares the recipes.

    python examples/pretrain/compare.py --recipes bf16 delayed --seeds 1 2 3 --out runs -- \\
        --model 124m --max-tokens 100e6

What follows ``--`` goes to train.py. A run's folder is ``<out>/<recipe>-<seed>``; what the run
prints goes to ``output.txt`` in it. Called again with the same options, it leaves runs that have
ended as they are; others begin anew, or go on from their checkpoints where ``--save-every`` is
among the options. Prints the table of seeds.py at the end, with the first recipe as base.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from batches import Tokens
from config import FIXED, RECIPES, parse
from logs import FILE, read_log
from plot import read_curve
from ranks import Ranks
from ranks import start as take_sizes
from seeds import table
from train import token_folder

OWN = ("--recipe", "--seed", "--out", "--resume")  # options that this program gives to each run
POLL = 0.2  # seconds between two looks at the runs


class Run(NamedTuple):
    """A run to be made.

    Attributes:
        folder: where it logs.
        options: of train.py, as words.
        args: the options, read and checked.
    """

    folder: Path
    options: list[str]
    args: argparse.Namespace


def has_ended(run: Run, tokens: Tokens) -> bool:
    """Returns True if the log of a run says that it was made to its end.

    Raises:
        ValueError: it was made with other options, or on other tokens.
    """
    log = run.folder / FILE
    events = read_log(log) if log.exists() else []
    ends = [event for event in events if event["kind"] == "end"]
    if not ends:
        return False
    args = run.args
    wanted: dict[str, Any] = {name: getattr(args, name, None) for name in FIXED}
    wanted |= {"corpus": tokens.digest, "branch_from": args.branch_from and str(args.branch_from)}
    about = next(event for event in events if event["kind"] == "start")
    for name, value in wanted.items():
        if about.get(name) != value:
            raise ValueError(
                f"compare: --out must have no runs of other options, got {run.folder} with {name} "
                f"{about.get(name)!r} instead of {value!r}"
            )
    last = args.steps if args.stop_at is None else min(args.steps, args.stop_at)
    return ends[-1]["step"] == last


def places(device: str) -> list[dict[str, str]]:
    """Returns the environment variables that give a run its device, for each device.

    Args:
        device: train.py's ``--device``.
    """
    count = torch.cuda.device_count() if device != "cpu" else 0
    if not count:
        return [{}]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names[:count]]


def start(run: Run, place: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts a run in a process of its own."""
    run.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *run.options]
    with open(run.folder / "output.txt", "ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **place}
        )


def work(
    runs: Sequence[Run],
    slots: Sequence[dict[str, str]],
    begin: Callable[[Run, dict[str, str]], subprocess.Popen[bytes]],
) -> list[Run]:
    """Makes the runs, in order, as many at a time as there are slots.

    Ends the processes that still run where it is interrupted.

    Args:
        runs: the runs.
        slots: environment variables of each slot.
        begin: starts a run in a slot.

    Returns:
        The runs that failed.
    """
    waiting, free, failed = list(runs), list(slots), []
    active: list[tuple[Run, dict[str, str], subprocess.Popen[bytes], float]] = []
    try:
        while waiting or active:
            while waiting and free:
                run, slot = waiting.pop(0), free.pop(0)
                active.append((run, slot, begin(run, slot), time.perf_counter()))
                print(f"{run.folder}: started", flush=True)
            time.sleep(POLL)
            for one in [one for one in active if one[2].poll() is not None]:
                active.remove(one)
                run, slot, process, begun = one
                free.append(slot)
                verdict = "ended"
                if process.returncode:
                    failed.append(run)
                    verdict = f"FAILED, see {run.folder / 'output.txt'}"
                print(f"{run.folder}: {verdict} ({time.perf_counter() - begun:.0f} s)", flush=True)
    finally:
        for *_, process, _ in active:
            process.terminate()
        for *_, process, _ in active:
            process.wait()
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs and prints the table; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, required=True, metavar="RECIPE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("build/pretrain/compare"), metavar="DIR")
    parser.add_argument("--per-device", type=int, default=1, help="runs at a time on each device")
    parser.add_argument("options", nargs="*", metavar="-- OPTION")
    args = parser.parse_args(argv)
    if args.per_device < 1:
        parser.error(f"--per-device must be positive, got {args.per_device}")
    for option in args.options:
        if option.partition("=")[0] in OWN:
            parser.error(f"options of train.py must be without {', '.join(OWN)}, got {option}")
    options = list(args.options)
    given = parse([*options, "--recipe", args.recipes[-1]])
    if given.tokens is None:
        given.tokens = token_folder(given, Ranks())
        options += ["--tokens", str(given.tokens)]
    if given.save_every:
        options += ["--resume"]
    runs = []
    # Seed by seed, so that a comparison that is stopped early has whole pairs.
    for seed in dict.fromkeys(args.seeds):
        for recipe in dict.fromkeys(args.recipes):
            folder = args.out / f"{recipe}-{seed}"
            words = [*options, "--recipe", recipe, "--seed", str(seed), "--out", str(folder)]
            runs.append(Run(folder, words, parse(words)))
            take_sizes(runs[-1].args)
    tokens = Tokens(given.tokens)
    todo = [run for run in runs if not has_ended(run, tokens)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = work(todo, places(given.device) * args.per_device, start)
    curves = [read_curve(run.folder) for run in runs if run not in failed]
    if curves:
        print(table(curves))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
