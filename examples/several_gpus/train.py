#!/usr/bin/env python3
"""Trains a Llama of transformers on several GPUs: FSDP2, bf16 mixed precision and FP8.

    torchrun --nproc-per-node 2 examples/several_gpus/train.py                     # tiny, on CPUs
    torchrun --nproc-per-node 4 examples/several_gpus/train.py --size 7b --context 4096

The model starts from random weights and nothing is downloaded; ``--model DIR`` starts from a model
on disk. docs/guides/several_gpus.md explains the program.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import apex_te
from apex_te import from_torch
from apex_te.distributed import (
    clip_grad_norm_,
    enable_fp8_all_gather,
    get_state_dict,
    set_state_dict,
)

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
             "num_attention_heads": 4, "vocab_size": 272},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
           "num_attention_heads": 32, "vocab_size": 32000},
}  # fmt: skip
FIRST_BYTE = 3  # token of byte 0; the tokens before it are special ones
SETTLING = 3  # first steps, which compile kernels and allocate memory


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the checked command line."""
    parser = argparse.ArgumentParser(description="Trains a Llama with FSDP2 in FP8.")
    add = parser.add_argument
    add("--size", choices=[*SIZES], default="tiny", help="shape of a model with random weights")
    add("--layers", type=int, metavar="N", help="decoder layers, instead of those of --size")
    add("--model", metavar="DIR", help="folder of a causal language model to start from")
    add("--recipe", choices=("none", "delayed", "tensorwise", "blockwise", "mxfp8"),
        default="tensorwise", help="none: the model of transformers as it is, in bf16")  # fmt: skip
    add("--fp8-all-gather", action="store_true", help="FSDP2 gathers weights as FP8 data")
    add("--recompute", action="store_true", help="activation checkpointing of every layer")
    add("--compile", action="store_true", help="torch.compile every layer")
    add("--context", type=int, default=64, help="tokens of a sequence")
    add("--batch", type=int, default=2, help="sequences of a step on each rank")
    add("--steps", type=int, default=10, help="steps in all, those before --resume included")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=1)
    add("--save", type=Path, metavar="DIR", help="write a checkpoint after the last step")
    add("--resume", type=Path, metavar="DIR", help="continue from a checkpoint of --save")
    add("--json", type=Path, metavar="FILE", help="write settings and figures to this file")
    args = parser.parse_args(argv)
    for name in ("layers", "context", "batch", "steps", "lr"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} must be positive, got {value}")
    if args.layers is not None and args.model is not None:
        parser.error("--layers needs --size, got --model")
    if args.fp8_all_gather and args.recipe in ("none", "mxfp8"):
        parser.error(f"--fp8-all-gather needs an FP8 recipe other than mxfp8, got {args.recipe}")
    if "RANK" not in os.environ:
        parser.error("start this program with torchrun, as in: "
                     "torchrun --nproc-per-node 2 examples/several_gpus/train.py")  # fmt: skip
    return args


def plain_model(args: argparse.Namespace, device: torch.device) -> Any:
    """Returns the model of transformers in float32, equal on all ranks."""
    if args.model is not None:  # on the CPU: fully_shard moves a layer at a time to the GPU
        return transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    sizes: dict[str, Any] = dict(SIZES[args.size])
    if args.layers is not None:
        sizes["num_hidden_layers"] = args.layers
    config = transformers.LlamaConfig(
        **sizes, max_position_embeddings=args.context, use_cache=False
    )
    torch.manual_seed(args.seed)
    with device:  # 25 GiB for 7B, until fully_shard leaves each rank its part
        return transformers.LlamaForCausalLM(config)


def sharded_model(args: argparse.Namespace, device: torch.device) -> Any:
    """Returns the model as it is trained: converted, checkpointed, compiled and sharded."""
    model = plain_model(args, device)
    if args.recipe != "none":
        from_torch(model, fuse=True)
    if args.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = model.base_model.layers
    if args.compile:
        for layer in layers:
            layer.compile()
    if args.fp8_all_gather:
        enable_fp8_all_gather(model, args.recipe)
    # Shards and optimizer stay float32; layers compute in bf16, gradients are summed in float32.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = distributed.init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.train()


def region(recipe: str) -> AbstractContextManager[Any]:
    """Returns the context of a forward."""
    return nullcontext() if recipe == "none" else apex_te.fp8_autocast(fp8_recipe=recipe)


class Text:
    """The standard library's source as bytes; put your own tokens in its place.

    Args:
        context: tokens of a sequence.
        batch: sequences of a step on each rank.
    """

    def __init__(self, context: int, batch: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        data = bytearray(b"".join(path.read_bytes() for path in files))
        sequences = torch.frombuffer(data, dtype=torch.uint8)[: len(data) // context * context]
        self.sequences, self.batch = sequences.view(-1, context), batch

    def step(self, number: int) -> torch.Tensor:
        """Returns this rank's tokens of a step, int64 [batch, context]; other ranks get others."""
        first = (number * distributed.get_world_size() + distributed.get_rank()) * self.batch
        rows = (first + torch.arange(self.batch)) % len(self.sequences)
        return self.sequences[rows].long() + FIRST_BYTE


def save(folder: Path, model: Any, optimizer: Any, step: int) -> None:
    """Writes a checkpoint, each rank its part; any number of ranks can load it."""
    apex_te.flush_fp8_state()  # the scales that the next step will use
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**states, "step": step}, checkpoint_id=folder)


def load(folder: Path, model: Any, optimizer: Any, recipe: str) -> int:
    """Loads a checkpoint and returns the number of its steps."""
    if recipe != "none":
        apex_te.init_fp8_state(model, recipe)  # only what the model already has is loaded
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    state: dict[str, Any] = {**states, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"]


def now(device: torch.device) -> Any:
    """Returns a point in time: on a GPU an event, for which the host does not wait."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def train(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Runs the training and returns its figures."""
    model, text = sharded_model(args, device), Text(args.context, args.batch)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = apex_te.optimizers.FusedAdam(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    first = load(args.resume, model, optimizer, args.recipe) if args.resume is not None else 0
    if first >= args.steps:
        raise SystemExit(f"--steps must be above the {first} steps of --resume, got {args.steps}")
    losses, times = [], [now(device)]
    for step in range(first, args.steps):
        ids = text.step(step).to(device)
        with region(args.recipe):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        times.append(now(device))
        if step + 1 == first + SETTLING and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    mean = torch.stack(losses)
    distributed.all_reduce(mean)
    mean /= distributed.get_world_size()
    if device.type == "cuda":
        times[-1].synchronize()
        ms = [begin.elapsed_time(end) for begin, end in pairwise(times)]
    else:
        ms = [(end - begin) * 1e3 for begin, end in pairwise(times)]
    if args.save is not None:
        save(args.save, model, optimizer, args.steps)
    typical = median(ms[SETTLING:] or ms)
    tokens = distributed.get_world_size() * args.batch * args.context
    figures = {
        "parameters": parameters, "ranks": distributed.get_world_size(), "ms": typical,
        "tokens_per_s": tokens * 1e3 / typical, "losses": mean.tolist(),
    }  # fmt: skip
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return figures


def report(args: argparse.Namespace, figures: dict[str, Any], device: torch.device) -> None:
    """Prints the figures, and writes them to ``--json``."""
    losses = figures["losses"]
    line = f"{args.recipe}: {figures['parameters'] / 1e9:.3g} B parameters, "
    line += f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {figures['ms']:.1f} ms a step, "
    line += f"{figures['tokens_per_s']:,.0f} tokens/s"
    if "peak_gib" in figures:
        line += f", peak {figures['peak_gib']:.1f} GiB a GPU"
    print(line, flush=True)
    if args.json is not None:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        settings |= {"device": name, "torch": torch.__version__,
                     "transformers": transformers.__version__}  # fmt: skip
        args.json.write_text(
            json.dumps({"settings": settings, "figures": figures}, indent=1) + "\n"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program on this rank."""
    args = parse(argv)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        distributed.init_process_group("gloo")
    try:
        figures = train(args, device)
        if distributed.get_rank() == 0:
            report(args, figures, device)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
