"""FP8 training follows fp32 training on real text: the example with its own defaults."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "char_gpt" / "train.py"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fp8_loss_is_within_two_percent_of_fp32(tmp_path, seed, device):
    command = [sys.executable, str(TRAIN), "--precision", "fp32", "fp8", "--seed", str(seed)]
    command += ["--device", device.type, "--sample", "0", "--out", str(tmp_path)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    fp32, fp8 = json.loads((tmp_path / "results.json").read_text())["results"]
    assert fp32["validation_loss"] <= 0.6 * math.log(fp32["vocabulary"])
    assert abs(fp8["validation_loss"] / fp32["validation_loss"] - 1) <= 0.02
    assert fp8["gemms_per_linear_and_step"] == 3.0
