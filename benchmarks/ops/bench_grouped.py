"""grouped_cast, grouped_quantize and grouped_gemm: experts' rows, their counts on the device.

``grouped_cast``: rows cast where they are gathered or computed, against the op of its own and then
the cast of its result. Rows of Qwen3 30B (8,192 tokens to 8 of 128 experts) and DeepSeek-V3 (4,096
tokens to 8 of 32 local experts). Both copies are made. Bytes counted, in bf16 and with F columns of
a half: a gather reads each token once (2 H) and writes 2 H a row; gated rows read 4 F and write
2 F; their gradient reads 6 F and writes 4 F.

``grouped_quantize``: 8 groups of rows against cast_transpose for each, whose sizes the host knows;
its columnwise copies do not lie in one matrix, as grouped products need them. Bytes counted: 4 an
element for bf16 to both outputs (read 2, write 1 + 1), 3 for rowwise only, 2 for the amax values
alone; of the weights the same.

``grouped_gemm`` against torch.nn.functional.scaled_grouped_mm and torch._grouped_mm in bf16. Random
codes. "multiply" is out = a of a group . its b^T, "contract" the products of two groups of columns;
2 rows N K operations each, rows of padding not counted. Floor: operations over the FP8 rate of the
datasheet, 1979 TFLOP/s without sparsity, or each operand read and the result written once. torch
multiplies E4M3 by E4M3 only; "fast" sums in the matrix units, "split" adds 128 products each in
float32. Layers: 8 uneven experts; 256 experts with 128 rows on average, many of them in no whole
tile, whose contract mostly writes its result: 15 GB in the first, 3.6 ms at a copy's bandwidth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import harness
import torch

from apex_te.ops import grouped_cast, grouped_quantize, moe_permute
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.grouped_gemm import scaled_contract_groups, scaled_multiply_groups
from apex_te.ops.swiglu import swiglu_bwd, swiglu_fwd

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOP_K = 8


class Model(NamedTuple):
    name: str
    tokens: int
    experts: int
    hidden: int
    ffn: int


MODELS = [Model("Qwen3", 8192, 128, 2048, 768), Model("DeepSeek-V3", 4096, 32, 7168, 2048)]


def route(model: Model) -> moe_permute.RowMap:
    torch.manual_seed(7)
    favour = torch.randn(model.experts, device="cuda")
    scores = torch.randn(model.tokens, model.experts, device="cuda") + favour
    indices = scores.topk(TOP_K).indices.int()
    return moe_permute.make_map(indices, map_type="index", num_experts=model.experts)


@harness.case("grouped_cast", MODELS)
def cast_rows(model: Model) -> Iterator[harness.Row]:
    rows = model.tokens * TOP_K
    made = route(model)
    groups = grouped_quantize.groups_of(made.tokens_per_expert, rows)
    scale = torch.ones(model.experts, device="cuda")
    amax = torch.zeros_like(scale)
    one_scale, blocks = {"amax": amax}, grouped_quantize.block_quantize_groups
    casts: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "one scale": (
            lambda x, **more: grouped_cast.quantize_source(
                x, groups, scale, E4M3, **one_scale, **more
            ),
            lambda x: grouped_quantize.quantize_groups(x, groups, scale, E4M3, **one_scale),
        ),
        "1x128": (
            lambda x, **more: grouped_cast.block_quantize_source(x, groups, E4M3, **more),
            lambda x: blocks(x, groups, E4M3),
        ),
    }
    tokens = harness.normal(model.tokens, model.hidden)
    row_of, _ = moe_permute.tokens_of_rows(made.row_id_map, rows)
    hidden, grad = harness.normal(rows, 2 * model.ffn), harness.normal(rows, model.ffn)
    factor = torch.rand(rows, device="cuda")
    written = torch.empty_like(factor)
    permuted = partial(moe_permute.permute, tokens, made.row_id_map, rows)
    gather = 2 * (model.tokens + rows) * model.hidden
    gated, gradient = 6 * rows * model.ffn, 10 * rows * model.ffn
    for scales, (ours, cast) in casts.items():
        row = partial(harness.measure, repeats=20, outputs=scales)
        wide, narrow = (f"{model.name} {rows}x{cols}" for cols in (model.hidden, model.ffn))
        call = partial(ours, grouped_cast.Gather(tokens, row_of))
        peers: harness.Peers = {"permute, cast": lambda cast=cast: cast(permuted()[0])}
        yield row("gather", wide, gather, call, peers)
        call = partial(ours, grouped_cast.Gated(hidden))
        peers = {"swiglu, cast": lambda cast=cast: cast(swiglu_fwd(hidden))}
        yield row("gated", narrow, gated, call, peers)
        call = partial(ours, grouped_cast.GatedGradient(grad, hidden))
        peers = {"swiglu_bwd, cast": lambda cast=cast: cast(swiglu_bwd(grad, hidden).input)}
        yield row("gradient", narrow, gradient, call, peers)
        call = partial(ours, grouped_cast.Gated(hidden, factor))
        yield row("gated, factors", narrow, gated, call)
        call = partial(ours, grouped_cast.GatedGradient(grad, hidden, factor), factor_grad=written)
        yield row("gradient, factors and theirs", narrow, gradient, call)
    times = harness.kernel_us(lambda: moe_permute.tokens_of_rows(made.row_id_map, rows), repeats=20)
    yield {"function": "tokens_of_rows", "shape": f"{model.name} {rows}", **times}


SHARES = [6, 2, 4, 5, 3, 4, 1, 7]
ROW_SHAPES = [(32768, 7168), (32768, 2048), (16384, 7168)]
# rowwise, columnwise
OUTPUTS = {
    "both": (True, True), "rowwise": (True, False), "amax": (False, False),
    "columnwise": (False, True),
}  # fmt: skip


Parts = Sequence[torch.Tensor]


def quantize_row(
    function: str, shape: str, outputs: str, ours: Callable[..., Any], parts: Parts
) -> harness.Row:
    """Measures ``ours`` against a cast of each of ``parts``."""
    rowwise, columnwise = OUTPUTS[outputs]
    scale, amax = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    wanted = {"rowwise": rowwise, "columnwise": columnwise}

    def casts() -> None:
        for i, part in enumerate(parts):
            cast_transpose(part, scale[i], E4M3, amax=amax[i], **wanted)

    num_bytes = sum(part.numel() for part in parts) * (2 + rowwise + columnwise)
    call = partial(ours, scale, E4M3, amax=amax, **wanted)
    peers = {"casts": casts}
    return harness.measure(function, shape, num_bytes, call, peers, repeats=20, outputs=outputs)


@harness.case("grouped_quantize")
def quantize_rows() -> Iterator[harness.Row]:
    for shape in ROW_SHAPES:
        x = harness.normal(*shape)
        splits = [share * shape[0] // sum(SHARES) for share in SHARES]
        for outputs in ("both", "rowwise", "amax"):
            groups = grouped_quantize.groups_of(torch.tensor(splits, device="cuda"), len(x))
            ours = partial(grouped_quantize.quantize_groups, x, groups)
            yield quantize_row("rows", harness.text_of(shape), outputs, ours, x.split(splits))
    for outputs in OUTPUTS:
        weights = [harness.normal(2048, 7168) for _ in range(8)]
        ours = partial(grouped_quantize.quantize_matrices, weights)
        yield quantize_row("matrices", "8x2048x7168", outputs, ours, weights)
    x = harness.normal(32768, 7168)
    splits = torch.tensor([share * 512 for share in SHARES], device="cuda")
    groups, bias = grouped_quantize.groups_of(splits, len(x)), harness.normal(8, 7168)
    calls = {
        "offsets": (0, lambda: grouped_quantize.groups_of(splits, len(x))),
        "column sums": (2, lambda: grouped_quantize.column_sums(x, groups)),
        "finish, bias": (4, lambda: grouped_quantize.finish_rows(x, groups, bias)),
        "finish, half of it padding": (1, lambda: grouped_quantize.finish_rows(x, groups)),
    }
    for name, (each, call) in calls.items():
        times = harness.kernel_us(call, repeats=20)
        if each:
            part = 0.5 if "column" in name else 1  # rows behind the last group are not read
            times["TB/s"] = harness.terabytes_per_second(int(x.numel() * each * part), times["us"])
        yield {"function": name, "shape": "32768x7168", **times}


LAYERS = [
    ("8 experts", 32768, 2048, 7168),
    ("8 experts", 32768, 7168, 2048),
    ("8 experts", 16384, 2048, 7168),
    ("256 experts", 32768, 4096, 7168),
    ("256 experts", 32768, 7168, 2048),
]


def counts_of(name: str, rows: int) -> list[int]:
    if name == "8 experts":
        return [share * rows // 32 for share in SHARES]
    torch.manual_seed(0)
    experts = torch.rand(256) + 0.2
    return torch.bincount(torch.multinomial(experts, rows, True), minlength=256).tolist()


def codes(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (harness.normal(*shape) * 3).to(dtype)


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


def gemm_row(
    about: dict[str, Any], work: int, ours: Callable[[], Any], peer: tuple[str, Callable[[], Any]]
) -> dict[str, Any]:
    mine, other = harness.paired_us([ours, peer[1]], repeats=10)
    rate, times = work / mine["us"] / 1e6, other["us"] / mine["us"]
    theirs = {"peer": peer[0], "peer us": other["us"], "times faster": times}
    return {**about, **mine, "TFLOP/s": rate, **theirs}


def rows_of(
    layer: tuple[str, int, int, int], pair: tuple[torch.dtype, torch.dtype], fast: bool
) -> Iterator[harness.Row]:
    name, tokens, n, k = layer
    counts = counts_of(name, tokens)
    experts = len(counts)
    groups = grouped_quantize.groups_of(torch.tensor(counts, device="cuda"), tokens)
    codes_of = " x ".join("E4M3" if dtype is E4M3 else "E5M2" for dtype in pair)
    about = {"layer": f"{name}, {tokens} rows, {k} to {n}", "codes": codes_of}
    about["sums"] = "fast" if fast else "split"
    work = 2 * tokens * n * k
    ones = torch.ones(tokens, device="cuda")
    few = ones[:experts]
    a, b = codes((tokens, k), pair[0]), codes((experts, n, k), pair[1])
    peer = theirs(a, b.transpose(-2, -1), groups.ends, fast)
    multiply = partial(scaled_multiply_groups, a, ones, b, few, groups, fast)
    yield gemm_row({"product": "multiply", **about}, work, multiply, peer)
    ends = groups.column_ends
    c, d = codes((n, groups.columns), pair[0]), codes((k, groups.columns), pair[1])
    peer = theirs(c, d.t(), ends, fast)
    contract = partial(scaled_contract_groups, c, few, d, few, ends, fast)
    yield gemm_row({"product": "contract", **about}, work, contract, peer)


@harness.case("grouped_gemm")
def gemm_rows() -> Iterator[harness.Row]:
    pairs = ((E4M3, E4M3), (E5M2, E4M3))
    for layer, pair, fast in itertools.product(LAYERS, pairs, (True, False)):
        yield from rows_of(layer, pair, fast)
        torch.cuda.empty_cache()
