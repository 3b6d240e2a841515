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


@pytest.fixture
def train(tmp_path):
    """Runs train.py with a tiny model and further arguments; returns what it printed."""

    def run(*arguments, check=True):
        command = [sys.executable, str(EXAMPLE / "train.py"), *TINY, *map(str, arguments)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run
