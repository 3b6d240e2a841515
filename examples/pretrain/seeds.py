#!/usr/bin/env python3
"""Compares recipes over runs of several seeds: mean difference to the base, and its standard error.

python examples/pretrain/seeds.py runs/bf16-1 runs/blockwise-1 runs/bf16-2 runs/blockwise-2

Two runs of one precision end as far apart as their first roundings drive them, so that a single run
cannot tell a recipe's effect from chance; the mean over seeds can. Runs of one seed start from the
same weights and see the same batches, so differences are taken seed by seed. ``--save seeds.json``
keeps the losses in one file, which stands for its runs in a later call.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from plot import Curve, difference, other_data, read_curves, save


class Effect(NamedTuple):
    """Difference of a recipe's held-out loss to the base's, in percent, over seeds.

    Attributes:
        step: of the evaluations.
        seeds: number of seeds that ran both.
        mean: of the differences.
        error: standard error of the mean; None for a single seed.
    """

    step: int
    seeds: int
    mean: float
    error: float | None


def by_seed(curves: Sequence[Curve]) -> dict[str, dict[int, Curve]]:
    """Returns the curves by name of the run, then by seed.

    Raises:
        ValueError: a run's seed is not known, or two runs are of one name and seed.
    """
    found: dict[str, dict[int, Curve]] = {}
    for curve in curves:
        if curve.seed is None:
            raise ValueError(f"by_seed: curves must have seeds, got {curve.name} without one")
        runs = found.setdefault(curve.name, {})
        if curve.seed in runs:
            raise ValueError(
                f"by_seed: curves must be one of each name and seed, got two of {curve.name}, "
                f"seed {curve.seed}"
            )
        runs[curve.seed] = curve
    return found


def effects(runs: dict[int, Curve], base: dict[int, Curve]) -> list[Effect]:
    """Returns the effect at each step at which all seeds of both were evaluated, in order.

    Args:
        runs: of one recipe, by seed.
        base: the runs to compare with; seeds that ``runs`` lacks are left out, and the reverse.
    """
    seeds = sorted(runs.keys() & base.keys())
    gaps = [difference(runs[seed].held_out, base[seed].held_out) for seed in seeds]
    common = set.intersection(*(set(gap) for gap in gaps)) if gaps else set()
    found = []
    for step in sorted(common):
        values = [gap[step] for gap in gaps]
        error = stdev(values) / sqrt(len(values)) if len(values) > 1 else None
        found.append(Effect(step, len(values), mean(values), error))
    return found


def spread(runs: dict[int, Curve], step: int) -> float | None:
    """Returns the standard deviation of a step's held-out loss over seeds, in percent of the mean.

    None with fewer than two runs that were evaluated at the step.
    """
    losses = [run.held_out[step] for run in runs.values() if step in run.held_out]
    return 100 * stdev(losses) / mean(losses) if len(losses) > 1 else None


def table(curves: Sequence[Curve]) -> str:
    """Returns a line for each recipe and evaluation; the first curve's recipe is the base.

    The last column is the standard deviation of single runs of the recipe, in percent.
    """
    runs = by_seed(curves)
    base = runs[curves[0].name]
    lines = [
        f"{'run':24} {'tokens':>12} {'seeds':>6} {'held-out':>9} {'to base':>9} "
        f"{'error':>8} {'spread':>8}"
    ]
    for name, of_name in runs.items():
        for effect in effects(of_name, base):
            losses = [of_name[seed].held_out[effect.step] for seed in of_name.keys() & base.keys()]
            apart = spread(of_name, effect.step)
            is_base = of_name is base
            lines.append(
                f"{name:24} {effect.step * curves[0].tokens:12,} {effect.seeds:6} "
                f"{mean(losses):9.4f} {'' if is_base else f'{effect.mean:+8.3f}%':>9} "
                f"{'' if is_base or effect.error is None else f'{effect.error:7.3f}%':>8} "
                f"{'' if apart is None else f'{apart:7.3f}%':>8}".rstrip()
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table of recipes and evaluations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders or saved curves, base first")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the curves as JSON, too")
    args = parser.parse_args(argv)
    curves = [curve for path in args.runs for curve in read_curves(path)]
    print(table(curves))
    if others := other_data(curves):
        print(f"not trained on the tokens of {curves[0].name}: {', '.join(others)}")
    if args.save:
        save(curves, args.save)


if __name__ == "__main__":
    main()
