"""Accelerate's ``mixed_precision="fp8"`` switch on a Hugging Face Llama of 1B shapes, end to end.

A training step of ``LlamaForCausalLM`` (hidden 2048, 16 layers, 32 heads, 8 of them keys', feed
forward 8192, vocabulary 128256; fp32 parameters under bf16 autocast, torch's fused AdamW, 4096
tokens a sequence), prepared by ``Accelerator`` with bf16, with FP8 through apex_te's alias of
``transformer_engine``, and with FP8 through Transformer Engine itself where PEER_SITE names a
folder that has it. Each contender is a process of its own, since both answer to one module name;
they run in the order A B C C B A, and each warms the board before its steps count.

    python benchmarks/frameworks/bench_accelerate.py            # on a GPU
    python benchmarks/frameworks/bench_accelerate.py --tiny     # the same path on a CPU, no figures
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

BF16, OURS, THEIRS = "bf16", "fp8, apex_te", "fp8, Transformer Engine"
FUSED = "fp8, from_torch(fuse=True)"
SWITCHED = (OURS, THEIRS)  # by Accelerate's mixed_precision="fp8"
ONE_B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--seconds", type=float, default=4.0, help="load that counts, per process")
    parser.add_argument("--once", action="store_true", help="each contender once, not twice")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, which a CPU can run")
    parser.add_argument("--worker", choices=(BF16, OURS, FUSED, THEIRS), help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(options: argparse.Namespace) -> dict[str, Any]:
    """Trains with one contender; returns tokens a second, memory and the last loss."""
    if options.worker == OURS:
        import apex_te  # noqa: F401  installs the alias: APEX_TE_TRANSFORMER_ENGINE is set
    import torch
    from accelerate import Accelerator
    from accelerate.utils import TERecipeKwargs, set_seed
    from transformers import LlamaConfig, LlamaForCausalLM

    fp8 = options.worker in SWITCHED
    set_seed(0)
    accelerator = Accelerator(
        mixed_precision="fp8" if fp8 else "bf16",
        kwargs_handlers=[TERecipeKwargs(fp8_format="HYBRID")] if fp8 else [],
    )
    sizes = TINY if options.tiny else ONE_B
    config = LlamaConfig(**sizes, max_position_embeddings=options.tokens, use_cache=False)
    with torch.device(accelerator.device):
        model = LlamaForCausalLM(config)
    if options.worker == FUSED:
        from apex_te import autocast_forward, from_torch

        from_torch(model, fuse=True, include="*")  # as a script without Accelerate's switch does
        autocast_forward(model)
    on_gpu = accelerator.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=on_gpu)
    model, optimizer = accelerator.prepare(model, optimizer)
    size = (options.batch, options.tokens)
    tokens = torch.randint(config.vocab_size, size, device=accelerator.device)

    def step() -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def timed(seconds: float) -> tuple[int, float, float]:
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds or steps < 3:
            loss = step().item()
            steps += 1
        return steps, time.perf_counter() - begin, loss

    timed(options.seconds / 2)
    steps, elapsed, loss = timed(options.seconds)
    layers = {type(m).__module__.partition(".")[0] for m in model.modules() if hasattr(m, "weight")}
    row = {"tokens/s": round(steps * tokens.numel() / elapsed), "ms a step": elapsed / steps * 1e3}
    row |= {"loss": loss, "layers of": ", ".join(sorted(layers))}
    if on_gpu:
        row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    if fp8:
        import transformer_engine

        row["transformer_engine"] = transformer_engine.__version__
    return row


def run(stack: str) -> dict[str, Any]:
    """Runs one contender in a process of its own; returns its row."""
    environment = dict(os.environ)
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment.pop("APEX_TE_TRANSFORMER_ENGINE", None)
    if stack == OURS:
        environment["APEX_TE_TRANSFORMER_ENGINE"] = "1"
    if stack == THEIRS:
        paths.insert(0, environment["PEER_SITE"])
        if "PEER_PRELOAD" in environment:  # torch's cuDNN, which Transformer Engine else misses
            environment["LD_PRELOAD"] = environment["PEER_PRELOAD"]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--worker", stack],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"{stack} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])


def main() -> None:
    options = arguments()
    if options.worker:
        print(json.dumps(worker(options)))
        return
    import harness

    stacks = [BF16, OURS, FUSED] + ([THEIRS] if "PEER_SITE" in os.environ else [])
    order = stacks if options.once else stacks + stacks[::-1]
    found: dict[str, list[dict[str, Any]]] = {stack: [] for stack in stacks}
    for stack in order:
        found[stack].append(run(stack))
        print(stack, found[stack][-1], flush=True)
    base = statistics.mean(row["tokens/s"] for row in found[BF16])
    rows = []
    for stack, runs in found.items():
        spread = [row["tokens/s"] for row in runs]
        rate = statistics.mean(spread)
        row = {"stack": stack, **runs[-1], "tokens/s": round(rate), "of bf16": rate / base}
        rows.append({**row, "runs": spread})
    if not options.tiny:
        harness.report("accelerate", rows, batch=options.batch, tokens=options.tokens)


if __name__ == "__main__":
    main()
