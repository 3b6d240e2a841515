"""Bits that depend on the number of rows, and the price of ``batch_invariant``.

Each module computes 8192 rows (attention: tokens of one sequence), and then the first and the last
ones of 36 smaller numbers of rows; of attention, the first. Reported is the number of elements
whose bits differ from those of all rows, without the mode and with it, and the time of a forward
without gradients at some numbers of rows, both taking turns, cold L2. "step" is a forward and
backward of all rows. Block scaling has scales in powers of two ("pow2") or any ("fp32").
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import _path  # noqa: F401
import harness
import torch

import apex_te
from apex_te.fp8.autocast import get_fp8_recipe
from apex_te.recipe import BlockScaling

COUNTS = (
    *range(1, 9), 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 384,
    511, 512, 513, 1000, 1024, 2048, 2049, 3000, 4096, 6000,
)  # fmt: skip
TIMED = (1, 16, 128, 1024, 8192)
RECIPES = {"bf16": None, "pow2": BlockScaling(), "fp32": BlockScaling(pow2=False)}
Call = Callable[[torch.Tensor], torch.Tensor]


class Sizes(NamedTuple):
    """Sizes of the modules; ``counts`` are compared, ``timed`` are timed."""

    rows: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    counts: tuple[int, ...]
    timed: tuple[int, ...]


LLAMA = Sizes(8192, 4096, 14336, 32, 8, 128256, COUNTS, TIMED)
TINY = Sizes(70, 128, 256, 4, 2, 96, (1, 2, 33, 64), ())


class Case(NamedTuple):
    """Function of rows ``[rows, cols]``; the last rows have equal bits alone unless ``causal``."""

    name: str
    cols: int
    call: Call
    causal: bool = False
    has_recipes: bool = True


def cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yields the modules one at a time, so that each is freed before the next."""
    hidden, ffn, heads = sizes.hidden, sizes.ffn, sizes.heads
    own: dict[str, Any] = {"device": device, "params_dtype": dtype}
    yield Case("RMSNorm", hidden, apex_te.RMSNorm(hidden, **own), has_recipes=False)
    yield Case("LayerNorm", hidden, apex_te.LayerNorm(hidden, **own), has_recipes=False)
    yield Case("Linear", hidden, apex_te.Linear(hidden, hidden, **own))
    for norm in ("RMSNorm", "LayerNorm"):
        module: Any = apex_te.LayerNormLinear(hidden, 3 * hidden // 2, normalization=norm, **own)
        yield Case(f"LayerNormLinear, {norm}", hidden, module)
        gated: dict[str, Any] = {"activation": "swiglu", "bias": False, "normalization": norm}
        module = apex_te.LayerNormMLP(hidden, ffn, **gated, **own)
        yield Case(f"LayerNormMLP, {norm}", hidden, module)
    size = hidden // heads
    attention = apex_te.DotProductAttention(
        heads, size, num_gqa_groups=sizes.groups, qkv_format="bshd", attention_dropout=0.0
    )

    def attended(x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (-1, size))[None].split((heads, sizes.groups, sizes.groups), 2)
        return attention(*parts)[0]

    cols = hidden + 2 * sizes.groups * size
    yield Case("DotProductAttention", cols, attended, True, False)
    layer = apex_te.TransformerLayer(
        hidden, ffn, heads, num_gqa_groups=sizes.groups, attn_input_format="bshd",
        normalization="RMSNorm", activation="swiglu", bias=False, hidden_dropout=0.0,
        attention_dropout=0.0, **own,
    )  # fmt: skip
    yield Case("TransformerLayer", hidden, lambda x: layer(x[None])[0], True)
    head = torch.randn(sizes.vocabulary, hidden, device=device, dtype=dtype)

    def log_probs(x: torch.Tensor) -> torch.Tensor:
        recipe = get_fp8_recipe() if apex_te.is_fp8_enabled() else None
        # A row's target goes with its first value, whichever rows are taken.
        own = (x[:, 0].float().abs() * 1000).long() % sizes.vocabulary
        return apex_te.linear_log_probs(x, head, own, fp8_recipe=recipe)

    yield Case("linear_log_probs", hidden, log_probs)


@contextlib.contextmanager
def region(recipe: BlockScaling | None, enabled: bool) -> Iterator[None]:
    with apex_te.batch_invariant(enabled), apex_te.fp8_autocast(recipe is not None, recipe):
        yield


def differing(case: Case, x: torch.Tensor, counts: tuple[int, ...]) -> int:
    full, found = case.call(x), 0
    for count in counts:
        parts = [slice(0, count)] if case.causal else [slice(0, count), slice(-count, None)]
        for part in parts:
            found += int((case.call(x[part].clone()) != full[part]).sum())
    return found


def measure(case: Case, name: str, sizes: Sizes, x: torch.Tensor) -> harness.Row:
    recipe = RECIPES[name]
    row: harness.Row = {"module": case.name, "recipe": name}
    with torch.no_grad():
        for enabled, key in ((False, "differing"), (True, "differing, invariant")):
            with region(recipe, enabled):
                row[key] = differing(case, x, sizes.counts)

    def run(enabled: bool, some: torch.Tensor, dy: torch.Tensor | None) -> Callable[[], None]:
        def call() -> None:
            with torch.set_grad_enabled(dy is not None), region(recipe, enabled):
                out = case.call(some)
            if dy is not None:
                out.backward(dy)

        return call

    def pair(what: str, some: torch.Tensor, dy: torch.Tensor | None, repeats: int) -> None:
        calls = [run(enabled, some, dy) for enabled in (False, True)]
        usual, own = harness.paired_us(calls, repeats)
        row.update({f"{what} ms": usual["us"] / 1e3, f"{what} ms, invariant": own["us"] / 1e3})

    for rows in sizes.timed:
        pair(str(rows), x[:rows].clone(), None, 20)
    if sizes.timed:
        pair("step", x.clone().requires_grad_(), torch.randn_like(case.call(x)), 10)
    return row


def rows(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[harness.Row]:
    torch.manual_seed(0)
    for case in cases(sizes, device, dtype):
        x = torch.randn(sizes.rows, case.cols, device=device, dtype=dtype)
        for name in RECIPES if case.has_recipes else ("bf16",):
            yield measure(case, name, sizes, x)
        del case
        gc.collect()


if __name__ == "__main__":
    harness.run("batch_invariance", rows(LLAMA, torch.device("cuda"), torch.bfloat16))
