"""The routed experts of a layer: permutation, FC1, SwiGLU, FC2 and back with probabilities.

Forward and backward with all gradients, bf16 ``.grad``, the contenders taking turns with a cold L2
cache; the routing is skewed mildly, as trained routers' is. "torch bf16" is ``torch._grouped_mm``
of weights stacked in one tensor, between the same permutation and SwiGLU. "main_grad" adds to fp32
``main_grad``; "first microbatch" casts weights in both layouts in one pass and keeps them, and
"weights held" is a later microbatch, for which they are there; "converted" are experts of
transformers. Host ms is what the host spends to issue a step. Peak GiB is what a step needs above
weights and their gradients.

``moe_routing`` is Qwen3's experts under other routings: 32,768 tokens of two experts each, evenly,
with one expert for all tokens, with 40 experts for none; and 1, 8 and 64 tokens of eight.

Floors and what the parts should take are in the table of each kernel's benchmark; the sum of all
kernels' floors in FP8 with nothing fused is 4.2 ms (Qwen3) and 12.5 ms (DeepSeek-V3) on an H100.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

import apex_te
from apex_te.module.grouped.experts import run_experts
from apex_te.ops.swiglu import swiglu
from apex_te.permutation import moe_permute_and_count, moe_unpermute
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling

# Tokens, experts of a token, hidden size, FFN size, experts here, of how many in all.
BLOCKS = {
    "Qwen3-30B-A3B": (8192, 8, 2048, 768, 128, 128),
    "DeepSeek-V3, 32 local experts": (4096, 8, 7168, 2048, 32, 32),
}
RECIPES: dict[str, Any] = {
    "bf16": None,
    "tensorwise": CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=16),
    "blockwise": BlockScaling(),
}


def routed(tokens: int, top_k: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each token's experts [tokens, top_k], some oftener than others, and their probs."""
    generator = torch.Generator("cuda").manual_seed(0)
    popularity = torch.randn(experts, device="cuda", generator=generator) * 0.7
    scores = torch.randn(tokens, experts, device="cuda", generator=generator) + popularity
    values, index = scores.topk(top_k, dim=1)
    return index.int(), values.softmax(1)


def step(
    experts: Callable[..., torch.Tensor],
    parameters: list[torch.Tensor],
    x: torch.Tensor,
    dy: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor],
    recipe: Any,
    first: bool | None = None,
) -> Callable[[], None]:
    """Returns a call of a forward and backward; ``experts`` maps tokens and routing to tokens."""

    def run() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        with apex_te.fp8_autocast(recipe is not None, recipe):
            out = experts(x, *routing, first)
        out.backward(dy)

    return run


def ours(hidden: int, ffn: int, count: int, fused: bool = False) -> tuple[Any, list[torch.Tensor]]:
    options: Any = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    options |= {"single_parameter": True, "fuse_wgrad_accumulation": fused}
    fc1 = apex_te.GroupedLinear(count, hidden, 2 * ffn, **options)
    fc2 = apex_te.GroupedLinear(count, ffn, hidden, **options)
    for layer in (fc1, fc2):
        if fused:
            layer.weight.main_grad = torch.zeros(layer.weight.shape, device="cuda")

    def experts(x: torch.Tensor, index: Any, probs: Any, first: bool | None) -> torch.Tensor:
        return run_experts(fc1, fc2, x, index, probs, "swiglu", first)[0]

    return experts, [*fc1.parameters(), *fc2.parameters()]


def theirs(hidden: int, ffn: int, count: int) -> tuple[Any, list[torch.Tensor]]:
    shapes = (count, 2 * ffn, hidden), (count, hidden, ffn)
    w1, w2 = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
        for shape in shapes
    )

    def experts(x: torch.Tensor, index: Any, probs: Any, first: bool | None) -> torch.Tensor:
        rows, splits, row_id_map = moe_permute_and_count(x, index, count)
        ends = splits.cumsum(0).int()
        h = torch._grouped_mm(rows, w1.transpose(-2, -1), offs=ends)
        out = torch._grouped_mm(swiglu(h), w2.transpose(-2, -1), offs=ends)
        return moe_unpermute(out, row_id_map, probs, map_type="index")

    return experts, [w1, w2]


def routings(experts: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns each token's experts and probs under the routings of ``moe_routing``."""
    even = routed(32768, 2, experts)
    index = even[0].long()
    half = torch.stack((torch.zeros_like(index[:, 0]), 1 + index[:, 1] % (experts - 1)), 1)
    first = index[:, :1] % (experts - 40)
    few = torch.cat((first, (first + 1 + index[:, 1:] % (experts - 41)) % (experts - 40)), 1)
    cases = {"mild": even, "one expert gets half": (half.int(), even[1])}
    cases["40 experts get none"] = few.int(), even[1]
    return cases | {f"{n} tokens": routed(n, 8, experts) for n in (1, 8, 64)}


def measure_routings() -> None:
    _, _, hidden, ffn, count, _ = BLOCKS["Qwen3-30B-A3B"]
    experts = {"torch bf16": theirs(hidden, ffn, count), "ours": ours(hidden, ffn, count)}
    rows = []
    for routing, (index, probs) in routings(count).items():
        x = torch.randn(len(index), hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        common = x, torch.randn_like(x), (index, probs)
        calls = {"torch bf16": step(*experts["torch bf16"], *common, None)}
        for name, recipe in RECIPES.items():
            calls[name] = step(*experts["ours"], *common, recipe)
        calls["tensorwise, weights held"] = step(
            *experts["ours"], *common, RECIPES["tensorwise"], False
        )
        times = harness.paired_us(list(calls.values()), repeats=5)
        for name, each in zip(calls, times, strict=True):
            ratio = times[0]["us"] / each["us"]
            row = {"routing": routing, "contender": name, "ms": each["us"] / 1e3}
            rows.append(row | {"over torch bf16": ratio})
    harness.report("moe_routing", rows)


def converted(hidden: int, ffn: int, count: int) -> tuple[Any, list[torch.Tensor]]:
    """Experts of a model of transformers that ``from_torch`` converts."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=ffn, num_experts=count)
    with torch.device("cuda"):
        model = torch.nn.Sequential(Qwen3MoeExperts(config).bfloat16())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layer = apex_te.from_torch(model)[0]
    return lambda x, index, probs, _: layer(x, index, probs), list(layer.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    chosen = parser.parse_args().recipes
    rows = []
    clock = harness.sm_clock_mhz()
    for block, (tokens, top_k, hidden, ffn, count, _) in BLOCKS.items():
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        routing = routed(tokens, top_k, count)
        calls = {"torch bf16": step(*theirs(hidden, ffn, count), x, dy, routing, None)}
        for name in chosen:
            common = x, dy, routing, RECIPES[name]
            calls[name] = step(*ours(hidden, ffn, count), *common)
            calls[f"{name}, main_grad"] = step(*ours(hidden, ffn, count, True), *common)
            if name != "bf16":
                calls[f"{name}, first microbatch"] = step(*ours(hidden, ffn, count), *common, True)
                calls[f"{name}, weights held"] = step(*ours(hidden, ffn, count), *common, False)
        if "tensorwise" in chosen:
            common = x, dy, routing, RECIPES["tensorwise"]
            calls["converted, tensorwise"] = step(*converted(hidden, ffn, count), *common)
        times = harness.paired_us(list(calls.values()), repeats=10)
        for (name, call), each in zip(calls.items(), times, strict=True):
            rows.append(
                {
                    "block": block,
                    "contender": name,
                    "ms": each["us"] / 1e3,
                    "over torch bf16": times[0]["us"] / each["us"],
                    "host ms": harness.host_us(call, calls=10, rounds=3) / 1e3,
                    "peak GiB above": harness.peak_gib(call),
                }
            )
    harness.report("moe_block", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")
    if chosen == list(RECIPES):
        measure_routings()


if __name__ == "__main__":
    main()
