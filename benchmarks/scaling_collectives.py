"""Collectives, counts and bytes that the ranks of a training step send each other.

Follows the code of the modules, of FSDP2 and of TokenDispatcher ("all_to_all");
tests/L1/distributed/test_scaling_model.py counts what those really send. ``scaling_model.py`` makes
times of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SLOTS = 5  # amaxes of a GEMM: apex_te.state
HEADER, QUANTUM = 5, 16384  # numbers of the amax collective: apex_te.fp8.delayed.ranks


class Group(NamedTuple):
    """Ranks of a collective, and how many of them share a node."""

    ranks: int
    per_node: int


class Collective(NamedTuple):
    """One collective of a rank."""

    phase: str  # forward, backward, step
    axis: str  # tp, fsdp, replicas, ep, world
    op: str
    size: int  # bytes of its largest buffer: what is gathered, or goes into a reduction or exchange
    group: Group
    beside: str | None = None  # the computation that runs meanwhile; None if all wait for it

    @property
    def sent(self) -> float:
        """Bytes that a rank sends: rings for reductions and gathers, its share to each else."""
        others = (self.group.ranks - 1) / self.group.ranks
        return self.size * others * (2 if self.op == "all_reduce" else 1)


class Weight(NamedTuple):
    """A parameter as a tensor-parallel rank has it."""

    rows: int
    cols: int
    fp8: bool = True  # of an FP8 GEMM


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder without biases, with RMSNorm; ``experts`` 0: a dense MLP."""

    name: str
    hidden: int
    ffn: int
    heads: int
    groups: int
    layers: int
    vocabulary: int
    sequence: int
    batch: int = 1  # sequences of a microbatch
    gated: bool = True
    experts: int = 0
    topk: int = 0

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def gemms(self) -> dict[str, tuple[int, int]]:
        """Out and in features of a layer's GEMMs on one rank."""
        size = self.head
        return {
            "qkv": ((self.heads + 2 * self.groups) * size, self.hidden),
            "proj": (self.hidden, self.heads * size),
            "fc1": (self.ffn * (2 if self.gated else 1), self.hidden),
            "fc2": (self.hidden, self.ffn),
        }

    def flops(self) -> dict[str, float]:
        """Operations of each GEMM and of attention's forward, masked scores not counted."""
        tokens = self.sequence * self.batch
        found = {name: 2.0 * tokens * out * inn for name, (out, inn) in self.gemms().items()}
        for name in ("fc1", "fc2"):
            found[name] *= max(1, self.topk)
        found["attention"] = 2.0 * tokens * self.sequence * self.heads * self.head
        return found


@dataclass(frozen=True)
class Layout:
    """Split of the work over ranks; neighbours share a tensor-parallel group."""

    ranks: int
    tp: int = 1
    sequence_parallel: bool = True
    shard: int = 1  # data-parallel ranks over which FSDP2 shards; the rest of the ranks replicate
    ep: int = 1  # ranks that split the experts; each expert is whole on its rank
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name, parts in (("tp * shard", self.tp * self.shard), ("ep", self.ep)):
            if self.ranks % parts:
                raise ValueError(f"Layout: {name} must divide ranks={self.ranks}, got {parts}")
        wanted = f"divide tp * shard={self.tp * self.shard}"
        if self.tp * self.shard % self.ep:
            raise ValueError(f"Layout: ep must {wanted}, got {self.ep}")
        if self.ep > 1 and self.tp > 1 and not self.sequence_parallel:
            raise ValueError(
                "Layout: sequence_parallel must be True with ep and tp, or ranks would send the "
                "same tokens, got False"
            )

    @property
    def replicas(self) -> int:
        return self.ranks // (self.tp * self.shard)

    def group(self, ranks: int, stride: int) -> Group:
        """``ranks`` that lie ``stride`` apart."""
        per_node = max(1, min(ranks, self.gpus_per_node // stride))
        return Group(ranks, per_node)


@dataclass(frozen=True)
class Recipe:
    """``scaling``: none (high precision), delayed, tensorwise or blockwise."""

    scaling: str = "none"
    fp8_all_gather: bool = False
    value_bytes: int = 2  # of activations, weights and gradients

    @property
    def code_bytes(self) -> int:
        """Bytes of an element of gathered rows: FP8 data where all ranks have the same scale."""
        return 1 if self.scaling in ("delayed", "tensorwise") else self.value_bytes


def tensor_parallel(model: Model, layout: Layout, recipe: Recipe) -> list[Collective]:
    """Lists the collectives of one tensor-parallel layer; with experts, of its attention."""
    if layout.tp == 1:
        return []
    group = layout.group(layout.tp, 1)
    elements = model.sequence * model.batch * model.hidden
    values, codes = elements * recipe.value_bytes, elements * recipe.code_bytes
    found: list[Collective] = []

    def add(phase: str, op: str, size: int, beside: str | None = None) -> None:
        found.append(Collective(phase, "tp", op, size, group, beside))

    # Each column-parallel GEMM is followed by a row-parallel one.
    for column in ("qkv",) if model.experts else ("qkv", "fc1"):
        if not layout.sequence_parallel:
            add("forward", "all_reduce", values)
            add("backward", "all_reduce", values, f"wgrad {column}")
            continue
        for phase in ("forward", "backward"):  # the input's rows, the output gradient's rows
            if recipe.scaling == "tensorwise":
                add(phase, "all_reduce", 4)  # their amax
            add(phase, "all_gather", codes)
        add("forward", "reduce_scatter", values)
        add("backward", "all_gather", codes, f"dgrad {column}")
        add("backward", "reduce_scatter", values, f"wgrad {column}")
    return found


def layer_weights(model: Model, layout: Layout) -> list[Weight]:
    """Parameters of a layer; with experts, of all but those."""
    (qkv, hidden), (_, inner), (fc1, _), (_, fc2) = model.gemms().values()
    tp, norms = layout.tp, [Weight(hidden, 1, False)] * 2
    attention = [Weight(qkv // tp, hidden), Weight(hidden, inner // tp)]
    if model.experts:
        return [*norms, *attention, Weight(model.experts, hidden, False)]
    return [*norms, *attention, Weight(fc1 // tp, hidden), Weight(hidden, fc2 // tp)]


def expert_weights(model: Model, layout: Layout) -> list[Weight]:
    gemms = model.gemms()
    return [Weight(*gemms["fc1"]), Weight(*gemms["fc2"])] * (model.experts // layout.ep)


def root_weights(model: Model, layout: Layout) -> list[Weight]:
    """Embedding, last norm and head, the vocabulary split over tensor-parallel ranks."""
    rows = -(-model.vocabulary // layout.tp)
    return [Weight(rows, model.hidden, False)] * 2 + [Weight(model.hidden, 1, False)]


def sharded(
    weights: Sequence[Weight],
    layout: Layout,
    recipe: Recipe,
    stride: int,
    shard: int,
    root: bool = False,
) -> list[Collective]:
    """Lists the collectives of an FSDP2 unit, sharded by rows over ranks ``stride`` apart.

    The root keeps its weights for backward, and nothing runs beside its collectives.
    """
    if not weights:
        return []
    group, replicas = layout.group(shard, stride), layout.ranks // (stride * shard)
    padded = [(-(-w.rows // shard) * shard * w.cols, w.fp8 and recipe.fp8_all_gather)
              for w in weights]  # fmt: skip
    gathered = sum(size * (1 if fp8 else recipe.value_bytes) for size, fp8 in padded)
    reduced = sum(size for size, _ in padded) * recipe.value_bytes
    forward, backward = (None, None) if root else ("forward", "backward")
    found = []

    def add(phase: str, op: str, size: int, beside: str | None) -> None:
        found.append(Collective(phase, "fsdp", op, size, group, beside))

    if shard > 1:
        add("forward", "all_gather", gathered, forward)
        if not root:
            add("backward", "all_gather", gathered, backward)
        add("backward", "reduce_scatter", reduced, backward)
        if replicas > 1:
            others, size = layout.group(replicas, stride * shard), reduced // shard
            found.append(Collective("backward", "replicas", "all_reduce", size, others, backward))
    return found


def exchanged(model: Model, layout: Layout, recipe: Recipe) -> list[Collective]:
    """Lists the exchanges of a layer's tokens: how many go where, values to experts and back.

    The counts have a word for each rank, by which ranks that differ learn that they do.
    """
    if layout.ep == 1:
        return []
    group = layout.group(layout.ep, 1)
    rows = model.sequence * model.batch * model.topk // layout.tp
    size = rows * model.hidden * recipe.value_bytes
    counts = Collective("forward", "ep", "all_to_all", 4 * (model.experts + layout.ep), group)
    return [counts] + [
        Collective(phase, "ep", "all_to_all", size, group)
        for phase in ("forward", "backward")
        for _ in range(2)
    ]


def layer_collectives(model: Model, layout: Layout, recipe: Recipe) -> list[Collective]:
    """All of one layer, forward and backward of a microbatch."""
    experts = expert_weights(model, layout)
    expert_shard = layout.tp * layout.shard // layout.ep
    return [
        *tensor_parallel(model, layout, recipe),
        *exchanged(model, layout, recipe),
        *sharded(layer_weights(model, layout), layout, recipe, layout.tp, layout.shard),
        *sharded(experts, layout, recipe, layout.ep, expert_shard),
    ]


def step_collectives(model: Model, layout: Layout, recipe: Recipe) -> list[Collective]:
    """Once in a step: the root's, and the amax values."""
    weights = root_weights(model, layout)
    found = sharded(weights, layout, recipe, layout.tp, layout.shard, root=True)
    fp8 = len([w for w in layer_weights(model, layout) if w.fp8])
    of_experts = len(expert_weights(model, layout))
    if recipe.scaling == "delayed" and layout.ranks > 1:
        size = amax_bytes(model.layers * (fp8 + of_experts))
        group = layout.group(layout.ranks, 1)
        found.append(Collective("step", "world", "all_reduce", size, group))
    if recipe.scaling == "tensorwise" and recipe.fp8_all_gather:
        expert_shard = layout.tp * layout.shard // layout.ep
        dense = (fp8, layout.tp, layout.shard)
        for count, stride, shard in (dense, (of_experts, layout.ep, expert_shard)):
            if shard > 1 and count:
                group, size = layout.group(shard, stride), 4 * model.layers * count
                found.append(Collective("step", "fsdp", "all_reduce", size, group))
    return found


def amax_bytes(gemms: int) -> int:
    """Bytes of delayed scaling's one collective for so many FP8 GEMMs in the process."""
    return 4 * QUANTUM * -(-(HEADER + SLOTS * gemms) // QUANTUM)
