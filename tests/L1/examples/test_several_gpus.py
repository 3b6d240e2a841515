"""examples/several_gpus on two ranks: FP8 near bf16, and a resumed run equal to a whole one."""

import json
import os
import sys
from pathlib import Path

import pytest
from programs import captured

pytest.importorskip("transformers")

PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "several_gpus" / "train.py"


def run(folder, *options):
    """The losses of a run on two ranks without GPUs."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", "2", str(PROGRAM), "--json", "figures.json",
               "--context", "32", *options]  # fmt: skip
    captured(command, cwd=folder, env=variables)
    figures = json.loads((folder / "figures.json").read_text())["figures"]
    assert figures["ranks"] == 2
    assert figures["ms"] > 0
    return figures["losses"]


def test_a_resumed_run_equals_a_whole_one_and_fp8_stays_near_bf16(tmp_path):
    fp8 = ("--recipe", "delayed", "--fp8-all-gather", "--recompute")
    whole = run(tmp_path, "--steps", "4", *fp8)
    assert run(tmp_path, "--steps", "2", "--save", "saved", *fp8) == whole[:2]
    assert run(tmp_path, "--steps", "4", "--resume", "saved", *fp8) == whole[2:]
    plain = run(tmp_path, "--steps", "4", "--recipe", "none")
    assert plain != whole
    assert plain == pytest.approx(whole, rel=5e-3)
    assert plain[-1] < 0.97 * plain[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "start this program with torchrun"),
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--fp8-all-gather", "--recipe", "none"], "--fp8-all-gather needs an FP8 recipe"),
        (["--layers", "2", "--model", "folder"], "--layers needs --size, got --model"),
    ],
)
def test_wrong_command_lines_are_refused(options, message):
    variables = {k: v for k, v in os.environ.items() if k != "RANK"}
    done = captured([sys.executable, str(PROGRAM), *options], check=False, env=variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
