"""Model of the time that a training step's collectives take, and how much of it is not hidden.

    python benchmarks/scaling_model.py --table              # docs/scaling.md, between its marks
    python benchmarks/scaling_model.py --check              # predicted beside measured times

A collective takes a latency and its bytes over a bandwidth: inside a node those that
layers/bench_scaling.py measured (results/scaling.json), between nodes ASSUMED ones. Communication
hides only where the code lets it: the reduction of an input's gradient beside the weight gradient's
product, the second gather of an input beside the product before that, FSDP2's gathers and
reductions beside the forward and the backward of a layer. What is hidden slows the computation, as
much as it did in the measured layers.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import scaling_collectives as paper
from scaling_collectives import Collective, Group, Layout, Model, Recipe

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "scaling.json"
PAGE = ROOT / "docs" / "scaling.md"
MARKS = ("<!-- table -->", "<!-- end -->")

# Assumed, not measured: one adapter for each GPU, and the time of a step between nodes.
NETWORK_GB_PER_S = 400 / 8
HOP_US = 5.0


class Link(NamedTuple):
    """Time of a collective inside a node: latency in microseconds, bus bandwidth in GB/s."""

    latency_us: float
    gb_per_s: float


def fitted(points: Sequence[tuple[float, float]]) -> Link:
    """The line time = latency + sent / bandwidth of least relative errors, of (bytes, us)."""
    a = sum(1 / t**2 for _, t in points)
    b = sum(x / t**2 for x, t in points)
    c = sum(x * x / t**2 for x, t in points)
    p, q = sum(1 / t for _, t in points), sum(x / t for x, t in points)
    slope = (a * q - b * p) / (a * c - b * b)
    return Link(max(0.0, (p - b * slope) / a), 1e-3 / slope)


class Machine:
    """Times by the measurements of a results file."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows

    @classmethod
    def measured(cls, path: Path = RESULTS) -> Machine:
        """Reads the rows that bench_scaling.py wrote to ``path``."""
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing: torchrun --nproc_per_node 4 benchmarks/layers/bench_scaling.py"
            )
        return cls(json.loads(path.read_text())["rows"])

    @cached_property
    def links(self) -> dict[tuple[str, int], Link]:
        """Links by collective and number of ranks."""
        points: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for row in self.rows:
            if "collective" in row:
                op, ranks = row["collective"], row["ranks"]
                sent = Collective("", "", op, row["bytes"], Group(ranks, ranks)).sent
                points.setdefault((op, ranks), []).append((sent, row["us"]))
        return {key: fitted(found) for key, found in points.items()}

    def link(self, op: str, ranks: int) -> Link:
        """Returns the link that was measured with the number of ranks nearest to ``ranks``."""
        measured = [n for name, n in self.links if name == op]
        return self.links[op, min(measured, key=lambda n: abs(n - ranks))]

    def milliseconds(self, c: Collective) -> float:
        """Milliseconds of one collective with nothing beside it."""
        ranks, local = c.group
        if ranks == 1:
            return 0.0
        inside = self.link(c.op, local)
        nodes = ranks / local
        if nodes == 1:
            return inside.latency_us / 1e3 + c.sent / inside.gb_per_s / 1e6
        # trees
        hops = 2 * math.ceil(math.log2(nodes)) if c.op == "all_reduce" else nodes - 1
        latency = (inside.latency_us + HOP_US * hops) / 1e3
        if c.op == "all_to_all":  # what leaves the node goes through the rank's own adapter
            leaving = c.size * (ranks - local) / ranks / NETWORK_GB_PER_S
            return latency + max(leaving, c.sent / inside.gb_per_s) / 1e6
        bandwidth = min(inside.gb_per_s, local * NETWORK_GB_PER_S)
        return latency + c.sent / bandwidth / 1e6

    def rate(self, recipe: Recipe) -> float:
        """FLOPs in a millisecond of the layer that bench_scaling.py measured on one GPU."""
        stack = "bf16" if recipe.scaling == "none" else "delayed"
        row = next(r for r in self.rows if r.get("alone") == stack)
        model = replace(MODELS["Llama-3-8B"], sequence=row["tokens"], batch=row["batch"])
        return 3 * sum(model.flops().values()) / row["ms"]

    def compute(self, model: Model, layout: Layout, recipe: Recipe) -> dict[str, float]:
        """Milliseconds of the computations that collectives run beside."""
        rate = self.rate(recipe) * layout.tp
        times = {name: flops / rate for name, flops in model.flops().items()}
        found = {"forward": sum(times.values()), "backward": 2 * sum(times.values())}
        for column in ("qkv", "fc1"):
            found |= {f"dgrad {column}": times[column], f"wgrad {column}": times[column]}
        return found

    def exposed(
        self, found: Sequence[Collective], compute: dict[str, float]
    ) -> tuple[float, float]:
        """Milliseconds that ``found`` take beyond what runs beside them, and beside it."""
        total: dict[str | None, float] = {}
        for c in found:
            total[c.beside] = total.get(c.beside, 0.0) + self.milliseconds(c)
        beside = {key: compute[key] if key else 0.0 for key in total}
        beyond = sum(max(0.0, time - beside[key]) for key, time in total.items())
        return beyond, sum(total.values()) - beyond

    @cached_property
    def slowdown(self) -> float:
        """Milliseconds that computation loses in one of communication beside it.

        NCCL's kernels take multiprocessors and memory bandwidth. The least squares of what measured
        steps waited for beyond the prediction without it.
        """
        pairs = [(self._parts(*measured_case(row), False), row["waited ms"])
                 for row in self.rows if "waited ms" in row]  # fmt: skip
        square = sum(hidden**2 for (_, _, hidden), _ in pairs)
        if not square:
            return 0.0
        return max(0.0, sum(h * (ms - beyond) for (_, beyond, h), ms in pairs) / square)

    def _parts(
        self, model: Model, layout: Layout, recipe: Recipe, root: bool
    ) -> tuple[float, float, float]:
        """Milliseconds of computation, of communication beyond it and beside it."""
        compute = self.compute(model, layout, recipe)
        layer = paper.layer_collectives(model, layout, recipe)
        # Nothing runs beside the first unit's gather and the last one's reduction.
        once = [c._replace(beside=None) for c in layer if c.axis in ("fsdp", "replicas")]
        once = [c for c in once if c.phase == "forward" or c.op != "all_gather"]
        if root:
            once += paper.step_collectives(model, layout, recipe)
        beyond, beside = self.exposed(layer, compute)
        edges = self.exposed(once, compute)[0]
        total = model.layers * (compute["forward"] + compute["backward"])
        return total, model.layers * beyond + edges, model.layers * beside

    def step(
        self, model: Model, layout: Layout, recipe: Recipe, root: bool = True
    ) -> tuple[float, float]:
        """Milliseconds of a step's layers, and what communication adds, with the ``root``'s."""
        total, beyond, beside = self._parts(model, layout, recipe, root)
        return total, beyond + self.slowdown * beside


_MODELS = (
    Model("Llama-3-8B", 4096, 14336, 32, 8, 32, 128256, 8192),
    Model("Llama-3-70B", 8192, 28672, 64, 8, 80, 128256, 8192),
    Model("Mixtral-8x7B", 4096, 14336, 32, 8, 32, 32000, 8192, experts=8, topk=2),
)
MODELS = {model.name: model for model in _MODELS}

# Sequences of 8192 tokens, one to a microbatch: at most 16.8 M tokens in a step.
PLANS = {
    "Llama-3-8B": {8: (1, 8, 1), 64: (1, 64, 1), 512: (1, 64, 1), 4096: (2, 64, 1),
                   16384: (8, 64, 1)},
    "Llama-3-70B": {8: (8, 1, 1), 64: (8, 8, 1), 512: (8, 64, 1), 4096: (8, 64, 1),
                    16384: (8, 64, 1)},
    "Mixtral-8x7B": {8: (1, 8, 8), 64: (1, 64, 8), 512: (1, 64, 8), 4096: (2, 64, 8),
                     16384: (8, 64, 8)},
}  # fmt: skip
RECIPES = {"bf16": Recipe(), "FP8": Recipe("delayed", fp8_all_gather=True)}
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
AXES = ("tp", "ep", "fsdp")


def lines(rows: Sequence[Sequence[str]]) -> str:
    first, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([first, "|" + "---|" * len(rows[0]), *rest])


def counts(found: Sequence[Collective]) -> str:
    """Number of collectives of each kind, in the order of ``OPS``."""
    return " / ".join(str(sum(c.op == op for c in found)) for op in OPS)


def sent(found: Sequence[Collective], axis: str) -> str:
    """MB that a rank sends over an axis; what replicas reduce belongs to FSDP."""
    axes = ("fsdp", "replicas") if axis == "fsdp" else (axis,)
    return f"{sum(c.sent for c in found if c.axis in axes) / 1e6:,.0f}"


def table(machine: Machine) -> str:
    """One line for each model, number of GPUs and recipe."""
    head = ["model", "GPUs", "TP", "FSDP", "replicas", "EP", "recipe", "a layer's collectives"]
    head += [f"{axis.upper()} MB" for axis in AXES]
    head += ["a step's collectives", "a step's GB", "computation ms", "exposed ms", "share"]
    rows = [head]
    for name, plan in PLANS.items():
        model = MODELS[name]
        for ranks, (tp, shard, ep) in plan.items():
            layout = Layout(ranks, tp, shard=shard, ep=ep)
            for label, recipe in RECIPES.items():
                layer = paper.layer_collectives(model, layout, recipe)
                once = paper.step_collectives(model, layout, recipe)
                step = [*layer * model.layers, *once]
                compute, exposed = machine.step(model, layout, recipe)
                row: list[Any] = [name, ranks, tp, shard, layout.replicas, ep, label]
                row += [counts(layer), *(sent(layer, axis) for axis in AXES), counts(step)]
                row += [f"{sum(c.sent for c in step) / 1e9:.1f}", f"{compute:.0f}"]
                row += [f"{exposed:.1f}", f"{exposed / (compute + exposed):.1%}"]
                rows.append([str(cell) for cell in row])
    return lines(rows)


def links(machine: Machine) -> str:
    """The measured latencies and bandwidths that the table is made with."""
    rows = [["collective", "GPUs", "latency us", "bus bandwidth GB/s"]]
    for (op, ranks), link in sorted(machine.links.items()):
        rows.append([op, str(ranks), f"{link.latency_us:.0f}", f"{link.gb_per_s:.0f}"])
    return lines(rows)


def measured_case(row: dict[str, Any]) -> tuple[Model, Layout, Recipe]:
    """Returns the case that bench_scaling.py measured in ``row``."""
    sizes = {"sequence": row["tokens"], "batch": row["batch"], "layers": row["layers"]}
    model = replace(MODELS["Llama-3-8B"], **sizes)
    ranks, tp = row["ranks"], row["ranks"] if row["split"] == "tp" else 1
    recipe = RECIPES["bf16" if row["stack"] == "bf16" else "FP8"]
    return model, Layout(ranks, tp, shard=ranks // tp), recipe


def predicted(machine: Machine, row: dict[str, Any]) -> float:
    """Milliseconds that the step of ``row`` waits for communication."""
    return machine.step(*measured_case(row), root=False)[1]


def check(machine: Machine) -> str:
    rows = [["split", "GPUs", "precision", "layers", "step ms", "against copies ms", "waited ms",
             "predicted ms"]]  # fmt: skip
    for row in machine.rows:
        if "split" in row:
            cells = [row[name] for name in ("split", "ranks", "stack", "layers")]
            times = [row["ms"], row["exposed ms"], row["waited ms"], predicted(machine, row)]
            rows.append([str(cell) for cell in cells] + [f"{ms:.2f}" for ms in times])
    return lines(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", action="store_true", help="write the tables of docs/scaling.md")
    parser.add_argument("--check", action="store_true", help="print predicted and measured times")
    args = parser.parse_args()
    machine = Machine.measured()
    if args.table:
        text = PAGE.read_text(encoding="utf-8")
        before, rest = text.split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        lost = "A millisecond of hidden communication slows computation by "
        lost += f"{machine.slowdown:.2f} ms."
        made = "\n\n".join([links(machine), check(machine), lost, table(machine)])
        page = f"{before}{MARKS[0]}\n{made}\n{MARKS[1]}{after}"
        PAGE.write_text(page, encoding="utf-8")
    if args.check or not args.table:
        print(check(machine))


if __name__ == "__main__":
    main()
