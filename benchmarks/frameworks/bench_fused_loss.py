"""Forward and backward of a Hugging Face Llama of 1B shapes, with its own loss and with fuse_loss.

``LlamaForCausalLM`` (hidden 2048, 16 layers, 32 heads, 8 of them keys', feed forward 8192,
vocabulary 128256, tied head) in bfloat16 with its gradients, two sequences of 4096 tokens, with and
without transformers' gradient checkpointing. Contenders take turns. Memory: the peak of a forward
and backward with weights and gradients, and what of it is above them.

    python benchmarks/frameworks/bench_fused_loss.py            # on a GPU
    python benchmarks/frameworks/bench_fused_loss.py --tiny     # the same path on a CPU, no figures
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_accelerate import ONE_B, TINY
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te import fuse_loss

CONTENDERS: dict[str, dict[str, Any] | None] = {
    "transformers": None,
    "fuse_loss": {},
    "fuse_loss, tensorwise head": {"fp8_recipe": "tensorwise"},
}


def make_step(model: Any, options: dict[str, Any] | None, ids: torch.Tensor) -> Callable[[], Any]:
    """Returns a call that computes loss and gradients; without options by the model's own loss."""

    def step() -> torch.Tensor:
        fused = None if options is None else fuse_loss(model, **options)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if fused is not None:
            fused.remove()
        return loss.detach()

    return step


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, which a CPU can run")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    dtype = torch.float32 if options.tiny else torch.bfloat16
    sizes, tokens = (TINY, 16) if options.tiny else (ONE_B, options.tokens)
    own = {"max_position_embeddings": tokens, "use_cache": False, "tie_word_embeddings": True}
    config = LlamaConfig(**sizes, **own)
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config).to(dtype).train()
    ids = torch.randint(config.vocab_size, (options.batch, tokens), device=device)
    steps = [make_step(model, chosen, ids) for chosen in CONTENDERS.values()]
    rows = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        found: list[dict[str, Any]] = []
        exact = None
        for name, step in zip(CONTENDERS, steps, strict=True):
            model.zero_grad(set_to_none=True)
            loss = step()
            # On the CPU, where they do not count for the peak.
            grads = torch.cat([p.grad.flatten()[::97].double().cpu() for p in model.parameters()])
            exact = grads if exact is None else exact
            error = float((grads - exact).norm() / exact.norm())
            stack = f"{name}, checkpointing" if recompute else name
            row = {"stack": stack, "loss": float(loss)}
            found.append({**row, "gradients from transformers'": error})
            if device.type == "cuda":
                before = torch.cuda.memory_allocated()
                above = harness.memory(step)[2]
                found[-1]["peak GiB"] = (before + above) / 2**30
                found[-1]["of the step GiB"] = above / 2**30
        if device.type == "cuda":
            times = harness.paired_us(steps, repeats=9)
            for row, taken in zip(found, times, strict=True):
                row["ms"] = taken["us"] / 1e3
                row["over transformers"] = taken["us"] / times[0]["us"]
        rows += found
    if options.tiny:
        print(*rows, sep="\n")
        return
    harness.report("fused_loss", rows, batch=options.batch, tokens=options.tokens)


if __name__ == "__main__":
    main()
