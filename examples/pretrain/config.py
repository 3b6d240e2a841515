"""The command line of a run, and the shapes of the models it can train."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

RECIPES = ("bf16", "delayed", "tensorwise", "blockwise", "mxfp8", "hif8")
LAYERS = ("apex_te", "torch", "torchao")
DTYPES = ("auto", "bfloat16", "float32")
# A resumed run must agree with the saved one in these; the others do not change its numbers.
FIXED = (
    "model", "vocabulary", "context", "tied", "packed", "batch", "microbatch", "steps", "warmup",
    "lr", "final_lr", "weight_decay", "clip", "seed", "recipe", "layers", "dtype", "fp8_params",
    "fp8_head", "main_grads", "corpus", "experts", "top_k",
)  # fmt: skip

POSITIVE = (
    "context", "vocabulary", "batch", "microbatch", "steps", "max_tokens", "max_bytes",
    "max_seconds", "stop_at", "lr", "log_every", "keep", "tp", "cp", "experts", "top_k",
)  # fmt: skip
NOT_NEGATIVE = (
    "warmup", "final_lr", "weight_decay", "clip", "seed", "save_every", "eval_every", "eval_tokens",
    "health_every", "sample", "recompute",
)  # fmt: skip


class Shape(NamedTuple):
    """Sizes of a Llama-style decoder.

    Attributes:
        layers, dim, ffn: number of blocks, size of the hidden states, inner size of the MLPs.
        heads, groups: heads of the queries, and of the keys and values (grouped queries).
        tied: the head shares the embedding's weight, unless the command line says otherwise.
        lr: peak learning rate, unless the command line gives one.
        experts, top_k: number of a block's MLPs, and of those that a token goes through; 0 and 1
            for one MLP without a router.
    """

    layers: int
    dim: int
    ffn: int
    heads: int
    groups: int
    tied: bool
    lr: float
    experts: int = 0
    top_k: int = 1

    def flops_per_token(self, vocabulary: int, context: int) -> float:
        """Returns the operations of forward and backward for a token, without any recompute."""
        keys = self.groups * (self.dim // self.heads)
        block = self.dim * (2 * self.dim + 2 * keys + 3 * self.ffn * self.top_k + self.experts)
        attention = 6 * self.layers * self.dim * context  # half of all pairs are masked out
        return 6.0 * (self.layers * block + vocabulary * self.dim) + attention


# With 32,768 tokens in the vocabulary: 125.4 M, 355.5 M and 1.292 G parameters.
SHAPES = {
    "tiny": Shape(layers=2, dim=64, ffn=128, heads=4, groups=2, tied=True, lr=3e-3),
    "mini": Shape(layers=3, dim=256, ffn=512, heads=4, groups=2, tied=True, lr=2e-3),
    "124m": Shape(layers=12, dim=768, ffn=2944, heads=12, groups=4, tied=True, lr=1e-3),
    "350m": Shape(layers=24, dim=1024, ffn=3072, heads=8, groups=2, tied=False, lr=6e-4),
    "1.3b": Shape(layers=24, dim=2048, ffn=6144, heads=16, groups=4, tied=False, lr=3e-4),
}


def shape_of(args: argparse.Namespace) -> Shape:
    """Returns the sizes of the model that the command line asks for."""
    shape = SHAPES[args.model]
    if args.experts is None:
        return shape
    return shape._replace(experts=args.experts, top_k=args.top_k)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of every option, with its default."""
    made = argparse.ArgumentParser(description="Trains a Llama-style decoder from scratch.")
    _add_model(made.add_argument_group("model"))
    _add_data(made.add_argument_group("data"))
    _add_training(made.add_argument_group("training"))
    _add_precision(made.add_argument_group("precision"))
    _add_execution(made.add_argument_group("execution"))
    _add_output(made.add_argument_group("output"))
    return made


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", choices=[*SHAPES], default="124m")
    add("--context", type=int, default=2048, help="tokens of a sequence")
    add("--vocabulary", type=int, default=32768, help="tokens of the byte-pair vocabulary")
    add("--tied", action=argparse.BooleanOptionalAction, help="head and embedding share a weight")
    add("--experts", type=int, metavar="N", help="N MLPs in each block, and a router")
    add("--top-k", type=int, metavar="K", help="experts of a token (default: 2)")
    add("--layers", choices=LAYERS, default="apex_te", help="what the blocks are made of")


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--data", type=Path, nargs="+", metavar="PATH", help="text files and folders of them")
    add("--tokens", type=Path, metavar="DIR", help="a folder that prepare.py has written")
    add("--token-cache", type=Path, default=Path("build/pretrain/tokens"), metavar="DIR")
    add("--max-bytes", type=int, help="read at most so much text")
    add("--packed", action="store_true", help="attention stays within documents (cu_seqlens)")


def count(text: str) -> int:
    """Returns a number such as 100e6; argparse's error has this function's name."""
    return int(float(text))


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--batch", type=int, default=64, help="sequences of an optimizer step, on all ranks")
    add("--microbatch", type=int, help="sequences of a forward on a rank (default: all)")
    add("--steps", type=int, help="optimizer steps, which the learning rate's cosine spans")
    add(
        "--max-tokens",
        type=count,
        help="in place of --steps: as many as train on these tokens",
    )
    add("--max-seconds", type=float, help="stop after this time; --resume goes on")
    add("--stop-at", type=int, metavar="STEP", help="stop after this step; --resume goes on")
    add("--lr", type=float, help="peak learning rate")
    add("--warmup", type=int, help="steps of linear warm-up (default: a 20th of all)")
    add("--final-lr", type=float, default=0.1, help="the cosine's end, as a part of --lr")
    add("--weight-decay", type=float, default=0.1, help="of matrices")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients")
    add("--seed", type=int, default=1)


def _add_precision(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--recipe", choices=RECIPES, default="bf16", help="bf16: without FP8, in --dtype")
    add("--dtype", choices=DTYPES, default="auto", help="of parameters; auto: float32 on a CPU")
    add("--fp8-params", action="store_true", help="hold the blocks' weights in FP8 only")
    add("--fp8-head", action="store_true", help="the head's products in FP8, too")
    add("--main-grads", action="store_true", help="sum the blocks' weight gradients in float32")
    add("--keep-columnwise-weights", action="store_true", help="cast weights once, not twice")
    add("--save-small", action="store_true", help="save fewer bytes for backward in FP8")


def _add_execution(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--tp", type=int, default=1, help="ranks that split every layer; the others are FSDP's")
    add("--cp", type=int, default=1, help="ranks that split every sequence")
    add("--fp8-all-gather", action="store_true", help="FSDP gathers weights as FP8 data")
    add("--recompute", type=int, default=0, metavar="N", help="checkpoint every N-th block")
    add("--compile", action="store_true", help="torch.compile the blocks")
    add("--graphs", action="store_true", help="run the blocks as CUDA graphs")
    add("--deterministic", action="store_true", help="kernels that repeat bitwise on a GPU")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--out", type=Path, default=Path("build/pretrain/run"), metavar="DIR")
    add("--save-every", type=int, default=0, metavar="STEPS", help="0: no checkpoints")
    add("--keep", type=int, default=2, help="checkpoints that are kept")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --out, if any")
    add(
        "--branch-from", type=Path, metavar="DIR",
        help="begin at the newest checkpoint of another run, of any --recipe and --seed",
    )  # fmt: skip
    add("--eval-every", type=int, default=100, metavar="STEPS", help="0: at the end alone")
    add("--eval-tokens", type=int, default=1 << 20, help="held-out tokens; 0: no evaluation")
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--health-every", type=int, default=100, metavar="STEPS", help="FP8 statistics; 0: none")
    add("--tensorboard", action=argparse.BooleanOptionalAction, default=True, help="if installed")
    add("--wandb", metavar="PROJECT", help="also log there")
    add("--sample", type=int, default=64, help="tokens to generate at the end")
    add("--prompt", default="def ", help="what they continue")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the checked command line, with defaults that depend on other options filled in."""
    reader = parser()
    args = reader.parse_args(argv)
    shape = SHAPES[args.model]
    args.tied = shape.tied if args.tied is None else args.tied
    args.lr = shape.lr if args.lr is None else args.lr
    if (args.steps is None) == (args.max_tokens is None):
        reader.error("give one of --steps and --max-tokens")
    _check_numbers(reader, args)
    if args.steps is None:
        args.steps = max(1, args.max_tokens // max(1, args.batch * args.context))
    if args.warmup is None:
        args.warmup = max(1, args.steps // 20)
    _check_layers(reader, args)
    _check_experts(reader, args)
    _check_switches(reader, args)
    return args


def _check_numbers(reader: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a message for a number that is out of its range."""
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        if name in POSITIVE and value is not None and not value > 0:
            reader.error(f"{option} must be positive, got {value}")
        if name in NOT_NEGATIVE and value is not None and not value >= 0:
            reader.error(f"{option} must be 0 or more, got {value}")


def _check_layers(reader: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a message for switches that the layers of ``--layers`` do not have."""
    if args.layers == "apex_te":
        return
    for name in (
        "fp8_params", "fp8_head", "main_grads", "keep_columnwise_weights", "save_small",
        "fp8_all_gather", "graphs", "packed",
    ):  # fmt: skip
        if getattr(args, name):
            reader.error(f"--{name.replace('_', '-')} needs --layers apex_te, got {args.layers}")
    for name in ("tp", "cp"):
        if getattr(args, name) > 1:
            reader.error(f"--{name} of at least 2 needs --layers apex_te, got {args.layers}")
    wanted = "bf16" if args.layers == "torch" else "tensorwise"
    if args.recipe != wanted:
        reader.error(f"--recipe must be {wanted} with --layers {args.layers}, got {args.recipe}")


def _check_experts(reader: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills in ``--top-k``; exits with a message for what ``--experts`` excludes."""
    if args.experts is None:
        if args.top_k is not None:
            reader.error(f"--top-k needs --experts, got {args.top_k}")
        return
    args.top_k = min(2, args.experts) if args.top_k is None else args.top_k
    if args.top_k > args.experts:
        reader.error(f"--top-k must be at most the {args.experts} experts, got {args.top_k}")
    if args.layers != "apex_te":
        reader.error(f"--experts needs --layers apex_te, got {args.layers}")
    if args.tp > 1 or args.fp8_params or args.fp8_all_gather or args.graphs:
        reader.error("--experts excludes --tp, --fp8-params, --fp8-all-gather and --graphs")


def _check_switches(reader: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a message for switches that exclude each other."""
    for name in (
        "fp8_params", "fp8_head", "fp8_all_gather", "keep_columnwise_weights", "save_small",
    ):  # fmt: skip
        if getattr(args, name) and args.recipe == "bf16":
            reader.error(f"--{name.replace('_', '-')} needs a --recipe of FP8, got bf16")
    if args.context % (2 * args.cp) and args.cp > 1:
        reader.error(
            f"--context must be a multiple of 2 x --cp = {2 * args.cp}, got {args.context}"
        )
    if args.graphs and (
        args.compile or args.recompute or args.packed or args.main_grads or args.save_small
    ):
        reader.error(
            "--graphs excludes --compile, --recompute, --packed, --main-grads and --save-small"
        )
    if args.fp8_all_gather and args.recipe == "mxfp8":
        reader.error("--fp8-all-gather needs a --recipe other than mxfp8")
    if args.fp8_all_gather and args.fp8_params:  # which FSDP gathers as FP8 data without it
        reader.error("--fp8-params excludes --fp8-all-gather")
