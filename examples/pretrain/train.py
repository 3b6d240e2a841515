#!/usr/bin/env python3
"""Trains a Llama-style decoder on text, in bf16 or in FP8.

    python examples/pretrain/train.py --model 124m --max-tokens 100e6 --recipe delayed
    torchrun --nproc_per_node 4 examples/pretrain/train.py --model 1.3b --tp 2 --steps 1000

README.md beside this file explains the options.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import main_grads
import torch
from batches import IGNORED, Order, Tokens, TrainingBatches, held_out_batches
from build import build
from checkpoint import Checkpoints
from config import FIXED, parse
from generate import generate
from health import Health
from logs import NoLog, RunLog
from meters import Energy, Meter, Reading, peak_flops
from ranks import Ranks, start
from schedule import learning_rate
from torch import distributed
from user_error import run

import apex_te

SETTLING = 5  # steps in which ops are compiled and memory is first allocated


class Training:
    """A run on this rank.

    Args:
        args: the command line.
        ranks: the ranks.
        device: this rank's.
        tokens: the data.
    """

    def __init__(
        self, args: argparse.Namespace, ranks: Ranks, device: torch.device, tokens: Tokens
    ) -> None:
        self.args, self.ranks, self.device = args, ranks, device
        self.tokenizer = tokens.tokenizer() if args.sample else None
        # Before the model, whose rotary angles of a mistyped --context might not fit.
        order = Order(tokens.train, args.context, args.seed)
        self.batches = TrainingBatches(
            order, args.batch, args.microbatch, ranks.batch_parts, ranks.batch_part, args.packed
        )
        self.held_out = []
        if args.eval_tokens:
            self.held_out = held_out_batches(
                tokens.held_out, args.context, args.eval_tokens, args.microbatch, args.packed
            )
        self.built = built = build(args, ranks, device, tokens.meta["vocabulary"])
        settings = {name: getattr(args, name) for name in FIXED}
        self.checkpoints = Checkpoints(
            args.out, args.keep, settings, built.model, built.optimizer, built.recipe, ranks
        )
        if args.save_every and not args.resume:
            self.checkpoints.check_new()
        self.first_step = self.checkpoints.load_newest() if args.resume else 0
        if args.resume and not self.first_step:
            self._say(f"--resume: {args.out} has no checkpoint yet, so training begins at step 0")
        if not self.first_step and args.branch_from is not None:
            self.first_step = self.checkpoints.load_branch(args.branch_from)
        self.log: Any = NoLog()
        if ranks.rank == 0:
            self.log = RunLog(args.out, self.first_step, args.tensorboard, args.wandb, settings)
        observed = built.recipe is not None and not (args.compile or args.graphs)
        self.health = Health(built.model, args.health_every, observed)
        self.meter, self.energy = Meter(device), Energy(device)
        self.peak = peak_flops(device)
        self.readings: list[Reading] = []
        self._logged = 0
        self._energy = [0.0, 0]  # joules, and the steps that took them
        about = {**settings, "parameters": built.parameters, "ranks": ranks.size,
                 "tokens_of_an_epoch": order.windows * args.context,
                 "digest": tokens.meta.get("digest"), "torch": torch.__version__,
                 "device": str(device), "flops_per_token": built.flops_per_token}  # fmt: skip
        if device.type == "cuda":
            about["device"] = torch.cuda.get_device_name(device)
        if args.branch_from is not None:
            about["branch_from"] = str(args.branch_from)
        self.log.write("start", after=self.first_step, process=os.getpid(), **about)
        self.log.flush()
        self._say(f"{args.out}: {built.parameters / 1e6:.1f} M parameters, an epoch is "
                  f"{about['tokens_of_an_epoch'] / 1e6:.1f} M tokens, {args.steps} steps of "
                  f"{args.batch * args.context:,} tokens, from step {self.first_step}")  # fmt: skip

    def _say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)

    def train_step(self, step: int) -> None:
        """Issues one optimizer step, from 0, and waits for nothing."""
        args, built = self.args, self.built
        self.meter.begin()
        rate = learning_rate(step, args.steps, args.warmup, args.lr, args.final_lr)
        for group in built.optimizer.param_groups:
            group["lr"] = rate
        batches, targets = self.batches.step(step)
        # FSDP averages gradients over its ranks, whose sum is wanted.
        factor = self.ranks.dp / targets
        caches = len(batches) > 1 and built.recipe is not None and not self.ranks.is_sharded
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(batches):
            own = batch.split(self.ranks.cp, self.ranks.cp_group).to(self.device)
            with built.region():
                loss = built.model(*own, is_first_microbatch=index == 0 if caches else None)
            (loss * factor).backward()
            total += loss.detach()
        if args.main_grads:
            main_grads.hand_over(built.model)
        norm = built.gradients.clip(args.clip)
        built.optimizer.step()
        built.optimizer.zero_grad(set_to_none=True)
        if args.main_grads:
            main_grads.clear(built.model)
        self.meter.end(step + 1, self.ranks.sum(total) / targets, norm)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the mean loss of the held-out tokens; changes no FP8 state."""
        built, ranks = self.built, self.ranks
        apex_te.flush_fp8_state()  # on all ranks, so that they read the newest scales
        built.model.eval()
        sums = torch.zeros(2, device=self.device)
        for first in range(0, len(self.held_out), ranks.batch_parts):
            # Each data-parallel rank takes one; a rank that has none left repeats the last one,
            # as all must enter FSDP's collectives, and does not count it.
            index = first + ranks.batch_part
            batch = self.held_out[min(index, len(self.held_out) - 1)]
            batch = batch.split(ranks.cp, ranks.cp_group).to(self.device)
            with built.region():
                loss = built.model(*batch)
            counts = float(index < len(self.held_out))
            sums += counts * torch.stack([loss, (batch.targets != IGNORED).sum().float()])
        built.model.train()
        total, count = ranks.sum(sums).tolist()
        return total / count

    def run(self) -> dict[str, Any]:
        """Trains to the end or to a limit, and returns the figures of the last event."""
        args = self.args
        begin = time.perf_counter()
        last = args.steps if args.stop_at is None else min(args.steps, args.stop_at)
        step, held_out = self.first_step, None
        for step in range(self.first_step + 1, last + 1):
            with self.health.watch(step):
                self.train_step(step - 1)
            self._note(self.meter.readings())
            if step == self.first_step + SETTLING and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            is_last = step == last
            if step % args.log_every == 0 and args.max_seconds is not None:
                late = time.perf_counter() - begin > args.max_seconds
                is_last = is_last or self.ranks.agreed(late)
            evaluates = bool(self.held_out) and (
                is_last or (args.eval_every and step % args.eval_every == 0)
            )
            saves = args.save_every and (is_last or step % args.save_every == 0)
            if step % args.log_every == 0 or is_last or evaluates or saves:
                self._report(step, last, wait=bool(is_last or evaluates or saves))
            if evaluates:
                held_out = self.evaluate()
                self.log.write("held_out", step=step, loss=held_out)
                self._say(f"step {step}: held-out loss {held_out:.4f}")
            if saves:
                self.log.flush()
                self.checkpoints.save(step)
            if evaluates or saves:
                self.energy.joules()  # which are not the steps'
            if is_last:
                break
        figures = self._end(step, held_out, time.perf_counter() - begin)
        if args.sample:
            self._sample()
        self.log.close()
        return figures

    def _note(self, readings: list[Reading]) -> None:
        """Logs what the device has computed of steps."""
        args = self.args
        for reading in readings:
            rate = learning_rate(reading.step - 1, args.steps, args.warmup, args.lr, args.final_lr)
            self.log.write(
                "step", step=reading.step, loss=reading.loss, grad_norm=reading.grad_norm,
                lr=rate, ms=round(reading.ms, 3),
            )  # fmt: skip
        self.readings += readings

    def _report(self, step: int, last: int, wait: bool) -> None:
        """Logs speed and health, and prints the progress line.

        Args:
            step: the last step that was issued.
            last: the last one of the run.
            wait: wait for the device.
        """
        self._note(self.meter.readings(wait))
        joules = self.energy.joules()
        settled = step - self.first_step > SETTLING
        if joules is not None and settled:
            self._energy[0] += joules
            self._energy[1] += step - max(self._logged, self.first_step + SETTLING)
        recent = self.readings[-self.args.log_every :]
        self._logged = step
        health = self.health.figures()
        for figures in health:
            self.log.write("health", **figures)
        self.log.flush()
        if not recent:
            return
        tokens = self.args.batch * self.args.context
        speed = tokens * 1e3 / median(reading.ms for reading in recent)
        line = f"step {step}/{last}: loss {recent[-1].loss:.4f}, norm {recent[-1].grad_norm:.3f}, "
        line += f"{speed:,.0f} tokens/s"
        if self.peak is not None:
            line += f", MFU {self._mfu(speed):.1%}"
        if health:
            last_one = health[-1]
            line += f", saturated {last_one['saturation']:.2%}"
            line += f", underflow {last_one['underflow']:.2%}"
        self._say(line)

    def _mfu(self, tokens_per_s: float) -> float:
        assert self.peak is not None
        return tokens_per_s * self.built.flops_per_token / (self.peak * self.ranks.size)

    def _end(self, step: int, held_out: float | None, seconds: float) -> dict[str, Any]:
        """Logs and returns the figures of the whole run."""
        tokens = self.args.batch * self.args.context
        figures: dict[str, Any] = {"step": step, "tokens": step * tokens, "seconds": seconds}
        if held_out is not None:
            figures["held_out_loss"] = held_out
        settled = [r.ms for r in self.readings if r.step > self.first_step + SETTLING]
        if self.readings:
            tail = self.readings[-50:]
            figures["train_loss"] = sum(reading.loss for reading in tail) / len(tail)
        if settled:
            figures["ms"] = median(settled)
            figures["tokens_per_s"] = tokens * 1e3 / figures["ms"]
            figures["tokens_per_s_mean"] = tokens * 1e3 * len(settled) / sum(settled)
            if self.peak is not None:
                figures["mfu"] = self._mfu(figures["tokens_per_s"])
        if self._energy[1]:
            figures["joules_per_token"] = self._energy[0] / (self._energy[1] * tokens)
        if self.device.type == "cuda":
            figures["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self.log.write("end", **figures)
        self._say(json.dumps(figures))
        return figures

    def _sample(self) -> None:
        """Generates text and prints it."""
        assert self.tokenizer is not None
        ids = self.tokenizer.encode(self.args.prompt).ids or [0]
        self.built.model.split_sequences(None)  # each rank has the whole prompt
        with self.built.region():
            new = generate(
                self.built.model, ids, self.args.sample, temperature=0.8, seed=self.args.seed,
                use_cache=self.args.layers == "apex_te",
            )  # fmt: skip
        text = self.tokenizer.decode([*ids, *new])
        self.log.write("sample", text=text)
        self._say(f"--- sample ---\n{text}")


def make_deterministic() -> None:
    """Asks for kernels that repeat bitwise; attention's backward is slower then."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Every op here writes its whole output, so filling fresh memory first would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def token_folder(args: argparse.Namespace, ranks: Ranks) -> Path:
    """Returns the folder of the tokens; the first rank has prepare.py write it if need be."""
    if args.tokens is not None:
        return args.tokens
    printed = [""]
    if ranks.rank == 0:
        command = [sys.executable, str(Path(__file__).with_name("prepare.py")),
                   "--token-cache", str(args.token_cache),
                   "--vocabulary", str(args.vocabulary)]  # fmt: skip
        if args.data:
            command += ["--data", *map(str, args.data)]
        if args.max_bytes is not None:
            command += ["--max-bytes", str(args.max_bytes)]
        # A process without torch, whose workers start quickly.
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:  # prepare.py has said why
            raise SystemExit(done.returncode)
        printed[0] = done.stdout.strip()
        print(printed[0], flush=True)
    if ranks.size > 1:
        distributed.broadcast_object_list(printed, 0)
    return Path(printed[0].splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the training that the command line asks for, and returns its figures."""
    args = parse(argv)
    if args.deterministic:
        make_deterministic()
    ranks, device = start(args)
    try:
        tokens = Tokens(token_folder(args, ranks))
        args.corpus = tokens.digest
        torch.manual_seed(args.seed)
        return Training(args, ranks, device, tokens).run()
    finally:
        if ranks.mesh is not None:
            distributed.destroy_process_group()


if __name__ == "__main__":
    run(main)
