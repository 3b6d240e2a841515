"""Results of a run: a table, a loss-curve picture and a JSON file."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

sys.path.pop(0)  # where the folder jax would pass for the package


@dataclass
class Result:
    """Figures of one training run; losses are mean cross-entropies in nats per character."""

    precision: str
    vocabulary: int
    steps: int
    linears: int
    validation_loss: float = math.nan
    validation_characters: int = 0  # held-out characters that a validation predicts
    tokens_per_second: float = math.nan  # training steps alone, without the first few
    seconds: float = 0.0  # everything: first-use builds, training, validation
    gemms_per_linear_and_step: float | None = None  # None where the run issues no FP8 GEMM
    train_losses: list[float] = field(default_factory=list)  # one per step
    train_losses_from: int = 0  # the step of the first entry; above 0 after a resume
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    sample: str = ""


def table(results: list[Result]) -> str:
    """Returns a plain-text table with one line per run, all compared with the first."""
    baseline = results[0]
    rows = [
        (
            "precision",
            "validation loss",
            f"/ {baseline.precision}",
            "/ ln(vocab)",
            "tokens/s",
            "seconds",
            "FP8 GEMMs per Linear and step",
        )
    ]
    for r in results:
        gemms = r.gemms_per_linear_and_step
        rows.append(
            (
                r.precision,
                f"{r.validation_loss:.4f}",
                f"{r.validation_loss / baseline.validation_loss:.4f}",
                f"{r.validation_loss / math.log(r.vocabulary):.4f}",
                f"{r.tokens_per_second:,.0f}",
                f"{r.seconds:.1f}",
                "-" if gemms is None else f"{gemms:g}",
            )
        )
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns ``rows`` right-aligned under the first one."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def picture(results: list[Result], path: Path) -> bool:
    """Draws losses, and their ratios to the first run's, to ``path``; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    baseline = dict(results[0].validation_losses)
    for result in results:
        losses = common.smooth(result.train_losses)
        steps = [result.train_losses_from + i + 1 for i in range(len(losses))]
        label = f"{result.precision} ({result.validation_loss:.4f})"
        (line,) = left.plot(steps, losses, label=label)
        left.plot(*zip(*result.validation_losses, strict=True), "o", color=line.get_color())
        ratios = [(s, loss / baseline[s]) for s, loss in result.validation_losses if s in baseline]
        if ratios:
            right.plot(*zip(*ratios, strict=True), "o-", markersize=4, color=line.get_color())
    left.set(xlabel="step", ylabel="cross-entropy, nats per character")
    left.set_title("training (smoothed, lines) and validation (dots)")
    right.ticklabel_format(useOffset=False)
    right.set(xlabel="step", title=f"validation loss / that of {results[0].precision}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def write_json(results: list[Result], settings: dict[str, object], path: Path) -> None:
    """Writes the settings and every figure to ``path``."""
    content = {"settings": settings, "results": [asdict(r) for r in results]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
