"""A whole Transformer layer, forward + backward: Llama-3-8B's and GPT's shape, 2 x 4096 tokens.

One configuration for time and memory: eager, no CUDA graph, cold L2, median, bf16 parameters,
``is_first_microbatch=None`` (weights are quantized in every step), dropout 0, ``.grad`` set to None
in each step, the region's entry inside the timed part, no rotary embedding. PyTorch's own layers
run beside ours (bf16, eager and compiled, cuDNN attention). Each stack is timed twice: by itself,
one after the other, as ``triton.testing.do_bench`` does; and taking turns with all others, step by
step, where the bf16 stacks' heat lowers the clock of all. Besides: delayed scaling with cached
weights (``is_first_microbatch=False``) and as a CUDA graph; peak memory of one step alone on the
GPU; host time to issue a step of a tiny layer (2 x 16 tokens).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

import apex_te
from apex_te import recipe

BATCH, TOKENS = 2, 4096
DTYPE = torch.bfloat16
RECIPES: dict[str, recipe.Recipe | None] = {
    "bf16": None,
    "delayed": recipe.DelayedScaling(),
    "tensorwise": recipe.CurrentScaling(),
    "blockwise": recipe.BlockScaling(),
}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {"hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "llama": True},
    "GPT": {"hidden": 4096, "ffn": 16384, "heads": 32, "groups": 32, "llama": False},
}
TINY = {"hidden": 256, "ffn": 512, "heads": 4, "groups": 4}


def layer(hidden: int, ffn: int, heads: int, groups: int, llama: bool) -> torch.nn.Module:
    """Our layer; Llama: RMSNorm, SwiGLU, no bias, grouped queries."""
    torch.manual_seed(0)
    return apex_te.TransformerLayer(
        hidden,
        ffn,
        heads,
        num_gqa_groups=groups,
        normalization="RMSNorm" if llama else "LayerNorm",
        activation="swiglu" if llama else "gelu",
        bias=not llama,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        attn_input_format="bshd",
        params_dtype=DTYPE,
        device="cuda",
    )


class Plain(torch.nn.Module):
    """Transformer layer of PyTorch's own modules, of the shape of the FP8 layer that is timed."""

    def __init__(self, hidden: int, ffn: int, heads: int, groups: int, llama: bool) -> None:
        super().__init__()
        norm = torch.nn.RMSNorm if llama else torch.nn.LayerNorm
        bias, size = not llama, hidden // heads
        self.split = (heads * size, groups * size, groups * size)
        self.size, self.grouped, self.llama = size, heads != groups, llama
        self.norm1, self.norm2 = norm(hidden, 1e-5), norm(hidden, 1e-5)
        self.qkv = torch.nn.Linear(hidden, sum(self.split), bias)
        self.proj = torch.nn.Linear(hidden, hidden, bias)
        self.fc1 = torch.nn.Linear(hidden, ffn * (2 if llama else 1), bias)
        self.fc2 = torch.nn.Linear(ffn, hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).split(self.split, -1)
        q, k, v = (p.unflatten(-1, (-1, self.size)).transpose(1, 2) for p in parts)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.proj(out.transpose(1, 2).flatten(-2))
        hidden = self.fc1(self.norm2(x))
        if self.llama:
            gate, up = hidden.chunk(2, -1)
            return x + self.fc2(F.silu(gate) * up)
        return x + self.fc2(F.gelu(hidden, approximate="tanh"))


def step(
    module: torch.nn.Module,
    scaling: recipe.Recipe | None,
    batch: int = BATCH,
    tokens: int = TOKENS,
    hidden: int = 4096,
    **options: Any,
) -> Callable[[], None]:
    """One forward and backward."""
    x = torch.randn(batch, tokens, hidden, device="cuda", dtype=DTYPE, requires_grad=True)
    dy = torch.randn_like(x)
    parameters = list(module.parameters())

    def run() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        with apex_te.fp8_autocast(enabled=scaling is not None, fp8_recipe=scaling):
            y = module(x, **options)
        y.backward(dy)

    return run


def cached(module: torch.nn.Module, scaling: recipe.Recipe) -> Callable[[], None]:
    """Steps after a first microbatch, whose FP8 weights they use."""
    step(module, scaling, is_first_microbatch=True)()
    return step(module, scaling, is_first_microbatch=False)


def graphed(shape: dict[str, Any], scaling: recipe.Recipe) -> Callable[[], None]:
    """The step with forward and backward as CUDA graphs."""
    x = torch.randn(BATCH, TOKENS, 4096, device="cuda", dtype=DTYPE, requires_grad=True)
    module = apex_te.make_graphed_callables(
        layer(**shape), (x,), fp8_enabled=True, fp8_recipe=scaling
    )
    return step(module, scaling)


def peak_gib(shape: dict[str, Any], scaling: recipe.Recipe | None) -> float:
    """Peak memory of one step with nothing else on the GPU, parameters and gradients included."""
    run = step(layer(**shape), scaling)
    run()
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def measure(name: str, shape: dict[str, Any]) -> list[dict[str, Any]]:
    peaks = {key: peak_gib(shape, scaling) for key, scaling in RECIPES.items()}
    gc.collect()
    plain = Plain(**shape).to("cuda", DTYPE)
    calls = {
        "torch bf16": step(plain, None),
        "torch bf16 compiled": step(torch.compile(plain), None),
        **{f"apex_te {key}": step(layer(**shape), value) for key, value in RECIPES.items()},
    }
    delayed = RECIPES["delayed"]
    assert delayed is not None
    calls["apex_te delayed, cached weights"] = cached(layer(**shape), delayed)
    calls["apex_te delayed, CUDA graph"] = graphed(shape, delayed)
    turns = harness.paired_us([*calls.values()], repeats=25, warmup=6)
    rows = []
    for (key, call), turn in zip(calls.items(), turns, strict=True):
        milliseconds = {k: v / 1e3 for k, v in harness.kernel_us(call, 25).items()}
        rows.append(
            {
                "layer": name,
                "measure": "GPU, forward + backward",
                "stack": key,
                "ms": milliseconds["us"],
                "p10 ms": milliseconds["p10"],
                "p90 ms": milliseconds["p90"],
                "ms in turns": turn["us"] / 1e3,
                "peak GiB": peaks.get(key.removeprefix("apex_te ")),
            }
        )
    return rows


def host(llama: bool) -> list[dict[str, Any]]:
    shape = {**TINY, "llama": llama}
    size = {"batch": 2, "tokens": 16, "hidden": TINY["hidden"]}
    calls = {
        "torch bf16": step(Plain(**shape).to("cuda", DTYPE), None, **size),
        **{f"apex_te {k}": step(layer(**shape), value, **size) for k, value in RECIPES.items()},
    }
    return [
        {
            "layer": f"tiny {'Llama' if llama else 'GPT'}, 2 x 16 tokens",
            "measure": "host, forward + backward",
            "stack": key,
            "ms": harness.host_us(call, calls=50) / 1e3,
        }
        for key, call in calls.items()
    ]


def main() -> None:
    clock = harness.sm_clock_mhz()
    rows = []
    for name, shape in SHAPES.items():
        rows += measure(name, shape)
        gc.collect()
        torch.cuda.empty_cache()
    rows += host(True) + host(False)
    harness.report("transformer", rows, sm_clock_mhz=f"{clock} to {harness.sm_clock_mhz()}")


if __name__ == "__main__":
    main()
