"""Hugging Face's Trainer and TRL's SFTTrainer in FP8 by Accelerate's switch, and with adapters."""

from __future__ import annotations

import os

import pytest
import torch
from pins import pin
from tiny import BATCH, LENGTH, STEPS, VOCABULARY, check_losses, sequences, tiny_llama

pytest.importorskip("transformers", minversion=pin("transformers"))
pytest.importorskip("accelerate", minversion=pin("accelerate"))
pytest.importorskip("datasets", minversion=pin("datasets"))

import transformer_engine.pytorch as te
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from transformers import (
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from apex_te.ops.gemm_common import fp8_gemm_count


@pytest.fixture(autouse=True)
def _fp8():
    """Chooses FP8 as ``accelerate launch`` does, by the environment."""
    os.environ.update(ACCELERATE_MIXED_PRECISION="fp8", ACCELERATE_FP8_BACKEND="TE")
    yield
    _forget_accelerator()


def _forget_accelerator():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Losses(TrainerCallback):
    """Notes the loss of each step."""

    def __init__(self):
        self.values: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.values.append(logs["loss"])


def options(folder, steps=STEPS):
    return {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": BATCH,
        "learning_rate": 2e-3, "lr_scheduler_type": "constant", "logging_steps": 1,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "steps",
        "save_steps": STEPS // 2, "seed": 7, "max_grad_norm": 1.0, "bf16": False,
    }  # fmt: skip


def dataset():
    return Dataset.from_dict({"input_ids": sequences().tolist(), "labels": sequences().tolist()})


def fit(folder, resume=None):
    losses = Losses()
    trainer = Trainer(
        model=tiny_llama(), args=TrainingArguments(**options(folder)), train_dataset=dataset(),
        callbacks=[losses],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return losses.values, trainer.model, trainer


def plain(run):
    """Runs a training without FP8 and returns its losses."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    _forget_accelerator()
    losses = run()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
    _forget_accelerator()
    return losses


def test_trainer_learns_and_resumes(tmp_path):
    expected = plain(lambda: fit(tmp_path / "plain")[0])
    before = fp8_gemm_count()
    losses, model, trainer = fit(tmp_path / "fp8")
    assert fp8_gemm_count() > before
    assert sum(isinstance(m, te.Linear) for m in model.modules()) == 15
    check_losses(losses, expected)
    _forget_accelerator()
    resumed, _, _ = fit(tmp_path / "again", str(tmp_path / "fp8" / f"checkpoint-{STEPS // 2}"))
    assert len(resumed) == STEPS // 2
    difference = max(abs(a - b) for a, b in zip(resumed, losses[STEPS // 2 :], strict=True))
    assert difference < 0.01 * losses[-1]
    x = sequences(1)
    with torch.no_grad():
        assert trainer.model.eval()(input_ids=x).logits.shape == (1, LENGTH, VOCABULARY)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", eos_token="w2", bos_token="w1"
    )


@pytest.mark.parametrize("lora", [False, True])
def test_sft_learns(lora, tmp_path):
    pytest.importorskip("trl", minversion=pin("trl"))
    from trl import SFTConfig, SFTTrainer

    adapter = None
    if lora:
        pytest.importorskip("peft", minversion=pin("peft"))
        from peft import LoraConfig

        names = ["q_proj", "v_proj", "up_proj", "down_proj"]
        adapter = LoraConfig(r=16, lora_alpha=64, target_modules=names, modules_to_save=["lm_head"])
    rows = [" ".join(f"w{int(token)}" for token in row) for row in sequences()]

    def run(folder=tmp_path / "plain"):
        losses = Losses()
        arguments = SFTConfig(
            **{**options(folder), "learning_rate": 4e-3 if lora else 2e-3},
            dataset_text_field="text", max_length=LENGTH, packing=False,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=tiny_llama(), args=arguments, train_dataset=Dataset.from_dict({"text": rows}),
            processing_class=tokenizer(), peft_config=adapter, callbacks=[losses],
        )  # fmt: skip
        trainer.train()
        return losses.values

    expected = plain(run)
    before = fp8_gemm_count()
    losses = run(tmp_path / "fp8")
    assert fp8_gemm_count() > before
    check_losses(losses, expected)
