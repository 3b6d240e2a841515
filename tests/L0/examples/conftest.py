"""Makes the modules of examples/char_gpt importable and runs its program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "char_gpt"

sys.path.insert(0, str(EXAMPLE))

TINY = [
    *("--steps", "12"),
    *("--batch", "2"),
    *("--context", "16"),
    *("--layers", "1"),
    *("--dim", "32"),
    *("--heads", "2"),
    *("--eval-every", "6"),
    *("--eval-batches", "2"),
    *("--max-bytes", "300000"),
    *("--sample", "8"),
]


@pytest.fixture(scope="session")
def train():
    """Runs train.py with a tiny model and further arguments in ``folder``; returns its output.

    Several lists of arguments are run one after the other by one process: starting one takes
    longer than the training.
    """

    def run(folder, *lists):
        lines = ["import train"] + [f"train.main({[*TINY, *map(str, a)]!r})" for a in lists]
        path = os.pathsep.join(
            filter(None, [str(ROOT), str(EXAMPLE), os.environ.get("PYTHONPATH")])
        )
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)],
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
