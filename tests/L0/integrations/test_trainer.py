"""transformers.Trainer in FP8 by FP8Callback: losses, evaluation, resuming, adapters."""

import copy
import os
import pickle
import warnings

import pytest
import torch
from families import build

from apex_te import flush_fp8_state
from apex_te.fp8.autocast import is_fp8_enabled
from apex_te.integrations import conversion_summary, key_map
from apex_te.integrations.huggingface import FP8Callback
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.rms_norm import RMSNorm
from apex_te.ops.gemm_common import fp8_gemm_count
from apex_te.recipe import CurrentScaling, DelayedScaling

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

DELAYED = DelayedScaling(amax_history_len=4)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = (torch.arange(12) * (index + 1)) % 37 + 2
        return {"input_ids": ids, "labels": ids}


def trainer(folder, callbacks, model=None, kind=None, **options):
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=4,
        report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
        logging_steps=1,
        **{"max_steps": 4, "save_steps": 2, "learning_rate": 5e-3, **options},
    )  # fmt: skip
    if model is None or isinstance(model, torch.nn.Module):
        options = {"model": build("llama").train() if model is None else model}
    else:
        options = {"model_init": model}
    return (kind or transformers.Trainer)(
        args=arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=callbacks, **options
    )


def losses(one, **options):
    one.train(**options)
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("with_trial", [False, True])
def test_model_init(fuse, with_trial, tmp_path):
    """Each training of a trainer with ``model_init``, as in a search, converts its new model."""

    def make():
        torch.manual_seed(0)
        return build("llama").train()

    callback = FP8Callback(CurrentScaling(), fuse=fuse)
    made = callback.converted((lambda trial: make()) if with_trial else make)
    one = trainer(tmp_path / "a", [callback], model=made, save_strategy="no")
    found, models = [], []
    for _ in range(2):
        before = fp8_gemm_count()
        found.append(losses(one))
        assert fp8_gemm_count() > before
        models.append(one.model)
        one.state.log_history.clear()
    assert models[0] is not models[1]
    assert all(bool(key_map(model).entries) == fuse for model in models)
    assert found[0] == found[1]


def test_model_init_that_does_not_convert(tmp_path):
    """Without ``converted`` a new model is converted one to one, and joining says what to do."""

    def make():
        return build("llama").train()

    losses(trainer(tmp_path, [FP8Callback(CurrentScaling())], model=make, save_strategy="no"))
    one = trainer(
        tmp_path, [FP8Callback(CurrentScaling(), fuse=True)], model=make, save_strategy="no"
    )
    with pytest.raises(ValueError, match=r"model_init must be callback.converted\(model_init\)"):
        one.train()


def test_trains_in_fp8_and_evaluates_outside(tmp_path):
    plain = losses(trainer(tmp_path, [], max_steps=20, save_strategy="no"))
    before = fp8_gemm_count()
    callback = FP8Callback(CurrentScaling())
    one = trainer(tmp_path, [callback], max_steps=20, save_strategy="no")
    found = losses(one)
    assert fp8_gemm_count() - before == 20 * 3 * 14
    assert found != plain
    assert found == pytest.approx(plain, rel=0.02)
    assert found[-1] < found[0] - 0.1
    assert not is_fp8_enabled()
    before = fp8_gemm_count()
    one.evaluate()
    assert fp8_gemm_count() == before
    callback.handle.remove()
    assert "forward" not in vars(one.model)
    evaluating = FP8Callback("tensorwise", during_eval=True)
    trainer(tmp_path, [evaluating], model=one.model, save_strategy="no").evaluate()
    assert fp8_gemm_count() == before + 4 * 14


def assert_resumes(folder, callbacks, make=None, **options):
    """Four steps in a row, and two and two from a checkpoint: the same weights and scales."""

    def run(resume):
        one = trainer(folder, callbacks(), None if make is None else make(), **options)
        one.train(resume_from_checkpoint=resume)
        flush_fp8_state()
        return {key: value.clone() for key, value in one.model.state_dict().items()}

    expected, actual = run(None), run(str(folder / "checkpoint-2"))
    assert any(key.endswith("fp8_state.scale_fwd") for key in expected)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if not key.endswith("header"):
            assert torch.equal(actual[key], value), key


@pytest.mark.parametrize("fuse", [False, True])
def test_resumes(fuse, tmp_path):
    assert_resumes(tmp_path, lambda: [FP8Callback(DELAYED, fuse=fuse)])


def test_adapters_resume(tmp_path):
    """PEFT saves adapters alone; the scales of the layers under them are beside the adapters."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def make():
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        return peft.get_peft_model(build("llama"), config).train()

    assert_resumes(tmp_path, lambda: [FP8Callback(DELAYED)], make)
    assert "fp8_state.apex_te" in os.listdir(tmp_path / "checkpoint-2")


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True},
        {"gradient_checkpointing": True},
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "aot_eager"}, marks=pytest.mark.long
        ),
        {"gradient_accumulation_steps": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_trainer(options, tmp_path):
    torch._dynamo.reset()
    options = {"max_steps": 6, "save_strategy": "no", **options}
    plain = losses(trainer(tmp_path, [], **options))
    found = losses(trainer(tmp_path, [FP8Callback(DELAYED)], **options))
    assert found != plain
    assert found == pytest.approx(plain, rel=0.02)


def test_models_made_by_the_trainer(tmp_path):
    callback = FP8Callback(CurrentScaling(), exclude="o_proj")
    one = trainer(tmp_path, [callback], model=lambda: build("llama").train(), save_strategy="no")
    first = one.model
    one.train()
    assert one.model is not first
    assert callback.handle.model is one.model
    kept = [layer.name for layer in conversion_summary(one.model).kept]
    assert sum("o_proj" in name for name in kept) == 2


def test_layers_that_are_not_to_be_converted_and_copies(tmp_path):
    model = build("llama")
    callback = FP8Callback(CurrentScaling(), convert=False)
    trainer(tmp_path, [callback], model=model)
    assert not conversion_summary(model).converted
    copied = copy.deepcopy(callback)
    assert copied.handle.model is not model
    again = pickle.loads(pickle.dumps(FP8Callback("blockwise", fuse=True)))
    assert type(again) is FP8Callback
    assert again.options == {"fuse": True}
    assert isinstance(again, transformers.TrainerCallback)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": 1}, TypeError, "recipe must be"),
        ({"recipe": "fast"}, ValueError, "recipe must be"),
        ({"during_eval": 1}, TypeError, "during_eval must be a bool, got int"),
        ({"convert": "no"}, TypeError, "convert must be a bool, got str"),
    ],
)
def test_rejects(options, error, message):
    with pytest.raises(error, match=f"FP8Callback: {message}"):
        FP8Callback(**options)


class Normed(torch.nn.Module):
    """A model of apex_te's modules, which Trainer's rule of decay knows no norm of."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 32)
        self.layer, self.norm = LayerNormLinear(32, 32), RMSNorm(32)
        self.head = torch.nn.Linear(32, 40)

    def forward(self, input_ids, labels):
        logits = self.head(self.norm(self.layer(self.embedding(input_ids))))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_decayed_norms_are_named(decay, tmp_path):
    """The callback says that Trainer decays ``layer_norm_weight`` of layers that begin with it."""
    one = trainer(
        tmp_path, [FP8Callback("tensorwise")], Normed(), save_strategy="no", weight_decay=decay
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        one.train()
    texts = [str(one.message) for one in found if "FP8Callback" in str(one.message)]
    assert len(texts) == (decay > 0)
    assert all("decays 1 parameters of norms, such as layer.layer_norm_w" in t for t in texts)
