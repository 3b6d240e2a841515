"""Common part of the Hugging Face examples: command line, byte-level data, model, report."""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:
    import transformers
except ImportError as error:
    raise SystemExit(
        f"small_model.py needs {error.name}: pip install '.[huggingface]' in a checkout"
    ) from error

from apex_te import fuse_loss
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import DelayedScaling, Recipe, make_recipe

FIRST_BYTE = 3  # ids of ByT5: padding, end and unknown come before the bytes
VOCABULARY = 272  # 259 ids, in a multiple of 16
HISTORY = 16  # amaxes that delayed scaling looks back on: the runs are short


def parser(description: str, *, steps: int, lr: float, name: str) -> argparse.ArgumentParser:
    """Returns the parser of the command line that all these examples have."""
    made = argparse.ArgumentParser(description=description)
    add = made.add_argument
    add("--family", default="llama", help="model_type of transformers: llama, qwen3, gemma2, ...")
    add("--model", help="folder of a model to start from, instead of a new one of --family")
    add("--hidden", type=int, default=128, help="hidden size")
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=4)
    add("--length", type=int, default=128, help="tokens of a sequence")
    add("--batch", type=int, default=4, help="sequences of a step")
    add("--steps", type=int, default=steps)
    add("--lr", type=float, default=lr)
    add("--recipe", default="delayed", help="delayed, tensorwise, blockwise or mxfp8")
    add("--no-fp8", action="store_true", help="train in high precision")
    add("--fuse-loss", action="store_true", help="compute the loss without logits in memory")
    add("--bytes", type=int, default=2_000_000, help="bytes of text")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=Path("build") / "huggingface" / name, metavar="DIR")
    return made


def recipe_of(args: argparse.Namespace) -> Recipe | None:
    """Returns the recipe of the command line, None with ``--no-fp8``."""
    if args.no_fp8:
        return None
    recipe = make_recipe(args.recipe)
    return DelayedScaling(amax_history_len=HISTORY) if recipe == DelayedScaling() else recipe


def text(limit: int) -> bytes:
    """Returns up to ``limit`` bytes of the source of the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = b""
    for path in sorted(root.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= limit:
            break
    return found[:limit]


class Bytes(torch.utils.data.Dataset):
    """Sequences of ``length`` ids of bytes, cut from a text one after the other.

    Args:
        data: the text.
        length: ids of a sequence.
    """

    def __init__(self, data: bytes, length: int) -> None:
        self.ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long() + FIRST_BYTE
        self.length = length

    def __len__(self) -> int:
        return len(self.ids) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids = self.ids[index * self.length : (index + 1) * self.length]
        return {"input_ids": ids, "labels": ids}


def build_model(args: argparse.Namespace) -> Any:
    """Returns a causal language model in fp32, that of ``--model`` or a new one."""
    if args.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        torch.manual_seed(args.seed)
        model = transformers.AutoModelForCausalLM.from_config(_config(args))
    if args.fuse_loss:
        fuse_loss(model)
    return model


def _config(args: argparse.Namespace) -> Any:
    """Returns the configuration of a new model."""
    return transformers.AutoConfig.for_model(
        args.family,
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=max(1, args.heads // 2),
        head_dim=args.hidden // args.heads,
        max_position_embeddings=max(1024, args.length),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )


class Report(NamedTuple):
    """Figures of a training.

    Attributes:
        losses: loss of each step, or of each logged one.
        seconds: time of the training, compiling of ops included.
        tokens: tokens trained on.
        products: FP8 matrix products.
    """

    losses: list[float]
    seconds: float
    tokens: int
    products: int

    def __str__(self) -> str:
        few = max(1, len(self.losses) // 10)
        first, last = self.losses[:few], self.losses[-few:]
        return (
            f"loss {sum(first) / few:.3f} -> {sum(last) / few:.3f} "
            f"(of a uniform guess: {math.log(VOCABULARY):.3f}), "
            f"{self.tokens / self.seconds:.0f} tokens/s, {self.products} FP8 GEMMs"
        )


def measured(args: argparse.Namespace, train: Callable[[], Sequence[float]]) -> Report:
    """Runs ``train``, which returns losses, and prints and returns its figures."""
    started, before = time.perf_counter(), fp8_gemm_count()
    losses = list(train())
    tokens = args.steps * args.batch * args.length
    report = Report(losses, time.perf_counter() - started, tokens, fp8_gemm_count() - before)
    print(f"{'high precision' if args.no_fp8 else args.recipe}: {report}", flush=True)
    return report


def trainer_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns arguments that ``TrainingArguments`` and ``SFTConfig`` share."""
    cpu = not args.device.startswith("cuda")
    return {
        "output_dir": str(args.out),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch,
        "learning_rate": args.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": max(1, args.steps // 10),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": args.seed,
        "use_cpu": cpu,
        "bf16": not cpu,
    }


def logged_losses(trainer: Any) -> Iterator[float]:
    """Yields the losses that a trainer has logged."""
    for entry in trainer.state.log_history:
        if "loss" in entry:
            yield entry["loss"]
