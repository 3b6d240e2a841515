"""Common part of the examples: the command line, the training loop, the table and the picture.

An example states a ``Task``: its model, batches, loss and measure. ``compare`` trains it without
FP8 and with every recipe asked for, from the same seed and on the same batches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

import apex_te
from apex_te.fp8.arguments import add_fp8_arguments, recipe_from_arguments
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import DelayedScaling, Recipe, make_recipe

# Every recipe, by the names of the command line: recipe and format (None: the recipe's own).
RECIPES = (
    ("delayed", None),
    ("tensorwise", None),
    ("blockwise", None),
    ("mxfp8", None),
    ("tensorwise", "hif8"),
)
HISTORY = 16  # amaxes that delayed scaling looks back on: the runs are short
LOG_EVERY = 10  # steps between readings of the loss, each of which waits for the device


class Task(Protocol):
    """Task that an example trains a model for.

    Attributes:
        measure: name of the figure that ``evaluate`` returns, higher is better.
    """

    measure: str

    def model(self, te: bool) -> nn.Module:
        """Returns a new model, of plain PyTorch modules or (``te``) of apex_te's."""

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Returns the next batch, on the device."""

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Returns the mean loss of a batch, fp32."""

    def evaluate(self, model: nn.Module) -> float:
        """Returns the measure on held-out data; called without grad and in eval mode."""


class Run(NamedTuple):
    """One line of the comparison."""

    label: str
    te: bool
    recipe: Recipe | None


@dataclass
class Result:
    """Figures of one run."""

    label: str
    measure: float = math.nan
    losses: list[float] = field(default_factory=list)  # one per step
    measures: list[tuple[int, float]] = field(default_factory=list)  # after so many steps
    seconds: float = 0.0  # everything, the compilation of ops at their first use included
    fp8_products_per_step: float = 0.0


def add_arguments(
    parser: argparse.ArgumentParser, *, steps: int, lr: float, name: str
) -> argparse.ArgumentParser:
    """Adds the arguments that every example takes."""
    add = parser.add_argument
    add("--use-te", action="store_true", help="also train with apex_te's modules, without FP8")
    add(
        "--use-fp8",
        action="store_true",
        help="also train in FP8, with every recipe or those of --fp8-recipe and --fp8-format",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--seed", type=int, default=1)
    add("--steps", type=int, default=steps)
    add("--lr", type=float, default=lr, help="peak learning rate")
    add("--eval-every", type=int, default=max(1, steps // 10), help="steps between evaluations")
    add("--out", type=Path, default=Path("build") / name, metavar="DIR")
    add_fp8_arguments(parser)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the checked command line, with the runs that it asks for in ``args.runs``."""
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("steps", "lr", "eval_every"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    try:
        args.runs = planned(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def planned(args: argparse.Namespace) -> list[Run]:
    """Returns the baseline and the runs that the switches add to it."""
    local = args.transformer_impl == "local"
    if local and (args.use_te or args.use_fp8):
        switch = "--use-fp8" if args.use_fp8 else "--use-te"
        raise ValueError(f"--transformer-impl must be transformer_engine with {switch}, got local")
    runs = [Run("bf16" if args.device.startswith("cuda") else "fp32", False, None)]
    if args.use_te:
        runs.append(Run(f"{runs[0].label}, apex_te", True, None))
    chosen = recipe_from_arguments(args)
    if chosen is not None:
        label = args.fp8_recipe or "delayed"
        label += f" {args.fp8_format}" if args.fp8_format else ""
        runs.append(Run(label, True, _short(chosen)))
    elif args.use_fp8:
        for name, fp8_format in RECIPES:
            label = f"{name} {fp8_format}" if fp8_format else name
            runs.append(Run(label, True, _short(make_recipe(name, fp8_format))))
    return runs


def _short(recipe: Recipe) -> Recipe:
    """Shortens the amax history of delayed scaling for short runs; other recipes stay."""
    if not isinstance(recipe, DelayedScaling):
        return recipe
    return DelayedScaling(fp8_format=recipe.fp8_format, amax_history_len=HISTORY)


@contextlib.contextmanager
def precision(run: Run, device: str) -> Iterator[None]:
    """Enters the precision of a forward: bf16 on a GPU, fp32 on a CPU, FP8 inside if asked for."""
    with contextlib.ExitStack() as stack:
        if device.startswith("cuda"):
            stack.enter_context(torch.autocast("cuda", dtype=torch.bfloat16))
        if run.recipe is not None:
            stack.enter_context(apex_te.fp8_autocast(enabled=True, fp8_recipe=run.recipe))
        yield


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Returns a step's rate: linear warm-up over a tenth of the run, then a cosine to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def train(run: Run, task: Task, args: argparse.Namespace) -> Result:
    """Trains ``task`` once; the same seed gives every run the same start and the same batches."""
    started = time.perf_counter()
    torch.manual_seed(args.seed)
    model = task.model(run.te).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    generator = torch.Generator().manual_seed(args.seed)
    result = Result(run.label)
    pending: list[torch.Tensor] = []
    products = 0
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        batch = task.batch(generator)
        before = fp8_gemm_count()
        with precision(run, args.device):
            loss = task.loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        products += fp8_gemm_count() - before
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        pending.append(loss.detach())
        done = step + 1
        evaluate = done % args.eval_every == 0 or done == args.steps
        if evaluate or done % LOG_EVERY == 0:
            result.losses += torch.stack(pending).tolist()
            pending.clear()
        if evaluate:
            model.eval()
            with torch.no_grad(), precision(run, args.device):
                result.measure = task.evaluate(model)
            model.train()
            result.measures.append((done, result.measure))
    result.fp8_products_per_step = products / args.steps
    result.seconds = time.perf_counter() - started
    print(
        f"{run.label}: loss {result.losses[-1]:.4f}, {task.measure} {result.measure:.4f}, "
        f"{result.seconds:.1f} s",
        flush=True,
    )
    return result


def compare(task: Task, args: argparse.Namespace) -> list[Result]:
    """Trains every run of ``args``, prints the table, writes the figures and draws the picture."""
    results = [train(run, task, args) for run in args.runs]
    print(f"\n{table(results, task.measure)}\n")
    args.out.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(args).items()
        if key != "runs"
    }
    settings |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    content = {"settings": settings, "results": [asdict(result) for result in results]}
    figures = args.out / "results.json"
    figures.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"figures: {figures}")
    drawn = picture(results, task.measure, args.out / "loss.png")
    print(f"curves: {drawn}" if drawn else "curves: not drawn, matplotlib is not installed")
    return results


def table(results: list[Result], measure: str) -> str:
    """Returns a plain-text table with one line per run; the loss is the mean of the last tenth."""
    rows = [("", "loss", measure, "FP8 products per step", "seconds")]
    for result in results:
        tail = result.losses[-max(1, len(result.losses) // 10) :]
        rows.append(
            (
                result.label,
                f"{sum(tail) / len(tail):.4f}",
                f"{result.measure:.4f}",
                f"{result.fp8_products_per_step:g}",
                f"{result.seconds:.1f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """Returns the exponential moving average without the bias towards its first value."""
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        out.append(mean / weight)
    return out


def picture(results: list[Result], measure: str, path: Path) -> Path | None:
    """Draws the losses and the measures over the steps; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for result in results:
        steps = range(1, len(result.losses) + 1)
        left.plot(steps, smooth(result.losses), label=result.label)
        right.plot(*zip(*result.measures, strict=True), "o-", markersize=3, label=result.label)
    left.set(xlabel="step", ylabel="training loss (smoothed)", yscale="log")
    right.set(xlabel="step", ylabel=measure)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
