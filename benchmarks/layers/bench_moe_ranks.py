"""Experts of DeepSeek-V3's size spread over GPUs: exchanges in bf16 and in FP8, whole and in parts.

``python benchmarks/layers/bench_moe_ranks.py`` starts a rank for each of 2 or 4 GPUs. Each rank has
32 experts and 4096 tokens of eight experts each, and runs a ``MoELayer`` forward and backward with
block scaling, "all_to_all" and fp32 ``main_grad``. "wire" and "chunks" are the layer's arguments.
Steps run in a row, contenders take turns, and the slowest rank counts. "no exchange" is a step
whose collectives are copies on the GPU: what a step takes if all of the exchange is covered.

Bytes are those that one rank sends to others in one step. "equal bits" tells if the output is that
of wire=None and one part. "peak GiB above" is what a step needs above weights and gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import _path  # noqa: F401
import harness
import rank_runs
import torch
from torch import distributed

import apex_te
from apex_te.comm import collectives, row_exchange
from apex_te.recipe import BlockScaling

WIRES = (None, "blockwise")
CHUNKS = (1, 2, 4)


class Sizes(NamedTuple):
    """Sizes of one rank; ``steps`` in a row are timed ``rounds`` times."""

    tokens: int
    top_k: int
    hidden: int
    ffn: int
    experts: int
    steps: int
    rounds: int


DEEPSEEK = Sizes(4096, 8, 7168, 2048, 32, 5, 7)
TINY = Sizes(24, 2, 128, 32, 4, 1, 2)


def layer_of(sizes: Sizes, device: torch.device, wire: str | None) -> apex_te.MoELayer:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = apex_te.MoELayer(
        sizes.hidden, sizes.ffn, sizes.experts * distributed.get_world_size(), sizes.top_k,
        score_function="sigmoid", expert_group=distributed.group.WORLD, wire=wire,
        fuse_wgrad_accumulation=True, params_dtype=dtype, device=device,
    )  # fmt: skip
    for weight in (layer.fc1.weight, layer.fc2.weight):
        weight.main_grad = torch.zeros(weight.shape, device=device)
    return layer


def step(
    layer: apex_te.MoELayer, chunks: int, x: torch.Tensor, dy: torch.Tensor
) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        layer.exchange_chunks = chunks
        x.grad = layer.router.weight.grad = None
        with apex_te.fp8_autocast(fp8_recipe=BlockScaling()):
            out: torch.Tensor = layer(x)
        out.backward(dy)
        return out.detach()

    return run


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes of rows to other ranks: of dispatch, of combine, and of their gradients."""
    counts: dict[str, int] = {}
    of = vars(row_exchange.Travel).copy()
    send = collectives.all_to_all_rows
    kind = ""

    def named(method: str, suffix: str) -> Callable[..., Any]:
        def call(travel: Any, x: torch.Tensor) -> Any:
            nonlocal kind
            kind = ("combine" if travel._returns else "dispatch") + suffix
            return of[method](travel, x)

        return call

    def counting(
        x: torch.Tensor, sent: list[int], received: list[int], group: Any, *out: Any
    ) -> Any:
        rows = x.shape[0] - sent[distributed.get_rank(group)]
        counts[kind] = counts.get(kind, 0) + rows * x.shape[1] * x.element_size()
        return send(x, sent, received, group, *out)

    gradient = named("begin_gradient", "'s gradient")
    travel = mock.patch.multiple(
        row_exchange.Travel, begin=named("begin", ""), begin_gradient=gradient
    )
    with travel, mock.patch.object(row_exchange, "all_to_all_rows", counting):
        yield counts


def copies_instead(
    x: torch.Tensor, sent: list[int], received: list[int], group: Any, out: Any = None
) -> collectives.Pending:
    """Stand-in for ``all_to_all_rows`` that copies rows on the device."""
    out = x.new_empty((sum(received), *x.shape[1:]))
    rows = min(out.shape[0], x.shape[0])
    out[:rows].copy_(x[:rows])
    out[rows:].zero_()
    return collectives.Pending(out)


def on_all_ranks(value: bool, device: torch.device) -> bool:
    found = torch.tensor([int(value)], device=device)
    distributed.all_reduce(found, op=distributed.ReduceOp.MIN)
    return bool(found.item())


def measured(sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    torch.manual_seed(1 + distributed.get_rank())
    layers = {wire: layer_of(sizes, device, wire) for wire in WIRES}
    dtype = layers[None].fc1.weight.dtype
    torch.manual_seed(1 + distributed.get_rank())
    x, dy = torch.randn(2, sizes.tokens, sizes.hidden, device=device, dtype=dtype)
    x.requires_grad_()
    cases = itertools.product(WIRES, CHUNKS)
    runs = {(wire, chunks): step(layers[wire], chunks, x, dy) for wire, chunks in cases}

    def without_exchange() -> None:
        with mock.patch.object(row_exchange, "all_to_all_rows", copies_instead):
            runs[None, 1]()

    expected = runs[None, 1]()
    rows = []
    for (wire, chunks), run in runs.items():
        with counted() as sent:
            equal = on_all_ranks(torch.equal(run(), expected), device)
        row: dict[str, Any] = {"wire": wire or "bf16", "chunks": chunks, "ms": 0.0}
        row |= {f"{name} bytes": count for name, count in sorted(sent.items())}
        row["equal bits"] = equal
        row["peak GiB above"] = harness.peak_gib(run) if device.type == "cuda" else None
        rows.append(row)
    *times, bound = rank_runs.milliseconds(
        [*runs.values(), without_exchange], sizes.rounds, sizes.steps, device
    )
    for row, found in zip(rows, times, strict=True):
        row |= {"ms": found, "over whole bf16": times[0] / found}
    return [*rows, {"wire": "no exchange", "chunks": 1, "ms": bound}]


if __name__ == "__main__":
    rank_runs.run("moe_ranks", __doc__, measured, DEEPSEEK, TINY)
