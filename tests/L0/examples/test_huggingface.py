"""examples/huggingface: each program with a tiny model, its figures and its files."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from programs import captured

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "huggingface"
TINY = [
    *("--device", "cpu"), *("--hidden", "32"), *("--layers", "1"), *("--heads", "2"),
    *("--length", "32"), *("--batch", "2"), *("--bytes", "20000"), *("--steps", "6"),
]  # fmt: skip


def program(name):
    """The module of a program, which finds its common part beside it."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def run(name, folder, *options):
    report = program(name).main([*TINY, "--out", str(folder), *map(str, options)])
    assert len(report.losses) == 6
    assert report.tokens == 6 * 2 * 32
    assert (report.products > 0) == ("--no-fp8" not in options)
    return report


def saved(folder):
    """The plain model that was saved, whole."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", output_loading_info=True
    )
    assert not info["missing_keys"]
    return model


@pytest.mark.parametrize(
    ("name", "package"),
    [("trainer", None), ("accelerate_loop", None), ("lora", "peft"), ("sft", "trl")],
)
def test_programs(name, package, tmp_path):
    if package is not None:
        pytest.importorskip(package, reason=f"{package} is not installed")
    if name == "sft":
        pytest.importorskip("datasets", reason="datasets is not installed")
    fp8 = run(name, tmp_path / "fp8")
    plain = run(name, tmp_path / "plain", "--no-fp8")
    assert fp8.losses != plain.losses
    assert fp8.losses == pytest.approx(plain.losses, rel=0.02)
    fused = run(name, tmp_path / "fused", "--no-fp8", "--fuse-loss")
    assert fused.losses == pytest.approx(plain.losses, rel=1e-4)
    assert saved(tmp_path / "fp8").config.model_type == "llama"


def test_trainer_resumes_and_exports(tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    options = ("--checkpoints", 3, "--fuse", "--recipe", "tensorwise", "--family", "qwen3")
    whole = run("trainer", tmp_path, *options, "--export")
    expected = saved(tmp_path).state_dict()
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    for folder in tmp_path.glob("checkpoint-6"):
        folder.rename(tmp_path / "last")
    resumed = program("trainer").main(
        [*TINY, "--out", str(tmp_path), *map(str, options), "--resume"]
    )
    assert resumed.losses == whole.losses  # the trainer's log has the first steps, too
    for key, value in saved(tmp_path).state_dict().items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral"])
def test_families(family, tmp_path):
    run("accelerate_loop", tmp_path, "--family", family, "--accumulate", 2)
    again = run("accelerate_loop", tmp_path / "again", "--model", tmp_path / "model")
    assert again.losses[-1] < 6


@pytest.mark.long
def test_accelerates_own_switch(tmp_path):
    """In a process of its own, which has the alias from the start."""
    options = [*TINY, "--switch", "--out", str(tmp_path)]
    done = captured(
        [sys.executable, str(FOLDER / "accelerate_loop.py"), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), *sys.path])},
    )
    # The output head, which Accelerate converts, too, besides the seven layers of the block.
    assert f"{6 * 3 * 8} FP8 GEMMs" in done.stdout
    with pytest.raises(SystemExit):
        program("accelerate_loop").main([*TINY, "--switch", "--recipe", "tensorwise"])


def test_adapters(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    run("lora", tmp_path, "--rank", 4, "--dora")


def test_data():
    small_model = program("small_model")
    rows = small_model.Bytes(small_model.text(1000), 32)
    assert len(rows) == 31
    ids = torch.cat([row["input_ids"] for row in rows])
    assert bytes((ids - small_model.FIRST_BYTE).tolist()) == small_model.text(1000)[: 31 * 32]
    assert torch.equal(rows[3]["labels"], rows[3]["input_ids"])
