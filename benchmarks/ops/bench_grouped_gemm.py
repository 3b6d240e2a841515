"""grouped_gemm against torch.nn.functional.scaled_grouped_mm and torch._grouped_mm in bf16.

Random codes, sums of groups on the device. "multiply" is out = a of a group . its b^T, "contract"
the products of two groups of columns; 2 rows N K operations each, rows of padding not counted.
Floor: operations over the FP8 rate of the datasheet, 1979 TFLOP/s without sparsity, or each operand
read and the result written once. torch multiplies E4M3 by E4M3 only; "fast" sums in the matrix
units, "split" adds 128 products each in float32.

Layers: 8 uneven experts; 256 experts with 128 rows on average, many of them in no whole tile. With
these contract mostly writes its result: 15 GB in the first of them, 3.6 ms at a copy's bandwidth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch

from apex_te.ops.grouped_gemm import scaled_contract_groups, scaled_multiply_groups
from apex_te.ops.grouped_quantize import groups_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNEVEN = [6, 2, 4, 5, 3, 4, 1, 7]  # of 32
LAYERS = [
    ("8 experts", 32768, 2048, 7168),
    ("8 experts", 32768, 7168, 2048),
    ("8 experts", 16384, 2048, 7168),
    ("256 experts", 32768, 4096, 7168),
    ("256 experts", 32768, 7168, 2048),
]


def counts_of(name: str, rows: int) -> list[int]:
    if name == "8 experts":
        return [share * rows // 32 for share in UNEVEN]
    torch.manual_seed(0)
    experts = torch.rand(256) + 0.2
    return torch.bincount(torch.multinomial(experts, rows, True), minlength=256).tolist()


def codes(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 3).to(dtype)


def theirs(
    a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, fast: bool
) -> tuple[str, Callable[[], Any]]:
    """torch's product of E4M3 codes; of others in bf16."""
    if a.dtype is not E4M3 or b.dtype is not E4M3:
        x, y = a.bfloat16(), b.bfloat16()
        return "torch bf16", lambda: torch._grouped_mm(x, y, offs=ends)
    functional: Any = torch.nn.functional
    rows = functional.ScalingType.RowWise
    groups = ends.numel()
    of_a = torch.ones(a.shape[0] * (groups if b.dim() == 2 else 1), device="cuda")
    of_b = torch.ones(groups * b.shape[-1], device="cuda")
    if b.dim() == 3:
        of_b = of_b.view(groups, -1)
    return "scaled_grouped_mm", lambda: functional.scaled_grouped_mm(
        a, b, of_a, rows, of_b, rows, offs=ends, output_dtype=torch.bfloat16, use_fast_accum=fast
    )


def row(
    product: str,
    layer: str,
    pair: tuple[torch.dtype, torch.dtype],
    fast: bool,
    work: int,
    ours: Callable[[], Any],
    peer: tuple[str, Callable[[], Any]],
) -> dict[str, Any]:
    mine, other = harness.paired_us([ours, peer[1]], repeats=10)
    return {
        "product": product,
        "layer": layer,
        "codes": " x ".join("E4M3" if dtype is E4M3 else "E5M2" for dtype in pair),
        "sums": "fast" if fast else "split",
        **mine,
        "TFLOP/s": work / mine["us"] / 1e6,
        "peer": peer[0],
        "peer us": other["us"],
        "times faster": other["us"] / mine["us"],
    }


def rows_of(
    layer: tuple[str, int, int, int], pair: tuple[torch.dtype, torch.dtype], fast: bool
) -> Iterator[harness.Row]:
    """A row of each product."""
    name, tokens, n, k = layer
    counts = counts_of(name, tokens)
    experts = len(counts)
    groups = groups_of(torch.tensor(counts, device="cuda"), tokens)
    text = f"{name}, {tokens} rows, {k} to {n}"
    work = 2 * tokens * n * k
    ones = torch.ones(tokens, device="cuda")
    few = ones[:experts]
    a, b = codes((tokens, k), pair[0]), codes((experts, n, k), pair[1])
    peer = theirs(a, b.transpose(-2, -1), groups.ends, fast)
    multiply = functools.partial(scaled_multiply_groups, a, ones, b, few, groups, fast)
    yield row("multiply", text, pair, fast, work, multiply, peer)
    ends = groups.column_ends
    c, d = codes((n, groups.columns), pair[0]), codes((k, groups.columns), pair[1])
    peer = theirs(c, d.t(), ends, fast)
    contract = functools.partial(scaled_contract_groups, c, few, d, few, ends, fast)
    yield row("contract", text, pair, fast, work, contract, peer)


@harness.case("grouped_gemm")
def rows() -> Iterator[harness.Row]:
    for layer in LAYERS:
        for pair in ((E4M3, E4M3), (E5M2, E4M3)):
            for fast in (True, False):
                yield from rows_of(layer, pair, fast)
                torch.cuda.empty_cache()
