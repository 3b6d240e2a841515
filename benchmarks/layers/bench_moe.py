"""The routed experts of a layer: permutation, FC1, SwiGLU, FC2 and back with probabilities.

Forward and backward with all gradients, bf16 ``.grad``, the contenders taking turns: "ms" of steps
in a row, the host ahead of the GPU as in training; "ms alone" of one step with a cold L2 cache,
whose first kernels wait for the host. The routing is skewed mildly, as trained routers' is. "torch
bf16" is ``torch._grouped_mm`` of weights stacked in one tensor, between the same permutation and
SwiGLU. "main_grad" adds to fp32 ``main_grad``; "cast once" has ``keep_columnwise_weights``, and
"weights held" is a later microbatch, for which FP8 copies are there;
"converted" are experts of transformers. Transformer Engine, if it is installed, has its loop over
experts between the same permutation and SwiGLU. Host ms is what the host spends to issue a step.
Peak GiB is what a step needs above weights and their gradients.

``moe_host`` is the host's time by number of experts, of layers that are small for the GPU.

Floors and what the parts should take are in the table of each kernel's benchmark; the sum of all
kernels' floors in FP8 with nothing fused is 4.2 ms (Qwen3) and 12.5 ms (DeepSeek-V3) on an H100.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import _path  # noqa: F401
import harness
import torch
import transformer_stacks as stacks

import apex_te
from apex_te.module.grouped.experts import run_experts
from apex_te.ops.swiglu import swiglu
from apex_te.permutation import moe_permute_and_count, moe_unpermute
from apex_te.recipe import DelayedScaling

# Tokens, experts of a token, hidden size, FFN size, experts here, of how many in all.
BLOCKS = {
    "Qwen3-30B-A3B": (8192, 8, 2048, 768, 128, 128),
    "DeepSeek-V3, 32 local experts": (4096, 8, 7168, 2048, 32, 32),
}
RECIPES = stacks.recipes("bf16", "tensorwise", "delayed", "blockwise", "blockwise 1x128")
RECIPES["delayed"] = DelayedScaling(amax_history_len=16)


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
    inputs: tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
    recipe: Any,
    first: bool | None = None,
    keep: bool = False,
) -> Callable[..., None]:
    """Returns a call of a forward and backward, which frees the gradients unless told to keep them.

    ``experts`` maps tokens and routing to tokens; ``inputs`` are tokens, gradient and routing.
    """
    x, dy, routing = inputs

    def run(keep_gradients: bool = False) -> None:
        clear()
        with apex_te.fp8_autocast(recipe is not None, recipe, keep_columnwise_weights=keep):
            out = experts(x, *routing, first)
        out.backward(dy)
        if not keep_gradients:
            clear()

    def clear() -> None:
        for tensor in (x, *parameters):
            tensor.grad = None

    return run


def ours(hidden: int, ffn: int, count: int, fused: bool = False) -> tuple[Any, list[torch.Tensor]]:
    options: Any = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    options |= {"single_parameter": True, "fuse_wgrad_accumulation": fused}
    fc1 = apex_te.GroupedLinear(count, hidden, 2 * ffn, **options)
    fc2 = apex_te.GroupedLinear(count, ffn, hidden, **options)
    for layer in (fc1, fc2) if fused else ():
        layer.weight.main_grad = torch.zeros(layer.weight.shape, device="cuda")

    def experts(x: torch.Tensor, index: Any, probs: Any, first: bool | None) -> torch.Tensor:
        return run_experts(fc1, fc2, x, index, probs, "swiglu", first)[0]

    return experts, [*fc1.parameters(), *fc2.parameters()]


def theirs(hidden: int, ffn: int, count: int) -> tuple[Any, list[torch.Tensor]]:
    shapes = (count, 2 * ffn, hidden), (count, hidden, ffn)
    w1, w2 = (harness.normal(*shape).mul_(0.02).requires_grad_() for shape in shapes)

    def experts(x: torch.Tensor, index: Any, probs: Any, first: bool | None) -> torch.Tensor:
        rows, splits, row_id_map = moe_permute_and_count(x, index, count)
        ends = splits.cumsum(0).int()
        h = torch._grouped_mm(rows, w1.transpose(-2, -1), offs=ends)
        out = torch._grouped_mm(swiglu(h), w2.transpose(-2, -1), offs=ends)
        return moe_unpermute(out, row_id_map, probs, map_type="index")

    return experts, [w1, w2]


def transformer_engine(
    te: Any, hidden: int, ffn: int, count: int, name: str
) -> tuple[Any, list[torch.Tensor]]:
    """Transformer Engine's layers between the suite's permutation and SwiGLU."""
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    fc1 = te.GroupedLinear(count, hidden, 2 * ffn, **options)
    fc2 = te.GroupedLinear(count, ffn, hidden, **options)
    pad, unpad = te.Fp8Padding(count), te.Fp8Unpadding(count)
    autocast = stacks.their_autocast(te, name)
    assert autocast is not None

    def experts(x: torch.Tensor, index: Any, probs: Any, _: bool | None) -> torch.Tensor:
        rows, splits, row_id_map = moe_permute_and_count(x, index, count)
        sizes = padded = splits.tolist()
        with autocast():
            if name != "bf16":
                rows, padded = pad(rows, sizes)
            out = fc2(swiglu(fc1(rows, padded)), padded)
            if name != "bf16":
                out = unpad(out, sizes)
        return moe_unpermute(out, row_id_map, probs, map_type="index")

    return experts, [*fc1.parameters(), *fc2.parameters()]


def measure_host() -> None:
    rows = []
    for count in (8, 32, 128, 256):
        x = torch.randn(4 * count, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        common = x, torch.randn_like(x), routed(len(x), 2, count)
        calls = {"torch bf16": step(*theirs(256, 128, count), common, None)}
        calls |= {n: step(*ours(256, 128, count), common, r) for n, r in RECIPES.items()}
        for name, call in calls.items():
            ms = harness.host_us(call, calls=50) / 1e3
            rows.append({"experts": count, "contender": name, "host ms": ms})
    harness.report("moe_host", rows)


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
    parser = harness.parser(__doc__)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    chosen = parser.parse_args().recipes
    te = stacks.transformer_engine()
    rows = []
    clock = harness.sm_clock_mhz()
    for block, (tokens, top_k, hidden, ffn, count, _) in BLOCKS.items():
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        common = x, harness.normal(tokens, hidden), routed(tokens, top_k, count)
        calls = {"torch bf16": step(*theirs(hidden, ffn, count), common, None)}
        for name in chosen:
            given = common, RECIPES[name]
            plain, fused = ours(hidden, ffn, count), ours(hidden, ffn, count, True)
            calls[name] = step(*plain, *given)
            calls[f"{name}, main_grad"] = step(*fused, *given)
            if name != "bf16":
                calls[f"{name}, cast once"] = step(*plain, *given, keep=True)
                calls[f"{name}, main_grad, cast once"] = step(*fused, *given, keep=True)
                calls[f"{name}, weights held"] = step(*ours(hidden, ffn, count), *given, False)
            if te is not None:
                theirs_too = transformer_engine(te, hidden, ffn, count, name)
                calls[f"Transformer Engine, {name}"] = step(*theirs_too, common, None)
        if "tensorwise" in chosen:
            made = converted(hidden, ffn, count)
            calls["converted, tensorwise"] = step(*made, common, RECIPES["tensorwise"])
        alone = harness.paired_us(list(calls.values()), repeats=8)
        times = harness.running_us(list(calls.values()))
        for (name, call), each, one in zip(calls.items(), times, alone, strict=True):
            row = {"block": block, "contender": name, "ms": each["us"] / 1e3}
            row |= {"over torch bf16": times[0]["us"] / each["us"], "ms alone": one["us"] / 1e3}
            row["host ms"] = harness.host_us(call, calls=10, rounds=3) / 1e3
            row["peak GiB above"] = harness.peak_gib(partial(call, keep_gradients=True))
            call()
            rows.append(row)
    harness.report("moe_block", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")
    if chosen == list(RECIPES):
        measure_host()


if __name__ == "__main__":
    main()
