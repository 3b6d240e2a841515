"""grouped_cast: experts' rows cast where they are gathered or computed, against op and cast.

Rows of two models' experts, in uneven groups whose sizes are on the device: Qwen3 30B (8,192 tokens
to 8 of 128 experts) and DeepSeek-V3 (4,096 tokens to 8 of 32 local experts). Both copies are made.
Bytes counted, in bf16 and with F columns of a half: a gather reads each token once (2 H) and writes
2 H a row; gated rows read 4 F and write 2 F; their gradient reads 6 F and writes 4 F. The peer is
the op of its own and then the cast of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import harness
import torch

from apex_te.ops import grouped_cast as op
from apex_te.ops import grouped_quantize, moe_permute
from apex_te.ops.swiglu import swiglu_bwd, swiglu_fwd

FP8 = torch.float8_e4m3fn
TOP_K = 8


class Model(NamedTuple):
    name: str
    tokens: int
    experts: int
    hidden: int
    ffn: int


MODELS = [Model("Qwen3", 8192, 128, 2048, 768), Model("DeepSeek-V3", 4096, 32, 7168, 2048)]


def route(model: Model) -> moe_permute.RowMap:
    """Returns the map of a skewed routing."""
    torch.manual_seed(7)
    favour = torch.randn(model.experts, device="cuda")
    scores = torch.randn(model.tokens, model.experts, device="cuda") + favour
    indices = scores.topk(TOP_K).indices.int()
    return moe_permute.make_map(indices, map_type="index", num_experts=model.experts)


@harness.case("grouped_cast", MODELS)
def rows_of(model: Model) -> Iterator[harness.Row]:
    rows = model.tokens * TOP_K
    made = route(model)
    groups = grouped_quantize.groups_of(made.tokens_per_expert, rows)
    scale = torch.ones(model.experts, device="cuda")
    amax = torch.zeros_like(scale)
    one_scale, blocks = {"amax": amax}, grouped_quantize.block_quantize_groups
    casts: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "one scale": (
            lambda x, **more: op.quantize_source(x, groups, scale, FP8, **one_scale, **more),
            lambda x: grouped_quantize.quantize_groups(x, groups, scale, FP8, **one_scale),
        ),
        "1x128": (
            lambda x, **more: op.block_quantize_source(x, groups, FP8, **more),
            lambda x: blocks(x, groups, FP8),
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
        peers: dict[str, harness.Peers] = {
            "gather": {"permute, cast": lambda cast=cast: cast(permuted()[0])},
            "gated": {"swiglu, cast": lambda cast=cast: cast(swiglu_fwd(hidden))},
            "gradient": {
                "swiglu_bwd, cast": lambda cast=cast: cast(swiglu_bwd(grad, hidden).input)
            },
        }
        yield row("gather", wide, gather, partial(ours, op.Gather(tokens, row_of)), peers["gather"])
        yield row("gated", narrow, gated, partial(ours, op.Gated(hidden)), peers["gated"])
        source = op.GatedGradient(grad, hidden)
        yield row("gradient", narrow, gradient, partial(ours, source), peers["gradient"])
        yield row("gated, factors", narrow, gated, partial(ours, op.Gated(hidden, factor)))
        call = partial(ours, op.GatedGradient(grad, hidden, factor), factor_grad=written)
        yield row("gradient, factors and theirs", narrow, gradient, call)
    times = harness.kernel_us(lambda: moe_permute.tokens_of_rows(made.row_id_map, rows), repeats=20)
    yield {"function": "tokens_of_rows", "shape": f"{model.name} {rows}", **times}
