"""Data, model and program of examples/char_gpt."""

import importlib.util
import json
import math
from pathlib import Path

import data
import pytest
import report
import torch
import train as program
from model import CharGPT

from apex_te.module.transformer_layer import TransformerLayer
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, Format, MXFP8Scaling


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


@pytest.mark.long
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


def model(te, **changes):
    sizes = {"vocabulary": 20, "context": 8, "layers": 2, "dim": 16, "heads": 2, **changes}
    return CharGPT(te=te, **sizes)


@pytest.mark.parametrize("te", [False, True])
def test_model_is_causal(te):
    gpt = model(te)
    assert gpt.linears() == 8
    ids = torch.randint(20, (2, 8))
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 20
    before, after = gpt(ids), gpt(changed)
    assert before.shape == (2, 8, 20)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


def test_both_models_start_equal_and_have_equal_gradients():
    ids, models = torch.randint(20, (2, 8)), []
    for te in (False, True):
        torch.manual_seed(3)
        models.append(model(te))
    plain, te = models
    assert {type(block) for block in te.blocks} == {TransformerLayer}
    torch.testing.assert_close(te(ids), plain(ids))
    for gpt in models:
        gpt(ids).square().mean().backward()
    ours, theirs = list(te.named_parameters()), list(plain.named_parameters())
    assert len(ours) == len(theirs)
    for (name, p), (_, q) in zip(ours, theirs, strict=True):
        assert torch.equal(p, q), name
        torch.testing.assert_close(p.grad, q.grad, msg=lambda text, n=name: f"{n}: {text}")
    mlp = te.blocks[1].layernorm_mlp
    assert mlp.fc1_weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert mlp.fc2_weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.2)


def test_model_starts_near_the_uniform_loss():
    gpt = model(True, vocabulary=50, context=16, dim=32, heads=4)
    ids = torch.randint(50, (8, 16))
    loss = torch.nn.functional.cross_entropy(gpt(ids).flatten(0, 1), ids.flatten())
    assert abs(loss.item() - math.log(50)) < 0.2


def test_model_refuses_heads_that_do_not_divide():
    with pytest.raises(ValueError, match=r"dim must be a multiple of heads \(3\), got 16"):
        model(False, heads=3)


EVERY = {
    "delayed": DelayedScaling(amax_history_len=16),
    "tensorwise": CurrentScaling(),
    "blockwise": BlockScaling(),
    "mxfp8": MXFP8Scaling(),
    "tensorwise hif8": CurrentScaling(fp8_format=Format.HIF8),
}


def test_switches_choose_the_runs():
    def runs(*words):
        return {run.label: run for run in program.parse(["--device", "cpu", *words]).runs}

    assert list(runs()) == ["fp32"]
    assert not runs()["fp32"].te
    assert list(runs("--use-te")) == ["fp32", "fp32, apex_te"]
    assert {k: run.recipe for k, run in runs("--use-fp8").items()} == {"fp32": None, **EVERY}
    assert list(runs("--compare")) == ["fp32", "fp32, apex_te", *EVERY]
    chosen = runs("--fp8-recipe", "tensorwise", "--fp8-format", "e4m3")["tensorwise e4m3"]
    assert chosen == ("tensorwise e4m3", True, CurrentScaling(fp8_format=Format.E4M3))
    assert list(runs("--device", "cuda:1")) == ["bf16"]


def test_sizes_depend_on_the_device():
    cpu, cuda = (
        program.parse(["--device", "cpu"]),
        program.parse(["--device", "cuda", "--dim", "64"]),
    )
    assert (cpu.layers, cpu.dim, cpu.steps, cpu.lr) == (4, 128, 300, 4e-3)
    assert (cuda.layers, cuda.dim, cuda.steps, cuda.eval_every) == (6, 64, 1000, 100)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--context", "-1"], "--context must be positive, got -1"),
        (["--heads", "3"], "--dim must be a multiple of --heads (3), got 128"),
        (["--resume"], "--resume needs --checkpoint DIR"),
        (["--stop-at", "301"], "--stop-at must be between 1 and --steps (300), got 301"),
        (["--transformer-impl", "local", "--compare"], "with --use-fp8, got local"),
    ],
)
def test_switches_that_do_not_fit(words, message, capsys):
    with pytest.raises(SystemExit):
        program.parse(["--device", "cpu", *words])
    assert message in capsys.readouterr().err


def test_table_compares_with_the_first_run(tmp_path):
    results = [
        report.Result("bf16", 100, 10, 4, validation_loss=2.0),
        report.Result("mxfp8", 100, 10, 4, validation_loss=2.02, gemms_per_linear_and_step=3.0),
    ]
    lines = report.table(results).splitlines()
    assert "/ bf16" in lines[0]
    assert lines[3].split()[:4] == ["mxfp8", "2.0200", "1.0100", f"{2.02 / math.log(100):.4f}"]
    assert lines[3].split()[-1] == "3"
    assert lines[2].split()[-1] == "-"


@pytest.fixture(scope="module")
def compared(train, tmp_path_factory):
    """By device: a folder with an uninterrupted and a resumed comparison, and the output."""
    done = {}

    def run(device):
        if device.type not in done:
            folder = tmp_path_factory.mktemp("compared")
            words = ["--compare", "--device", device.type]
            whole = [*words, "--checkpoint", "whole", "--out", "whole"]
            parts = [*words, "--checkpoint", "parts", "--out", "parts"]
            printed = train(folder, whole, [*parts, "--stop-at", 5])
            train(folder, [*parts, "--resume"])  # by a process that knows nothing of the first
            done[device.type] = folder, printed
        return done[device.type]

    return run


def figures(folder):
    return json.loads((folder / "results.json").read_text())["results"]


@pytest.mark.long
def test_program_reports_the_baseline_and_every_recipe(compared, device):
    folder, printed = compared(device)
    baseline, te, *fp8 = figures(folder / "whole")
    assert [result["precision"] for result in fp8] == list(EVERY)
    assert baseline["gemms_per_linear_and_step"] is te["gemms_per_linear_and_step"] is None
    exact = 1e-5 if device.type == "cpu" else 0.01
    assert te["train_losses"] == pytest.approx(baseline["train_losses"], rel=exact)
    for result in fp8:
        assert result["gemms_per_linear_and_step"] == 3.0
        assert len(result["train_losses"]) == 12
        assert result["train_losses"] != te["train_losses"]
        assert result["validation_loss"] == pytest.approx(baseline["validation_loss"], rel=0.02)
        assert result["validation_characters"] == 2 * 2 * 16
        assert f"{result['precision']}  " in printed
    assert "FP8 GEMMs per Linear and step" in printed
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert (folder / "whole" / "loss.png").stat().st_size > 1000


@pytest.mark.long
def test_resumed_runs_are_bitwise_the_uninterrupted_ones(compared, device):
    folder, _ = compared(device)
    pairs = list(zip(figures(folder / "whole"), figures(folder / "parts"), strict=True))
    assert [whole["precision"] for whole, _ in pairs][2:] == list(EVERY)
    for whole, parts in pairs:
        label = whole["precision"]
        for name in ("precision", "validation_loss", "sample"):
            assert whole[name] == parts[name], (label, name)
        assert whole["train_losses"][5:] == parts["train_losses"], label
        assert parts["train_losses_from"] == 5
        assert_checkpoints_equal(folder, label)


def assert_checkpoints_equal(folder, label):
    whole, parts = (
        torch.load(folder / name / program.file_name(label), weights_only=True)
        for name in ("whole", "parts")
    )
    assert whole["step"] == parts["step"] == 12
    assert whole["model"].keys() == parts["model"].keys()
    for name, value in whole["model"].items():
        other = parts["model"][name]
        assert torch.equal(value.view(torch.uint8), other.view(torch.uint8)), (label, name)
    for index, state in whole["optimizer"]["state"].items():
        for name, value in state.items():
            other = parts["optimizer"]["state"][index][name]
            assert torch.equal(value, other), (label, index, name)


@pytest.mark.long
def test_resume_with_other_settings_is_refused(compared, monkeypatch):
    folder, _ = compared(torch.device("cpu"))
    monkeypatch.setattr(program, "make_deterministic", lambda: None)
    words = ["--device", "cpu", "--max-bytes", "300000", "--checkpoint", str(folder / "parts")]
    with pytest.raises(ValueError, match="seed must be 1 as in the saved run, got 2"):
        program.main([*words, "--resume", "--seed", "2", "--out", str(folder / "refused")])


def tiny(folder, *words):
    """Arguments of one run of the smallest model, on the CPU."""
    sizes = ["--steps", "2", "--batch", "2", "--context", "8", "--layers", "1", "--dim", "16"]
    rest = ["--heads", "2", "--eval-batches", "1", "--max-bytes", "300000", "--sample", "0"]
    folders = ["--checkpoint", str(folder / "runs"), "--out", str(folder / "out")]
    return ["--device", "cpu", *sizes, *rest, *folders, *words]


@pytest.mark.long
def test_resume_with_another_recipe_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(program, "make_deterministic", lambda: None)
    program.main(tiny(tmp_path, "--use-te", "--use-fp8", "--fp8-recipe", "delayed"))
    assert "--resume" not in capsys.readouterr().out
    resumed = ["--use-te", "--use-fp8", "--resume", "--fp8-recipe"]
    program.main(tiny(tmp_path, *resumed, "tensorwise"))
    printed = capsys.readouterr().out
    said = "tensorwise: starts at step 0, --resume found no run of this recipe in "
    assert printed.count("starts at step 0") == 1  # the baselines were resumed
    assert said + str(tmp_path / "runs") + " (runs there: " in printed
    assert "delayed" in printed.split("(runs there: ")[1].split(")")[0].split(", ")
    program.main(tiny(tmp_path, *resumed, "tensorwise"))
    assert "starts at step 0" not in capsys.readouterr().out
    (tmp_path / "runs" / "delayed.pt").rename(tmp_path / "runs" / "tensorwise.pt")
    with pytest.raises(ValueError, match=r"tensorwise\.pt: precision must be 'delayed' as in the "):
        program.main(tiny(tmp_path, *resumed, "tensorwise"))


def test_the_same_name_with_another_recipe_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "make_deterministic", lambda: None)
    words = ["--use-te", "--use-fp8", "--fp8-recipe", "delayed"]
    program.main(tiny(tmp_path, *words))
    monkeypatch.setattr(program.common, "HISTORY", 7)
    message = r"delayed\.pt: recipe must be .*_history_len=16.* as in the saved run, got .*_len=7"
    with pytest.raises(ValueError, match=message):
        program.main(tiny(tmp_path, *words, "--resume"))


@pytest.mark.cover(0)
@pytest.mark.parametrize("damage", ["cut", "text", "foreign", "keys"])
def test_errors_of_a_checkpoint_name_its_file(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "make_deterministic", lambda: None)
    program.main(tiny(tmp_path))
    (file,) = (tmp_path / "runs").glob("*.pt")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-500])
    elif damage == "text":
        file.write_text("no checkpoint")
    elif damage == "foreign":
        torch.save({"weights": torch.ones(3)}, file)
    else:
        saved = torch.load(file, weights_only=True)
        del saved["model"][next(iter(saved["model"]))]
        torch.save(saved, file)
    with pytest.raises(
        ValueError, match=r"^checkpoint .*\.pt: must be a whole run of this model, "
    ) as e:
        program.main(tiny(tmp_path, "--resume"))
    assert str(file) in str(e.value)


@pytest.fixture(scope="module")
def convergence():
    """benchmarks/layers/convergence.py."""
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "layers" / "convergence.py"
    spec = importlib.util.spec_from_file_location("convergence", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seeds(label, losses, gemms=None, train_losses=()):
    return [
        report.Result(
            label, 100, 20, 8, loss, gemms_per_linear_and_step=gemms, train_losses=[*train_losses]
        )
        for loss in losses
    ]


def test_convergence_compares_means_over_the_seeds(convergence):
    first = convergence.summary("bf16", seeds("bf16", [1.9, 2.1]), None)
    assert (first["ratio"], first["spread"]) == (1.0, pytest.approx(0.1))
    row = convergence.summary("mxfp8", seeds("mxfp8", [2.0, 2.02], 3.0), first["validation loss"])
    assert row["ratio"] == pytest.approx(1.005)
    falling = convergence.fall(
        seeds("bf16", [2.0], train_losses=[4.0 - 0.15 * i for i in range(20)])
    )
    assert falling["first step"] == 4.0
    assert falling["last tenth"] == pytest.approx(4.0 - 0.15 * 18.5)
    assert falling["last but one tenth"] == pytest.approx(4.0 - 0.15 * 16.5)
    assert convergence.failures([first, row], falling, 0.01) == []
    assert "1.0050" in convergence.printed([first, row], falling)


@pytest.mark.parametrize(
    ("losses", "gemms", "train_losses", "message"),
    [
        ([2.03, 2.02], 3.0, [4.0, 1.5, 1.0], "mxfp8: ratio 1.0125"),
        ([1.97, 1.98], 3.0, [4.0, 1.5, 1.0], "mxfp8: ratio 0.9875"),
        ([math.nan, 2.0], 3.0, [4.0, 1.5, 1.0], "mxfp8: ratio nan"),
        ([2.0, 2.0], 2.0, [4.0, 1.5, 1.0], "mxfp8: products per Linear and step [2.0]"),
        ([2.0, 2.0], 3.0, [4.0, 3.0, 2.1], "bf16: the loss has not fallen by half"),
        ([2.0, 2.0], 3.0, [4.0, 1.0, 1.0], "bf16: the loss is not falling any more"),
    ],
)
def test_convergence_says_what_fails(convergence, losses, gemms, train_losses, message):
    first = convergence.summary("bf16", seeds("bf16", [2.0, 2.0]), None)
    row = convergence.summary("mxfp8", seeds("mxfp8", losses, gemms), 2.0)
    falls = convergence.fall(seeds("bf16", [2.0], train_losses=train_losses))
    assert convergence.failures([first, row], falls, 0.01) == [message]
