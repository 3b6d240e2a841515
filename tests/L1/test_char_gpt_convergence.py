"""FP8 training follows the baseline on real text: every recipe, three seeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "layers" / "convergence.py"
# A CPU trains a smaller model for a shorter time, on which seeds and rounding act more.
SIZES = {
    "cuda": ["--jobs", "4"],
    "cpu": ["--jobs", "2", "--steps", "300", "--layers", "2", "--tolerance", "0.015"],
}


def test_every_recipe_follows_the_baseline(tmp_path, device):
    """The script's requirements hold; what it states about itself is checked here again."""
    command = [sys.executable, str(SCRIPT), "--device", device.type, "--out", str(tmp_path)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command + SIZES[device.type], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    (figures,) = tmp_path.glob("char_gpt_*.json")
    content = json.loads(figures.read_text())
    assert content["failed"] == []
    assert done.returncode == 0
    assert content["seeds"] == [1, 2, 3]
    baseline, *recipes = content["rows"]
    assert len(recipes) == 5
    losses = content["baseline's training loss"]
    assert losses["last tenth"] <= losses["first step"] / 2
    assert losses["last tenth"] < losses["last but one tenth"]
    tolerance = 0.01 if device.type == "cuda" else 0.015
    for row in recipes:
        assert len(row["seeds"]) == 3
        mean = sum(row["seeds"]) / 3
        assert abs(mean / (sum(baseline["seeds"]) / 3) - 1) <= tolerance, row["precision"]
        assert row["products per Linear and step"] == [3.0]
    if device.type == "cuda":
        settings = content["settings"]
        assert content["held-out characters"] >= 200_000
        assert (settings["layers"], settings["dim"], settings["steps"]) == (6, 512, 1000)
