#!/usr/bin/env python3
"""Trains a small character-level GPT on Python source code: a baseline, and FP8 with each recipe.

    python examples/char_gpt/train.py --use-fp8
    python examples/char_gpt/train.py --use-te --use-fp8 --fp8-recipe tensorwise --fp8-format hif8
    torchrun --nproc_per_node 4 examples/char_gpt/train.py --tp 2 --sequence-parallel --fsdp

Without switches only the baseline is trained: plain PyTorch, fp32 on a CPU, bf16 on a GPU. FP8 runs
are made of ``TransformerLayer``. Every run starts from the same weights and sees the same batches.
Sizes depend on the device; every one of them is an option. On several ranks the same model sees the
same batches; with --tp the baseline is made of ``TransformerLayer``, too.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkpoint
import data
import parallel
import report
import torch
from model import CharGPT
from torch.nn import functional as F

from apex_te.ops.gemm_common import fp8_gemm_count

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

sys.path.pop(0)  # where the folder jax would pass for the package

try:
    from tqdm import tqdm
except ImportError:  # the bar is a convenience; the run does not depend on it
    tqdm = None

PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        "steps": 300,
        "batch": 16,
        "context": 128,
        "layers": 4,
        "dim": 128,
        "heads": 4,
        "lr": 4e-3,
        "eval_every": 100,
        "eval_batches": 16,
        "max_bytes": 3_000_000,
    },
    "cuda": {
        "steps": 1000,
        "batch": 32,
        "context": 256,
        "layers": 6,
        "dim": 512,
        "heads": 8,
        "lr": 1e-3,
        "eval_every": 100,
        "eval_batches": 25,  # 204,800 characters
        "max_bytes": 20_000_000,
    },
}
# What a resumed run must share with the run that was saved.
RUN_SETTINGS = (
    "seed", "steps", "batch", "context", "layers", "dim", "heads", "lr", "max_bytes",
)  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line with the device's preset, and the runs it asks for in ``args.runs``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common.add_arguments(parser, steps=0, lr=0.0, name="char_gpt")
    parallel.add_arguments(parser)
    add = parser.add_argument
    add("--compare", action="store_true", help="the same as --use-te --use-fp8")
    add("--batch", type=int, help="windows per step")
    add("--context", type=int, help="characters per window")
    add("--layers", type=int)
    add("--dim", type=int)
    add("--heads", type=int)
    add("--max-bytes", type=int, help="limit of the text read, held-out files included")
    add("--eval-batches", type=int, help="batches of one validation")
    add("--checkpoint", type=Path, metavar="DIR", help="save there at every validation and the end")
    add("--resume", action="store_true", help="continue from --checkpoint where it holds a run")
    add("--stop-at", type=int, metavar="STEP", help="end there, as an interrupted run would")
    add("--sample", type=int, default=200, help="characters to generate at the end; 0 for none")
    first = parser.parse_args(argv)  # what the defaults of the second reading depend on
    if first.compare:
        parser.set_defaults(use_te=True, use_fp8=True)
    cuda = first.device.startswith("cuda")
    cuda |= first.device == "auto" and torch.cuda.is_available()
    parser.set_defaults(**PRESETS["cuda" if cuda else "cpu"])
    args = common.parse(parser, argv)
    for name in ("batch", "context", "layers", "dim", "heads", "max_bytes", "eval_batches"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    if args.dim % args.heads:
        parser.error(f"--dim must be a multiple of --heads ({args.heads}), got {args.dim}")
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint DIR")
    if args.stop_at is not None and not 0 < args.stop_at <= args.steps:
        parser.error(f"--stop-at must be between 1 and --steps ({args.steps}), got {args.stop_at}")
    parallel.check(parser, args)
    args.device = parallel.device_of(args.device)
    if args.tp > 1:  # plain PyTorch blocks cannot be split
        label = f"{args.runs[0].label}, apex_te"
        others = [run for run in args.runs[1:] if run.label != label]
        args.runs = [common.Run(label, True, None), *others]
    return args


def make_deterministic() -> None:
    """Asks for kernels that repeat bit for bit, without which a GPU run could not be resumed so."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Every op here writes its whole output, so filling fresh memory first would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def make_optimizer(model: CharGPT, lr: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def file_name(label: str) -> str:
    """The checkpoint of a run, e.g. ``tensorwise-hif8.pt``."""
    return label.replace(",", "").replace(" ", "-") + ".pt"


class Training:
    """The training of one run, on one rank or as ``layout`` says."""

    def __init__(
        self,
        run: common.Run,
        args: argparse.Namespace,
        corpus: data.Corpus,
        layout: parallel.Layout | None = None,
    ) -> None:
        self.started = time.perf_counter()
        self.run, self.args, self.corpus = run, args, corpus
        self.layout = layout = parallel.Layout() if layout is None else layout
        self.device = torch.device(args.device)
        torch.manual_seed(args.seed)
        sizes = (args.context, args.layers, args.dim, args.heads)
        self.model = CharGPT(len(corpus.vocabulary), *sizes, run.te, layout).to(self.device)
        self.parallel = parallel.Parallel(layout, self.model, run.recipe)
        self.optimizer = make_optimizer(self.model, args.lr)
        self.generator = torch.Generator().manual_seed(args.seed)
        self.settings = {name: getattr(args, name) for name in RUN_SETTINGS}
        self.settings |= {"precision": run.label, "vocabulary": corpus.vocabulary.characters}
        self.settings["recipe"] = None if run.recipe is None else repr(run.recipe)
        self.first_step = 0
        self.store: checkpoint.Store | None = None
        if args.checkpoint:
            path = args.checkpoint / file_name(run.label)
            self.store = checkpoint.store(path, layout)
            if args.resume and self.store.exists():
                state = self._state() | {"recipe": run.recipe}
                self.first_step = self.store.load(settings=self.settings, **state)
            elif args.resume and layout.rank == 0:
                found = ", ".join(checkpoint.others(path)) or "none"
                print(
                    f"{run.label}: starts at step 0, --resume found no run of this recipe in "
                    f"{args.checkpoint} (runs there: {found})",
                    flush=True,
                )
        self.result = report.Result(
            run.label,
            len(corpus.vocabulary),
            args.steps,
            self.model.linears(),
            train_losses_from=self.first_step,
        )
        batches = data.validation_batches(
            corpus.validation, args.batch, args.context, args.eval_batches
        )
        self.result.validation_characters = sum(inputs.numel() for inputs, _ in batches)
        self.validation = [layout.own_windows(batch) for batch in batches]

    def _state(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer, "generator": self.generator}

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of this rank's windows in nats per character, fp32."""
        model = self.parallel.module if torch.is_grad_enabled() else self.model
        with common.precision(self.run, self.args.device):
            logits = model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def validate(self, step: int) -> None:
        """Validation loss over the held-out files; changes no FP8 state."""
        self.model.eval()
        losses = torch.stack([self.loss(*batch) for batch in self.validation])
        self.model.train()
        self.result.validation_loss = self.layout.mean(losses).mean().item()
        self.result.validation_losses.append((step, self.result.validation_loss))

    def train_step(self, step: int) -> torch.Tensor:
        """One optimizer step; returns the loss of this rank's windows on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = common.learning_rate(step, self.args.steps, self.args.lr)
        batch = data.random_batch(
            self.corpus.train, self.args.batch, self.args.context, self.generator
        )
        loss = self.loss(*self.layout.own_windows(batch))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.parallel.finish_gradients()
        self.parallel.clip_gradients(1.0)
        self.optimizer.step()
        return loss.detach()

    def train(self) -> report.Result:
        """Trains to the end or to ``--stop-at`` and returns the figures."""
        args, result = self.args, self.result
        last = args.steps if args.stop_at is None else min(args.steps, args.stop_at)
        pending: list[torch.Tensor] = []
        training_seconds, timed, readings, gemms = 0.0, 0, 0, 0
        mark, gemms_mark = time.perf_counter(), fp8_gemm_count()
        bar = None
        if tqdm is not None and self.layout.rank == 0:
            bar = tqdm(total=args.steps, initial=self.first_step, desc=self.run.label, unit="step")
        for step in range(self.first_step, last):
            pending.append(self.train_step(step))
            done = step + 1
            evaluate = done % args.eval_every == 0 or done == last
            if evaluate or done % common.LOG_EVERY == 0:
                readings += 1
                if readings == 2:  # the first one's ops were compiled at their first use
                    training_seconds, timed = 0.0, 0
                losses = self.layout.mean(torch.stack(pending))
                result.train_losses += losses.tolist()  # waits for the device
                training_seconds += time.perf_counter() - mark
                timed += len(pending) * args.batch * args.context
                result.tokens_per_second = timed / training_seconds
                gemms += fp8_gemm_count() - gemms_mark
                if bar is not None:
                    bar.set_postfix_str(
                        f"loss {result.train_losses[-1]:.3f}, "
                        f"{result.tokens_per_second:,.0f} tokens/s",
                        refresh=False,
                    )
                    bar.update(len(pending))
                pending.clear()
                if evaluate:
                    self.validate(done)
                    if self.store is not None:
                        self.store.save(step=done, settings=self.settings, **self._state())
                mark, gemms_mark = time.perf_counter(), fp8_gemm_count()
        if bar is not None:
            bar.close()
        if not result.validation_losses:
            self.validate(last)  # a finished run was resumed: there was nothing left to train
        if result.train_losses and self.run.recipe is not None:
            result.gemms_per_linear_and_step = gemms / result.linears / len(result.train_losses)
        result.seconds = time.perf_counter() - self.started
        # A text of any length cannot be split over ranks.
        if args.sample > 0 and not self.layout.split_rows:
            result.sample = self.sample(args.sample)
        return result

    def sample(self, length: int) -> str:
        """Text that the model continues a function definition with."""
        vocabulary = self.corpus.vocabulary
        prompt = vocabulary.encode("def ").long()[None].to(self.device)
        self.model.eval()
        with torch.no_grad(), common.precision(self.run, self.args.device):
            ids = self.model.generate(prompt, length, torch.Generator().manual_seed(self.args.seed))
        return vocabulary.decode(ids[0].tolist())


def main(argv: Sequence[str] | None = None) -> list[report.Result]:
    """Runs the example and returns one result per run; the first rank prints and writes."""
    args = parse(argv)
    make_deterministic()
    own_group = not torch.distributed.is_initialized()
    layout = parallel.start(args)
    corpus = data.load_corpus(args.max_bytes).to(torch.device(args.device))
    if layout.rank == 0:
        print(
            f"text: {len(corpus.train):,} characters of {len(corpus.train_files)} files, "
            f"{len(corpus.validation):,} characters of {len(corpus.validation_files)} held-out "
            f"files; vocabulary {len(corpus.vocabulary)}, ln(vocabulary) "
            f"{math.log(len(corpus.vocabulary)):.4f}; device {args.device}; {layout}",
            flush=True,
        )
    results = [Training(run, args, corpus, layout).train() for run in args.runs]
    if layout.rank == 0:
        write(results, args, layout)
    if layout.started and own_group:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return results


def write(results: list[report.Result], args: argparse.Namespace, layout: parallel.Layout) -> None:
    """Prints the table, writes every figure and draws the losses."""
    if args.sample > 0 and layout.split_rows:
        print("sample: none, a text of any length cannot be split over the ranks")
    for result in results:
        if result.sample:
            print(f"\n--- sample, {result.precision} ---\n{result.sample}")
    print(f"\n{report.table(results)}\n")
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(args).items()
        if key != "runs"
    }
    settings |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    settings["ranks"] = layout.ranks
    report.write_json(results, settings, args.out / "results.json")
    print(f"figures: {args.out / 'results.json'}")
    if report.picture(results, args.out / "loss.png"):
        print(f"loss curves: {args.out / 'loss.png'}")
    else:
        print("loss curves: not drawn, matplotlib is not installed")


if __name__ == "__main__":
    main()
