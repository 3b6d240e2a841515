#!/usr/bin/env python3
"""Trains the JAX examples with three seeds, without FP8 and with each recipe; compares accuracies.

python benchmarks/with_jax/accuracy.py
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "jax"))
import encoder
import mnist
from result_file import provenance, result_text
from training import RECIPES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "jax_accuracy.json"
EXAMPLES = {"encoder": encoder, "mnist": mnist}


def runs(name: str, recipes: list[str], seeds: int, words: list[str]) -> dict[str, Any]:
    """Trains an example with and without FP8; returns the figures of each by its label."""
    found: dict[str, Any] = {}
    for recipe in (None, *recipes):
        chosen = [] if recipe is None else ["--use-fp8", "--fp8-recipe", recipe]
        run = EXAMPLES[name].main
        results = [run([*words, *chosen, "--seed", str(seed)]) for seed in range(seeds)]
        figures = {key: [r[key] for r in results] for key in ("accuracy", "loss", "seconds")}
        mean = {key: float(np.mean(values)) for key, values in figures.items()}
        found[results[0]["run"]] = {
            "accuracy": figures["accuracy"],
            "mean_accuracy": mean["accuracy"],
            "mean_loss": mean["loss"],
            "seconds": mean["seconds"],
            "steps": results[0]["steps"],
        }
    base = next(iter(found.values()))["mean_accuracy"]
    for figures in found.values():
        figures["difference_in_points"] = 100 * (figures["mean_accuracy"] - base)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES[:3]))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, words = parser.parse_known_args()
    # Every seed runs the same programs.
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        figures = {name: runs(name, args.recipes, args.seeds, words) for name in args.examples}
    for name, found in figures.items():
        for label, line in found.items():
            print(
                f"{name:8} {label:16} accuracy {line['mean_accuracy']:.4f}"
                f" ({line['difference_in_points']:+.2f} points), loss {line['mean_loss']:.4f},"
                f" {line['seconds']:.1f} s"
            )
    settings = {
        "jax": jax.__version__,
        "device": str(jax.devices()[0].device_kind),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "seeds": args.seeds,
    }
    content = {"environment": provenance(), "settings": settings, "results": figures}
    args.out.write_text(result_text(content), encoding="utf-8")


if __name__ == "__main__":
    main()
