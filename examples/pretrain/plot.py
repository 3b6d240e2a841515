#!/usr/bin/env python3
"""Draws loss curves of runs, and below them the difference to the first run.

python examples/pretrain/plot.py runs/bf16 runs/delayed runs/blockwise --out loss.png

With ``--save curves.json`` the losses are kept in one small file, which stands for its runs in a
later call: ``plot.py curves.json runs/tensorwise``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from logs import FILE, read_log
from user_error import UserError, needs, run

KINDS = ("train", "held_out")  # of losses that are saved


class Curve(NamedTuple):
    """Losses of one run.

    Attributes:
        name: of the run.
        tokens: number of tokens of a step.
        train: loss by step, as trained on.
        held_out: loss of held-out tokens by step.
        digest: of the token files, as prepare.py says it; None if it is not known.
        seed: of the weights and of the batches' order; None if it is not known.
    """

    name: str
    tokens: int
    train: dict[int, float]
    held_out: dict[int, float]
    digest: str | None = None
    seed: int | None = None


def read_curves(path: Path) -> list[Curve]:
    """Returns the curve of a run's folder or log, or all curves of a file that ``save`` wrote."""
    if path.suffix != ".json":
        return [read_curve(path)]
    return [
        Curve(
            run["name"],
            run["tokens"],
            *({int(step): loss for step, loss in run[kind].items()} for kind in KINDS),
            run.get("digest"),
            run.get("seed"),
        )
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]
    ]


def save(curves: Sequence[Curve], path: Path) -> None:
    """Writes curves into a JSON file, losses with 5 decimals; what else it holds stays."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept["runs"] = [
        {
            "name": curve.name,
            "tokens": curve.tokens,
            "train": {step: round(loss, 5) for step, loss in curve.train.items()},
            "held_out": {step: round(loss, 5) for step, loss in curve.held_out.items()},
            "digest": curve.digest,
            "seed": curve.seed,
        }
        for curve in curves
    ]
    path.write_text(json.dumps(kept) + "\n", encoding="utf-8")


def read_curve(path: Path) -> Curve:
    """Returns the curve of a run's folder, or of its log.

    Raises:
        UserError: the log has no event of a start.
    """
    events = read_log(path / FILE if path.is_dir() else path)
    starts = [event for event in events if event["kind"] == "start"]
    if not starts:
        raise UserError(f"read_curve: path must be the log of a run, got {path}")
    about = starts[-1]
    name = about["recipe"] if about["layers"] == "apex_te" else f"{about['layers']}"
    name += " parameters" if about.get("fp8_params") else ""
    losses = {
        kind: {event["step"]: event["loss"] for event in events if event["kind"] == kind}
        for kind in ("step", "held_out")
    }
    tokens = about["batch"] * about["context"]
    known = (about.get(key) for key in ("digest", "seed"))
    return Curve(name, tokens, losses["step"], losses["held_out"], *known)


def other_data(curves: Sequence[Curve]) -> list[str]:
    """Returns the names of runs whose tokens are known not to be the first run's."""
    first = curves[0].digest
    return [c.name for c in curves if c.digest is not None and first not in (None, c.digest)]


def smooth(losses: dict[int, float], keep: float) -> dict[int, float]:
    """Returns moving averages in which each step before weighs ``keep`` times the one after."""
    mean, weight, found = 0.0, 0.0, {}
    for step, loss in sorted(losses.items()):
        mean = keep * mean + (1 - keep) * loss
        weight = keep * weight + (1 - keep)
        found[step] = mean / weight
    return found


def difference(losses: dict[int, float], base: dict[int, float]) -> dict[int, float]:
    """Returns how much a loss is above the base's, in percent, at the steps that both have."""
    return {step: 100 * (loss / base[step] - 1) for step, loss in losses.items() if step in base}


def table(curves: Sequence[Curve]) -> str:
    """Returns a line for each run: its last held-out loss, and what it is above the first run's.

    The last two columns are the training loss, as ``smooth`` gives it, and how much it is above the
    first run's: halfway and at the end.
    """
    lines = [
        f"{'run':24} {'tokens':>12} {'held-out':>9} {'to first':>9} {'training':>9} "
        f"{'halfway':>9} {'end':>9}"
    ]
    first = smooth(curves[0].train, 0.98)
    for curve in curves:
        steps = sorted(curve.held_out)
        last = steps[-1] if steps else max(curve.train)
        held_out = f"{curve.held_out[last]:9.4f}" if steps else f"{'':9}"
        base = curves[0].held_out
        gap = f"{100 * (curve.held_out[last] / base[last] - 1):+8.3f}%" if last in base else ""
        training = smooth(curve.train, 0.98)
        end = max(curve.train)
        gaps = difference(training, first) if curve is not curves[0] else {}
        above = (f"{gaps[at]:+8.3f}%" if at in gaps else "" for at in (end // 2, end))
        lines.append(
            f"{curve.name:24} {last * curve.tokens:12,} {held_out} {gap:>9} {training[end]:9.4f} "
            + " ".join(f"{text:>9}" for text in above)
        )
    return "\n".join(line.rstrip() for line in lines)


def draw(curves: Sequence[Curve], path: Path, keep: float = 0.98) -> None:
    """Draws the curves into a file.

    Args:
        curves: the first one is the base of the differences.
        path: the picture.
        keep: as in ``smooth``.
    """
    needs("matplotlib", "plot.py")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    base = curves[0]
    for curve in curves:
        train = smooth(curve.train, keep)
        x: Any = [step * curve.tokens / 1e6 for step in train]
        (line,) = above.plot(x, list(train.values()), linewidth=1, label=curve.name)
        marks = {"color": line.get_color(), "markersize": 4}
        held_out = sorted(curve.held_out.items())
        x = [step * curve.tokens / 1e6 for step, _ in held_out]
        above.plot(x, [loss for _, loss in held_out], "o", **marks)
        if curve is base:
            continue
        gap = difference(train, smooth(base.train, keep))
        x = [step * curve.tokens / 1e6 for step in gap]
        below.plot(x, list(gap.values()), linewidth=1, color=line.get_color())
        gap = difference(curve.held_out, base.held_out)
        x = [step * curve.tokens / 1e6 for step in gap]
        below.plot(x, list(gap.values()), "o", **marks)
    above.set(ylabel="loss, nats per token; dots: held out")
    below.set(xlabel="million tokens", ylabel=f"above {base.name}, %", ylim=_limits(below))
    below.axhline(0, color="black", linewidth=0.8)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend()
    figure.savefig(path, dpi=100)  # 900 pixels, a page's width
    pyplot.close(figure)


def _limits(axes: Any) -> tuple[float, float]:
    """Returns limits of the differences that show half a percent at least and 2 at most."""
    low, high = axes.get_ylim()
    return max(-2.0, min(low, -0.5)), min(2.0, max(high, 0.5))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table of runs and draws them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders or saved curves, base first")
    parser.add_argument("--out", type=Path, default=Path("loss.png"))
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the curves as JSON, too")
    args = parser.parse_args(argv)
    curves = [curve for path in args.runs for curve in read_curves(path)]
    print(table(curves))
    if others := other_data(curves):
        print(f"not trained on the tokens of {curves[0].name}: {', '.join(others)}")
    if args.save:
        save(curves, args.save)
    draw(curves, args.out)
    print(args.out)


if __name__ == "__main__":
    run(main)
