"""Does FP8 training follow the baseline? examples/char_gpt with every recipe and several seeds.

    python benchmarks/layers/convergence.py
    python benchmarks/layers/convergence.py --device cpu --jobs 2 --layers 2 --tolerance 0.015

Every run has a process, and ``--jobs`` runs share the device. Switches that ``--help`` does
not list go to examples/char_gpt/train.py. Prints a table, writes char_gpt_h200.json (or the name of
another device) and draws a picture beside it. Ends with status 1 where a requirement fails:

- the mean validation loss of each recipe's seeds is within ``--tolerance`` of the baseline's;
- the baseline's loss has fallen by half and is still falling;
- FP8 runs issue three FP8 products per linear layer of a block and step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "char_gpt"))
import data
import harness
import report
import train
from result_file import result_text

ROOT = Path(__file__).resolve().parents[2]
_PRODUCTS = "products per Linear and step"

# A worker's own arguments and text.
_prepared: tuple[argparse.Namespace, data.Corpus]


def prepare(words: Sequence[str], threads: int) -> None:
    global _prepared
    torch.set_num_threads(threads)
    train.make_deterministic()
    train.tqdm = None
    args = train.parse(words)
    _prepared = args, data.load_corpus(args.max_bytes).to(torch.device(args.device))


def work(index: int, seed: int) -> report.Result:
    args, corpus = _prepared
    own = argparse.Namespace(**{**vars(args), "seed": seed})
    return train.Training(args.runs[index], own, corpus).train()


def results_of(
    words: Sequence[str], runs: int, seeds: Sequence[int], jobs: int
) -> Iterator[tuple[int, report.Result]]:
    """(seed, result) of every run and seed, as they end."""
    threads = max(1, torch.get_num_threads() // jobs)
    # CUDA does not survive a fork.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, prepare, (words, threads)) as pool:
        # Recipes that are decoded take longest: begin with them.
        tasks = [(index, seed) for index in reversed(range(runs)) for seed in seeds]
        futures = {pool.submit(work, *task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future][1], future.result()


def summary(label: str, results: Sequence[report.Result], baseline: float | None) -> dict[str, Any]:
    """One line of the table; ``results`` are the seeds' of one run."""
    losses = [result.validation_loss for result in results]
    mean = statistics.mean(losses)
    return {
        "precision": label,
        "validation loss": mean,
        "ratio": 1.0 if baseline is None else mean / baseline,
        "spread": (max(losses) - min(losses)) / mean,
        "seeds": losses,
        _PRODUCTS: sorted({r.gemms_per_linear_and_step for r in results}, key=str),
        "tokens/s": statistics.median(r.tokens_per_second for r in results),
    }


def fall(results: Sequence[report.Result]) -> dict[str, float]:
    """The seeds' mean losses in training, at the start, and over tenths of the run after it."""
    curves = [result.train_losses for result in results]
    steps = len(curves[0])
    tenth = max(1, steps // 10)

    def mean(begin: int) -> float:
        return statistics.mean(x for curve in curves for x in curve[begin : begin + tenth])

    return {
        "first step": statistics.mean(curve[0] for curve in curves),
        "middle": mean(steps // 2 - tenth // 2),
        "last but one tenth": mean(steps - 2 * tenth),
        "last tenth": mean(steps - tenth),
    }


def failures(
    rows: Sequence[dict[str, Any]], falls: dict[str, float], tolerance: float
) -> list[str]:
    failed = []
    for row in rows[1:]:
        if not abs(row["ratio"] - 1) <= tolerance:
            failed.append(f"{row['precision']}: ratio {row['ratio']:.4f}")
        counts, fp8 = row[_PRODUCTS], "apex_te" not in row["precision"]
        if counts != ([3.0] if fp8 else [None]):
            failed.append(f"{row['precision']}: {_PRODUCTS} {counts}")
    label = rows[0]["precision"]
    if not falls["last tenth"] <= falls["first step"] / 2:
        failed.append(f"{label}: the loss has not fallen by half")
    if not falls["last tenth"] < falls["last but one tenth"]:
        failed.append(f"{label}: the loss is not falling any more")
    return failed


def printed(rows: Sequence[dict[str, Any]], falls: dict[str, float]) -> str:
    """The table, and the baseline's way down."""
    label = rows[0]["precision"]
    losses = ("validation loss", f"/ {label}", "spread of seeds", "seeds")
    lines = [("", *losses, "FP8 GEMMs", "tokens/s")]
    for row in rows:
        counts = ["-" if n is None else f"{n:g}" for n in row[_PRODUCTS]]
        seeds = " ".join(f"{loss:.4f}" for loss in row["seeds"])
        figures = (f"{row['validation loss']:.4f}", f"{row['ratio']:.4f}", f"{row['spread']:.2%}")
        speed = f"{row['tokens/s']:,.0f}"
        lines.append((row["precision"], *figures, seeds, " ".join(counts), speed))
    way = ", ".join(f"{name} {loss:.4f}" for name, loss in falls.items())
    return f"{report.columns(lines)}\nFP8 GEMMs: per Linear and step\n{label}, training: {way}"


def picture(groups: dict[str, list[report.Result]], tolerance: float, path: Path) -> bool:
    """Mean validation loss over the steps, and its ratio to the baseline's; seeds as dots."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    ends = {label: [r.validation_loss for r in results] for label, results in groups.items()}
    base, *_ = (statistics.mean(losses) for losses in ends.values())
    for place, (label, results) in enumerate(groups.items()):
        steps = [step for step, _ in results[0].validation_losses]
        curves = zip(*([loss for _, loss in r.validation_losses] for r in results), strict=True)
        (line,) = left.plot(steps, [statistics.mean(c) for c in curves], label=label)
        ratios = [loss / base for loss in ends[label]]
        right.plot([place] * len(ratios), ratios, "o", markersize=4, color=line.get_color())
        right.plot([place], [statistics.mean(ratios)], "_", markersize=28, color=line.get_color())
    left.set(xlabel="step", ylabel="validation loss, nats per character")
    left.legend()
    right.axhspan(1 - tolerance, 1 + tolerance, alpha=0.15)
    right.set_xticks(range(len(groups)), list(groups), rotation=20)
    right.set(ylabel=f"final validation loss / mean of {next(iter(groups))}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--jobs", type=int, default=4, help="processes at once")
    add("--tolerance", type=float, default=0.01, help="of the ratio to the baseline")
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    add("--out", type=Path, default=out, metavar="DIR")
    own, words = parser.parse_known_args(argv)
    words = ["--use-fp8", "--sample", "0", *words]
    args = train.parse(words)
    started = time.perf_counter()
    groups: dict[str, dict[int, report.Result]] = {run.label: {} for run in args.runs}
    for seed, result in results_of(words, len(args.runs), own.seeds, own.jobs):
        groups[result.precision][seed] = result
        loss = f"validation loss {result.validation_loss:.4f}, {result.seconds:.0f} s"
        print(f"{result.precision}, seed {seed}: {loss}", flush=True)
    ordered = {label: [seeds[s] for s in own.seeds] for label, seeds in groups.items()}
    rows: list[dict[str, Any]] = []
    for label, results in ordered.items():
        rows.append(summary(label, results, rows[0]["validation loss"] if rows else None))
    baseline = next(iter(ordered.values()))
    falls = fall(baseline)
    failed = failures(rows, falls, own.tolerance)
    content = {
        "environment": harness.environment(),
        "settings": {name: getattr(args, name) for name in (*train.RUN_SETTINGS[1:], "device")},
        "seeds": own.seeds,
        "held-out characters": baseline[0].validation_characters,
        "seconds": time.perf_counter() - started,
        "jobs": own.jobs,
        "tolerance": own.tolerance,
        "failed": failed,
        "baseline's training loss": falls,
        "rows": rows,
        "curves": {
            label: [result.validation_losses for result in results]
            for label, results in ordered.items()
        },
    }
    print(f"\n{printed(rows, falls)}")
    print(f"held-out characters: {baseline[0].validation_characters:,}")
    print(f"fails: {'; '.join(failed)}" if failed else "every requirement holds")
    own.out.mkdir(parents=True, exist_ok=True)
    name = content["environment"].get("gpu", "cpu") if args.device.startswith("cuda") else "cpu"
    path = own.out / f"char_gpt_{name.split()[-1].lower()}.json"
    path.write_text(result_text(content), encoding="utf-8")
    print(f"figures: {path}")
    if picture(ordered, own.tolerance, path.with_suffix(".png")):
        print(f"curves: {path.with_suffix('.png')}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
