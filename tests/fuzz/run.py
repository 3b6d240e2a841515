"""Calls every bound function with good, nearly good and wild arguments.

    python tests/fuzz/run.py --calls 20000 --seed 1 [--recorded calls.jsonl] [--first 1234]

A call must return, or raise TypeError, ValueError, RuntimeError or NotImplementedError with a
message of ours, which begins with the function's name. Call n of a seed is the same in every run
with the same functions and recorded calls: ``--first n --calls 1`` repeats it. Under a sanitizer
its log (--log) is watched, so that a report names the call.
"""

from __future__ import annotations

import argparse
import faulthandler
import glob
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from apex_te.op_builder import all_builders, get_builder  # noqa: E402
from fuzz.calls import change_argument, make, random_argument, replace_extent  # noqa: E402

from apex_te.contract import parse  # noqa: E402
from apex_te.runtime import function  # noqa: E402

OURS = (TypeError, ValueError, RuntimeError, NotImplementedError)
SLOW = 20.0  # seconds after which a call counts as hanging
Recorded = dict[str, list[dict[str, Any]]]


def functions() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Every function that CPU tensors have: name -> (op, parameters with their kinds)."""
    found = {}
    for op, builder in all_builders().items():
        if not builder.device_sources("cpu"):
            continue
        for name, spec in builder.functions().items():
            if "cpu" in spec.devices:
                params = parse(spec.signature).params.values()
                found[name] = (op, [(p.name, p.kind + "?" * p.is_optional) for p in params])
    return dict(sorted(found.items()))


def read_recorded(path: str | None) -> Recorded:
    """Recorded calls by function."""
    found: Recorded = {}
    if path:
        with open(path, encoding="utf-8") as file:
            for line in file:
                _, name, arguments = json.loads(line)
                found.setdefault(name, []).append(arguments)
    return found


def choose(
    number: int, seed: int, known: dict[str, Any], recorded: Recorded
) -> tuple[str, dict[str, Any], random.Random]:
    """Call ``number`` of a seed: the function and what it is called with, described."""
    source = random.Random(f"{seed} {number}")
    name = source.choice(list(known))
    parameters = known[name][1]
    calls = recorded.get(name)
    if not calls or source.random() < 0.15:
        given = {key: random_argument(kind, source) for key, kind in parameters}
        return name, given, source
    call = source.choice(calls)
    values = [call.get(key) for key, _ in parameters]
    if source.random() < 0.5:
        values = replace_extent(values, source)
    for _ in range(source.choice((0, 1, 1, 1, 2, 3))):
        at = source.randrange(len(values))
        values[at] = change_argument(values[at], source)
    return name, dict(zip([key for key, _ in parameters], values, strict=True)), source


def build(given: dict[str, Any], seed: int, source: random.Random) -> dict[str, Any]:
    """The arguments; now and then two tensors of a call are one, or lie over each other."""
    generator = torch.Generator().manual_seed(seed)
    made = {key: make(value, generator, {}) for key, value in given.items()}
    tensors = [key for key, value in made.items() if isinstance(value, torch.Tensor)]
    if len(tensors) > 1 and source.random() < 0.08:
        one, other = source.sample(tensors, 2)
        a, b = made[one], made[other]
        if a.dtype == b.dtype and a.numel() and b.numel() and a.layout == b.layout == torch.strided:
            made[other] = a.view(-1)[: b.numel()].view(b.shape) if (
                a.is_contiguous() and not a.is_meta and b.numel() <= a.numel()
            ) else a  # fmt: skip
    return made


def problem_of(error: BaseException, name: str) -> str:
    """What is wrong with an error, "" for one of ours."""
    text = str(error)
    if not isinstance(error, OURS) or isinstance(error, RecursionError):
        return f"{type(error).__name__} is no error of ours: {text[:300]}"
    head = text.split(": ")[0]  # functions of one op may speak of it: moe_unpermute of its _bwd
    if name != head and not name.startswith(f"{head}_"):
        return f"the message does not begin with the function's name: {text[:300]}"
    if not text.isprintable():
        return f"the message has characters that cannot be printed: {text[:300]!a}"
    return ""


def log_size(log: str | None) -> int:
    """Bytes that the sanitizer has written."""
    return sum(os.stat(path).st_size for path in glob.glob(f"{log}.*")) if log else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--recorded", help="calls that record.py has written")
    parser.add_argument("--log", help="the sanitizer's log_path")
    parser.add_argument("--progress", help="file that holds the number of the present call")
    parser.add_argument("--except", dest="left_out", default="", help="functions left out")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    left_out = set(options.left_out.split(","))
    known = {name: value for name, value in functions().items() if name not in left_out}
    recorded = read_recorded(options.recorded)
    for op in {op for op, _ in known.values()}:
        get_builder(op).open("cpu")  # a call's time is its own
    progress = os.open(options.progress, os.O_CREAT | os.O_WRONLY) if options.progress else None
    start, problems, good = time.monotonic(), 0, 0
    logged = log_size(options.log)
    succeeded: set[str] = set()
    for number in range(options.first, options.first + options.calls):
        name, given, source = choose(number, options.seed, known, recorded)
        if progress is not None:
            os.pwrite(progress, f"{number:12d} {name:60s}".encode(), 0)
        arguments = build(given, options.seed * 1_000_003 + number, source)
        bound = function(known[name][0], name)
        problem = ""
        began = time.monotonic()
        faulthandler.dump_traceback_later(SLOW * 6, exit=True)
        try:
            bound(**arguments)
            good += 1
            succeeded.add(name)
        except Exception as error:
            problem = problem_of(error, name)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if time.monotonic() - began > SLOW:
            problem = f"took {time.monotonic() - began:.0f} s"
        size = log_size(options.log)
        if size != logged:
            logged, problem = size, "a sanitizer's report"
        if problem:
            problems += 1
            print(f"seed {options.seed} call {number}: {name}: {problem}")
            print(f"  {json.dumps(given)[:1500]}", flush=True)
    print(
        json.dumps(
            {
                "calls": options.calls,
                "functions": len(known),
                "succeeded": good,
                "functions that succeeded": len(succeeded),
                "never": sorted(set(known) - succeeded),
                "problems": problems,
                "seconds": round(time.monotonic() - start, 1),
            }
        )
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
