"""Data, model and program of examples/char_gpt."""

import json
import math

import data
import pytest
import report
import torch
from model import CharGPT


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def library(tmp_path):
    """A folder like the standard library, with files on both sides of the split."""
    for i in range(60):
        write(tmp_path, f"module{i}.py", f"value_{i} = {i}\n" * 20)
    return tmp_path


def test_sources_leave_out_tests_and_other_packages(library):
    write(library, "package/inner.py", "x = 1\n")
    for folder in ("test", "package/tests", "site-packages", "encodings"):
        write(library, f"{folder}/skipped.py", "x = 1\n")
    write(library, "test.py", "x = 1\n")  # a file of that name is no folder of tests
    names = data.list_sources(library)
    assert sorted(names) == sorted(
        [f"module{i}.py" for i in range(60)] + ["package/inner.py", "test.py"]
    )
    assert names == data.list_sources(library)


def test_whole_files_are_held_out(library):
    corpus = data.load_corpus(1_000_000, library)
    train, held_out = set(corpus.train_files), set(corpus.validation_files)
    assert train
    assert held_out
    assert not train & held_out
    assert len(train | held_out) == 60
    assert all(data.is_held_out(name) for name in held_out)
    text = corpus.vocabulary.decode(corpus.validation.tolist())
    assert text == "".join((library / name).read_text() for name in corpus.validation_files)


def test_about_a_tenth_is_held_out():
    share = sum(data.is_held_out(f"folder/file_{i}.py") for i in range(2000)) / 2000
    assert 0.08 < share < 0.12


def test_size_limit_and_undecodable_files(library):
    write(library, "latin.py", "# \xe9\n".encode("latin-1"))
    everything = data.load_corpus(1_000_000, library)
    assert "latin.py" not in everything.train_files + everything.validation_files
    size = sum((library / f"module{i}.py").stat().st_size for i in range(60))
    limited = data.load_corpus(size // 2, library)
    assert len(limited.train) + len(limited.validation) <= size // 2
    assert set(limited.train_files) < set(everything.train_files)


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="load_corpus: root must hold Python source files"):
        data.load_corpus(1000, tmp_path)


def test_vocabulary_round_trip_and_rare_characters():
    text = "abc abc\n" * 1000 + "\u20ac"
    vocabulary = data.Vocabulary.of(text, rarest=1e-3)
    assert len(vocabulary) == 6
    ids = vocabulary.encode("cab\u20ac")
    assert ids.dtype == torch.uint8
    assert ids[-1] == data.UNKNOWN
    assert vocabulary.decode(ids.tolist()) == "cab\ufffd"


def test_the_library_of_this_python_gives_about_a_hundred_characters():
    corpus = data.load_corpus(1_000_000)
    assert 80 <= len(corpus.vocabulary) <= 128
    assert (corpus.validation == data.UNKNOWN).float().mean() < 0.001


def test_windows_targets_are_shifted_by_one():
    ids = torch.arange(100, dtype=torch.uint8)
    inputs, targets = data.windows(ids, torch.tensor([0, 7]), 5)
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]]
    assert torch.equal(targets, inputs + 1)


def test_random_batches_repeat_with_the_generator_and_reach_the_last_window():
    ids = torch.arange(20, dtype=torch.uint8)
    first = data.random_batch(ids, 200, 8, torch.Generator().manual_seed(3))
    again = data.random_batch(ids, 200, 8, torch.Generator().manual_seed(3))
    assert torch.equal(first[0], again[0])
    assert first[1].max() == 19


def test_validation_batches_do_not_overlap():
    ids = torch.arange(250, dtype=torch.uint8)
    batches = data.validation_batches(ids, 3, 10, 4)
    assert len(batches) == 4
    seen = torch.cat([inputs.flatten() for inputs, _ in batches])
    assert len(seen.unique()) == 4 * 3 * 10
    with pytest.raises(ValueError, match="ids must hold at least 31 characters, got 30"):
        data.validation_batches(ids[:30], 3, 10, 4)


def test_model_is_causal_and_has_four_linears_per_block():
    model = CharGPT(vocabulary=20, context=8, layers=2, dim=16, heads=2)
    assert len(model.linears()) == 8
    ids = torch.randint(20, (2, 8))
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 20
    before, after = model(ids), model(changed)
    assert before.shape == (2, 8, 20)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_model_starts_near_the_uniform_loss():
    model = CharGPT(vocabulary=50, context=16, layers=2, dim=32, heads=4)
    ids = torch.randint(50, (8, 16))
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    assert abs(loss.item() - math.log(50)) < 0.2


def test_model_refuses_heads_that_do_not_divide():
    with pytest.raises(ValueError, match=r"dim must be a multiple of heads \(3\), got 16"):
        CharGPT(vocabulary=20, context=8, layers=1, dim=16, heads=3)


def test_table_compares_with_fp32():
    results = [
        report.Result("fp32", 100, 10, 4, validation_loss=2.0),
        report.Result("fp8", 100, 10, 4, validation_loss=2.02, gemms_per_linear_and_step=3.0),
    ]
    lines = report.table(results).splitlines()
    assert lines[3].split()[:4] == ["fp8", "2.0200", "1.0100", f"{2.02 / math.log(100):.4f}"]
    assert lines[3].split()[-1] == "3"
    assert lines[2].split()[-1] == "-"


def test_smoothing_starts_at_the_first_value():
    assert report.smooth([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert report.smooth([4.0, 2.0])[1] == pytest.approx((0.9 * 4.0 + 2.0) / 1.9)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_resumed_run_is_bitwise_the_uninterrupted_one(train, tmp_path, precision, device):
    common = ("--precision", precision, "--device", device.type)
    train(*common, "--checkpoint", "whole", "--out", "whole")
    train(*common, "--checkpoint", "parts", "--out", "parts", "--stop-at", 5)
    train(*common, "--checkpoint", "parts", "--out", "parts", "--resume")
    whole, parts = (
        torch.load(tmp_path / name / f"{precision}.pt", weights_only=True)
        for name in ("whole", "parts")
    )
    assert whole["step"] == parts["step"] == 12
    assert whole["model"].keys() == parts["model"].keys()
    for name, value in whole["model"].items():
        assert torch.equal(value.view(torch.uint8), parts["model"][name].view(torch.uint8)), name
    for index, state in whole["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, parts["optimizer"]["state"][index][name]), (index, name)
    figures = [
        json.loads((tmp_path / name / "results.json").read_text())["results"][0]
        for name in ("whole", "parts")
    ]
    assert figures[0]["validation_loss"] == figures[1]["validation_loss"]
    assert figures[0]["train_losses"][5:] == figures[1]["train_losses"]
    assert figures[0]["sample"] == figures[1]["sample"]


def test_program_reports_both_precisions(train, tmp_path):
    done = train("--precision", "fp32", "fp8", "--device", "cpu", "--out", "out")
    fp32, fp8 = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert fp32["gemms_per_linear_and_step"] is None
    assert fp8["gemms_per_linear_and_step"] == 3.0
    assert len(fp8["train_losses"]) == 12
    assert fp8["train_losses"] != fp32["train_losses"]
    assert fp8["validation_loss"] == pytest.approx(fp32["validation_loss"], rel=0.02)
    assert "FP8 GEMMs per Linear and step" in done.stdout


def test_resume_with_other_settings_is_refused(train):
    train("--precision", "fp32", "--checkpoint", "saved", "--device", "cpu")
    done = train(
        *("--precision", "fp32", "--checkpoint", "saved", "--device", "cpu"),
        *("--resume", "--seed", 2),
        check=False,
    )
    assert done.returncode != 0
    assert "seed must be 1 as in the saved run, got 2" in done.stderr
