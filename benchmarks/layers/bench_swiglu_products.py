"""LayerNormMLP with SwiGLU or GELU in its products' epilogues against both apart.

Delayed scaling, forward + backward, weights quantized in every step; RMSNorm and no bias, with GELU
LayerNorm and biases. Both take turns in blocks under load ("ms sustained" as in
bench_transformer.py), at sizes around the smallest that ``dense_gemm_swiglu.gains`` takes and
above; "taken" is its answer. Peak memory is that of a step above what was allocated before it. The
kernels are for sm_90 alone.

    python benchmarks/layers/bench_swiglu_products.py
    python benchmarks/layers/bench_swiglu_products.py --activation gelu
    python benchmarks/layers/bench_swiglu_products.py --sizes 8192x4096x14336 --rounds 6
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import _path  # noqa: F401
import harness
import torch
import transformer_stacks as stacks
from sustained import sustained

import apex_te
from apex_te.ops import dense_gemm_swiglu

# tokens x hidden size x features: Llama's 1B, 3B, 7B, 8B and 70B (of 8 ranks), GPT's, and smaller
# ones.
SIZES = {
    "swiglu": "8192x4096x14336,4096x4096x14336,2048x4096x14336,8191x4096x14336,8192x4096x11008,"
    "8192x2048x8192,4096x2048x8192,2048x2048x8192,8192x3072x8192,2048x2048x4096,"
    "1024x4096x14336,8192x1024x4096,8192x8192x28672,16384x4096x14336",
    "gelu": "8192x4096x16384,4096x4096x16384,2048x4096x16384,8191x4096x16384,8192x5120x20480,"
    "8192x3072x12288,8192x2048x8192,4096x2048x8192,2048x2048x8192,8192x1600x6400,"
    "1024x4096x16384,8192x1024x4096,16384x4096x16384",
}
MODELS = {
    "swiglu": {"bias": False, "normalization": "RMSNorm"},
    "gelu": {"bias": True, "normalization": "LayerNorm"},
}


def row(tokens: int, hidden: int, features: int, options: argparse.Namespace) -> dict[str, Any]:
    is_gated = options.activation == "swiglu"
    taken = dense_gemm_swiglu.gains(tokens, features, hidden, is_gated)
    torch.manual_seed(0)
    module = apex_te.LayerNormMLP(
        hidden, features, activation=options.activation, params_dtype=stacks.DTYPE, device="cuda",
        **MODELS[options.activation],
    )  # fmt: skip
    step = stacks.step(module, stacks.our_autocast(stacks.RECIPES["delayed"]), (1, tokens, hidden))
    calls = {n: stacks.with_fused_swiglu(n == "fused", step) for n in ("fused", "apart")}
    peaks = {}
    for name, call in calls.items():
        call()
        peak, before = stacks.peak_bytes(call, module)
        peaks[name] = (peak - before) / 2**30
    found = sustained(calls, options.rounds, options.block, 1.0)
    times = {name: found[name]["ms sustained"] for name in calls}
    return {
        "tokens x hidden x features": f"{tokens}x{hidden}x{features}",
        "taken": taken,
        **{f"{name} ms": ms for name, ms in times.items()},
        "apart / fused": times["apart"] / times["fused"],
        **{f"{name} J": found[name].get("J", 0.0) for name in calls},
        **{f"{name} peak GiB above": gib for name, gib in peaks.items()},
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--activation", default="swiglu", choices=SIZES)
    parser.add_argument("--sizes", help="tokens x hidden x features, with commas")
    parser.add_argument("--rounds", type=int, default=4, help="blocks of each under load")
    parser.add_argument("--block", type=float, default=0.4, help="seconds of a block")
    options = parser.parse_args()
    rows = []
    for size in (options.sizes or SIZES[options.activation]).split(","):
        tokens, hidden, features = map(int, size.split("x"))
        rows.append(row(tokens, hidden, features, options))
        print(rows[-1], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    harness.report(f"{options.activation}_products", rows)


if __name__ == "__main__":
    main()
