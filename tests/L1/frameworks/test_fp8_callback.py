"""TRL's SFTTrainer in FP8 by FP8Callback, of whole models and of LoRA adapters, with resuming."""

import pytest
import torch

from apex_te import flush_fp8_state
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import CurrentScaling, DelayedScaling

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
FP8Callback = pytest.importorskip("apex_te.integrations.huggingface").FP8Callback

STEPS = 20
CONFIG = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def rows():
    """Sequences of bytes that go round, each with a step of its own."""
    for index in range(2 * STEPS):
        yield {"input_ids": [3 + (index + i * (1 + index % 3)) % 32 for i in range(48)]}


def trainer(folder, callbacks, lora=False, **options):
    torch.manual_seed(0)
    config = None
    if lora:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = trl.SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=2, learning_rate=1e-3, report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1, max_length=48,
        **{"max_steps": STEPS, "save_strategy": "no", **options},
    )  # fmt: skip
    return trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)),
        args=arguments,
        train_dataset=datasets.IterableDataset.from_generator(rows),
        processing_class=transformers.ByT5Tokenizer(extra_ids=0),
        peft_config=config,
        callbacks=callbacks,
    )


def losses(one):
    one.train()
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), CurrentScaling()], ids=["delayed", "tensorwise"]
)
def test_losses_are_near_those_in_high_precision(recipe, lora, tmp_path):
    expected = losses(trainer(tmp_path, [], lora))
    before = fp8_gemm_count()
    found = losses(trainer(tmp_path, [FP8Callback(recipe)], lora))
    # Forwards, which SFTTrainer's checkpoints repeat; frozen layers have no weight gradients.
    assert fp8_gemm_count() - before == STEPS * (3 if lora else 4) * 14
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)
    assert found[-1] < found[0] - (0.005 if lora else 0.5)


@pytest.mark.parametrize("lora", [False, True])
def test_resumes(lora, tmp_path):
    def run(resume):
        one = trainer(
            tmp_path, [FP8Callback(DelayedScaling(amax_history_len=4))], lora,
            max_steps=4, save_strategy="steps", save_steps=2,
        )  # fmt: skip
        one.train(resume_from_checkpoint=resume)
        flush_fp8_state()
        return {key: value.clone() for key, value in one.model.state_dict().items()}

    expected, actual = run(None), run(str(tmp_path / "checkpoint-2"))
    assert any(key.endswith("fp8_state.scale_fwd") for key in expected)
    for key, value in expected.items():
        if not key.endswith("header"):
            assert torch.equal(actual[key], value), key
