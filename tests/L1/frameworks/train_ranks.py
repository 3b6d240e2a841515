"""Trains a tiny Llama by Accelerate and by Hugging Face's Trainer, as one rank of torchrun.

    torchrun --standalone --nproc_per_node=2 tests/L1/frameworks/train_ranks.py cuda

Each trains without FP8 and with it. The first rank prints a line of JSON at the end, which begins
with ``losses``: the losses of each training, means over the ranks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import has_transformer_engine_layers
from tiny import BATCH, STEPS, batches, optimizer_of, sequences, tiny_llama
from transformers import Trainer, TrainerCallback, TrainingArguments


def by_accelerate(precision, on_cpu):
    """Returns the losses of a loop over ``Accelerator``; checks weights and scales of the ranks."""
    given = Accelerator(cpu=on_cpu, mixed_precision=precision)
    model = tiny_llama()
    model, optimizer = given.prepare(model, optimizer_of(model))
    losses = []
    for batch in batches():
        rows = batch.chunk(given.num_processes)[given.process_index].to(given.device)
        loss = model(input_ids=rows, labels=rows).loss
        given.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(given.gather(loss.detach()[None]).mean().item())
    check_ranks(given, given.unwrap_model(model), precision)
    return losses


class Losses(TrainerCallback):
    """Notes the loss of each step."""

    def __init__(self):
        self.values: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.values.append(logs["loss"])


def by_trainer(precision, on_cpu):
    """Returns the losses of ``Trainer`` where the environment chooses the precision."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    ranks, losses = int(os.environ["WORLD_SIZE"]), Losses()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH // ranks,
            learning_rate=2e-3, lr_scheduler_type="constant", logging_steps=1, report_to=[],
            use_cpu=on_cpu, disable_tqdm=True, save_strategy="no", seed=7, bf16=False,
        )  # fmt: skip
        trainer = Trainer(
            model=tiny_llama(), args=arguments, callbacks=[losses],
            train_dataset=[{"input_ids": row, "labels": row} for row in sequences()],
        )  # fmt: skip
        trainer.train()
    given = trainer.accelerator
    assert given.num_processes == ranks, given.num_processes
    check_ranks(given, given.unwrap_model(trainer.model), precision)
    return losses.values


def check_ranks(given, model, precision):
    """Checks the layers' class, and that weights and scales are those of the other ranks."""
    assert has_transformer_engine_layers(model) == (precision == "fp8")
    layer = model.model.layers[0].mlp.down_proj
    values = [layer.weight.detach()]
    if precision == "fp8":
        values.append(layer._fp8.state.scale_fwd)
    for value in values:
        gathered = given.gather(value[None].clone())
        assert all(torch.equal(other, gathered[0]) for other in gathered)


def main():
    on_cpu = sys.argv[1] == "cpu"
    found = {}
    for name, run in {"accelerate": by_accelerate, "trainer": by_trainer}.items():
        # bf16 products on a CPU are a hundred times slower than fp32 ones.
        for precision in ("no" if on_cpu else "bf16", "fp8"):
            # Accelerate converts where this names Transformer Engine, whatever the precision.
            os.environ["ACCELERATE_FP8_BACKEND"] = "TE" if precision == "fp8" else "NO"
            AcceleratorState._reset_state()
            GradientState._reset_state()
            found[f"{name}, {'fp8' if precision == 'fp8' else 'plain'}"] = run(precision, on_cpu)
    if os.environ["RANK"] == "0":
        print("losses", json.dumps(found), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
