"""Measures ops by the names of their results files; without names, all that run on this machine.

python benchmarks/run.py rope rms_norm
"""

from __future__ import annotations

import importlib
import sys
from itertools import chain
from pathlib import Path

import harness
import torch

HERE = Path(__file__).resolve().parent
ON_CPU = ("dispatch",)  # measured without a GPU, too


def main(names: list[str]) -> None:
    """Imports every file of ``ops``, which adds its cases, and runs those named."""
    sys.path[:0] = [str(HERE / "ops"), str(HERE)]
    for path in sorted((HERE / "ops").glob("bench_*.py")):
        importlib.import_module(path.stem)
    unknown = set(names) - set(harness.CASES)
    if unknown:
        sys.exit(f"run: names must be of {', '.join(harness.CASES)}, got {', '.join(unknown)}")
    for name in names or (harness.CASES if torch.cuda.is_available() else ON_CPU):
        rows = chain.from_iterable(call() for call in harness.CASES[name])
        harness.run(name, rows, harness.SUMS.get(name, lambda rows: {}))


if __name__ == "__main__":
    main(sys.argv[1:])
