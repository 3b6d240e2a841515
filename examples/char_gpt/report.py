"""What a run leaves behind: a table, a loss-curve picture and a JSON file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Result:
    """Figures of one training run; losses are mean cross-entropies in nats per character."""

    precision: str
    vocabulary: int
    steps: int
    linears: int
    validation_loss: float = math.nan
    tokens_per_second: float = math.nan  # training steps alone
    seconds: float = 0.0  # everything: first-use builds, training, validation
    gemms_per_linear_and_step: float | None = None  # None where the run issues no FP8 GEMM
    train_losses: list[float] = field(default_factory=list)  # one per step
    train_losses_from: int = 0  # the step of the first entry; above 0 after a resume
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    sample: str = ""


def table(results: list[Result]) -> str:
    """A plain-text table with one line per precision."""
    baseline = next((r.validation_loss for r in results if r.precision == "fp32"), None)
    rows = [
        (
            "precision",
            "validation loss",
            "/ fp32",
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
                "-" if baseline is None else f"{r.validation_loss / baseline:.4f}",
                f"{r.validation_loss / math.log(r.vocabulary):.4f}",
                f"{r.tokens_per_second:,.0f}",
                f"{r.seconds:.1f}",
                "-" if gemms is None else f"{gemms:g}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """Exponential moving average without the bias towards its first value."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        out.append(mean / weight)
    return out


def picture(results: list[Result], path: Path) -> bool:
    """Draws training (lines) and validation losses (dots) to ``path``; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for result in results:
        losses = smooth(result.train_losses)
        steps = [result.train_losses_from + i + 1 for i in range(len(losses))]
        (line,) = axes.plot(steps, losses, label=f"{result.precision}, training (smoothed)")
        axes.plot(
            [s for s, _ in result.validation_losses],
            [loss for _, loss in result.validation_losses],
            "o",
            color=line.get_color(),
            label=f"{result.precision}, validation ({result.validation_loss:.4f})",
        )
    axes.set(xlabel="step", ylabel="cross-entropy, nats per character")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def write_json(results: list[Result], settings: dict[str, object], path: Path) -> None:
    """Writes the settings and every figure to ``path``."""
    content = {"settings": settings, "results": [asdict(r) for r in results]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
