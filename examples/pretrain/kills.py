#!/usr/bin/env python3
"""Kills a run by SIGKILL at random steps, resumes it each time, and compares its losses.

    python examples/pretrain/kills.py --kills 10 --folder build/kills -- \\
        --model tiny --steps 200 --batch 8 --save-every 7 --deterministic

What follows ``--`` goes to train.py. Trains once without a kill, and once with them; every loss and
norm of a gradient that the killed run ever wrote must be that of the other run, bitwise.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import train
from config import parse
from logs import FILE, read_log


def start(argv: Sequence[str], output: Path) -> int:
    """Starts train.py with these options in a child process, which torch need not be read for.

    Args:
        argv: the options.
        output: file for what the child prints.

    Returns:
        The child's process id.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with open(output, "a", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            train.main(argv)
            status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the events of a kind that a run has logged so far."""
    log = folder / FILE
    return [e for e in read_log(log) if e["kind"] == kind] if log.exists() else []


def figures(folder: Path) -> dict[int, tuple[float, float]]:
    """Returns loss and norm of the gradients by step, of what a run has logged so far."""
    return {e["step"]: (e["loss"], e["grad_norm"]) for e in events(folder, "step")}


def has_logged(child: int, folder: Path, step: int) -> bool:
    """Returns True if the process ``child`` has gone on with the run and the log has a step."""
    starts = events(folder, "start")
    is_on = bool(starts) and starts[-1]["process"] == child
    return is_on and max(figures(folder), default=0) >= step


def kill_at(child: int, folder: Path, step: int, delay: float) -> bool:
    """Kills a child once it has logged a step; returns False if it ended before.

    Args:
        child: process id.
        folder: the run's.
        step: the step.
        delay: seconds to wait then, so that the kill comes anywhere in the next steps.
    """
    while not has_logged(child, folder, step):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status:
                raise RuntimeError(f"kill_at: the run must not fail, got status {status}")
            return False
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def finish(child: int) -> None:
    """Waits for a child.

    Raises:
        RuntimeError: it failed.
    """
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"finish: the run must end with status 0, got {status}")


def differing(
    seen: dict[int, tuple[float, float]], expected: dict[int, tuple[float, float]]
) -> list[int]:
    """Returns the steps whose figures are not those expected."""
    return [step for step, values in seen.items() if values != expected[step]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns 0 if all figures are equal and all kills took place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--kill-seed", type=int, help="of the random steps (default: the time)")
    parser.add_argument("--folder", type=Path, default=Path("build/pretrain/kills"))
    parser.add_argument("options", nargs="*", metavar="-- OPTION")
    args = parser.parse_args(argv)
    options = [*args.options, "--log-every", "1"]
    steps = parse(options).steps
    seed = time.time_ns() if args.kill_seed is None else args.kill_seed
    generator = random.Random(seed)
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    whole, killed = args.folder / "whole", args.folder / "killed"
    output = args.folder / "output.txt"
    begin = time.perf_counter()
    finish(start([*options, "--out", str(whole)], output))
    expected = figures(whole)
    each = median(event["ms"] for event in events(whole, "step")) / 1e3
    # Not in the last steps, so that the run does not end before the kill.
    places = sorted(generator.sample(range(1, steps * 5 // 6), args.kills))
    kills, wrong = 0, 0
    for place in places:
        child = start([*options, "--out", str(killed), "--resume"], output)
        kills += kill_at(child, killed, place, generator.uniform(0, 3 * each))
        seen = figures(killed)
        differ = differing(seen, expected)
        wrong += len(differ)
        print(f"killed after step {max(seen, default=0)}: {len(differ)} figures differ", flush=True)
    finish(start([*options, "--out", str(killed), "--resume"], output))
    seen = figures(killed)
    wrong += len(differing(seen, expected)) + abs(len(seen) - len(expected))
    print(
        f"{kills} of {args.kills} kills (--kill-seed {seed}), {len(seen)} of {steps} steps logged, "
        f"{wrong} figures differ, {time.perf_counter() - begin:.1f} s"
    )
    return 0 if wrong == 0 and kills == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
