"""examples/char_gpt on several ranks: the losses of one process, and those of a resumed run."""

import functools
import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from programs import captured
from rank_sets import ranks_of

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "char_gpt"
sys.path.insert(0, str(EXAMPLE))

STEPS, STOP = 8, 5
TINY = [
    *("--steps", str(STEPS)),
    *("--batch", "4"),
    *("--context", "16"),
    *("--layers", "2"),
    *("--dim", "32"),
    *("--heads", "4"),
    *("--eval-every", "4"),
    *("--eval-batches", "2"),
    *("--max-bytes", "100000"),
    *("--sample", "4"),
]
DELAYED = ["--device", "cpu", "--fp8-recipe", "delayed"]
FP32 = {"rtol": 1.3e-6, "atol": 1e-5}
FP8 = {"rtol": 2e-4, "atol": 0}  # measured: 1.1e-4
LAYOUTS = {
    "tp": (2, ["--tp", "2"]),
    "sp": (2, ["--tp", "2", "--sequence-parallel"]),
    "ddp": (2, []),
    "fsdp": (2, ["--fsdp"]),
    "fsdp of one": (2, ["--tp", "2", "--fsdp"]),
    "all": (4, ["--tp", "2", "--sequence-parallel", "--fsdp"]),
}


def _run(rank, words):
    """Losses of each run of the program, by precision; of a rank in a process group or alone."""
    import data
    import train

    train.tqdm = None
    if not hasattr(data.load_corpus, "cache_info"):  # the same text for every test
        data.load_corpus = functools.cache(data.load_corpus)
    with redirect_stdout(io.StringIO()):
        results = train.main([*TINY, *map(str, words)])
    names = ("train_losses", "validation_loss", "sample", "gemms_per_linear_and_step")
    # The baseline has another name where it is made of other blocks.
    return {
        r.precision.removesuffix(", apex_te"): {name: getattr(r, name) for name in names}
        for r in results
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The program without ranks, by the switches of FP8."""
    found = {}

    def run(*words):
        if words not in found:
            out = tmp_path_factory.mktemp("alone")
            found[words] = _run(0, ["--device", "cpu", *words, "--out", out])
            torch.use_deterministic_algorithms(False)
        return found[words]

    return run


@pytest.fixture(scope="module")
def spread(all_ranks, tmp_path_factory):
    """Results of every rank of a layout, and the figures written, in fp32 and in FP8."""
    found = {}

    def run(name):
        if name not in found:
            out = tmp_path_factory.mktemp("spread")
            size, words = LAYOUTS[name]
            results = ranks_of(all_ranks, size, "gloo").run(_run, [*DELAYED, *words, "--out", out])
            found[name] = results, json.loads((out / "results.json").read_text())
        return found[name]

    return run


def close(losses, expected, **tolerances):
    for found in losses:
        torch.testing.assert_close(
            torch.tensor(found["train_losses"]),
            torch.tensor(expected["train_losses"]),
            **tolerances,
        )
        torch.testing.assert_close(
            found["validation_loss"], expected["validation_loss"], **tolerances
        )


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_one_process(spread, alone, name):
    """fp32 to the dtype's tolerance; in FP8 values between two codes may go either way."""
    size, words = LAYOUTS[name]
    results, figures = spread(name)
    expected = alone("--fp8-recipe", "delayed")
    assert all(result == results[0] for result in results)
    close([r["fp32"] for r in results], expected["fp32"], **FP32)
    close([r["delayed"] for r in results], expected["delayed"], **FP8)
    assert figures["settings"]["ranks"] == size
    assert results[0]["delayed"]["gemms_per_linear_and_step"] == 3.0
    if "--sequence-parallel" in words:
        assert results[0]["fp32"]["sample"] == ""
    else:
        assert results[0]["fp32"]["sample"] == expected["fp32"]["sample"] != ""


def test_gathers_in_fp8(spread, two_ranks, tmp_path):
    """The same codes and scales as of weights gathered in high precision: the same losses."""
    words = [*DELAYED, "--fsdp", "--fp8-all-gather", "--out", tmp_path]
    for found, expected in zip(two_ranks.run(_run, words), spread("fsdp")[0], strict=True):
        assert found["delayed"]["train_losses"] == expected["delayed"]["train_losses"]


@pytest.mark.parametrize("name", ["ddp", "all"])
def test_resumed_runs_continue(spread, all_ranks, tmp_path, name):
    size, words = LAYOUTS[name]
    ranks = ranks_of(all_ranks, size, "gloo")
    words = [*DELAYED, *words, "--out", tmp_path, "--checkpoint", tmp_path / "kept"]
    ranks.run(_run, [*words, "--stop-at", STOP])
    expected = spread(name)[0][0]
    for precision, result in ranks.run(_run, [*words, "--resume"])[0].items():
        assert result["train_losses"] == expected[precision]["train_losses"][STOP:], precision
        assert result["validation_loss"] == expected[precision]["validation_loss"]


def test_resumed_with_another_number_of_data_parallel_ranks(spread, all_ranks, tmp_path):
    """Half of the ranks, and without FSDP."""
    four, two = (ranks_of(all_ranks, size, "gloo") for size in (4, 2))
    words = [*DELAYED, *LAYOUTS["sp"][1], "--out", tmp_path, "--checkpoint", tmp_path / "kept"]
    four.run(_run, [*words, "--fsdp", "--stop-at", STOP])
    resumed = two.run(_run, [*words, "--resume"])
    whole = spread("all")[0][0]
    for precision, tolerances in (("fp32", FP32), ("delayed", FP8)):
        expected = whole[precision] | {"train_losses": whole[precision]["train_losses"][STOP:]}
        close([r[precision] for r in resumed], expected, **tolerances)


def _error(rank, words):
    """What the program says about switches that do not fit, or the error that it raises."""
    import train

    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            train.main([*TINY, "--device", "cpu", *map(str, words)])
    except SystemExit:
        return said.getvalue()
    except ValueError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "0"], "--tp must be positive, got 0"),
        (["--tp", "3"], "--tp must divide the number of ranks (2), got 3"),
        (["--tp", "2", "--heads", "1"], "--heads must be a multiple of --tp (2), got 1"),
        (["--batch", "3"], "--batch must be a multiple of the data-parallel ranks (2), got 3"),
        (["--sequence-parallel"], "--sequence-parallel needs --tp of at least 2"),
        (
            ["--tp", "2", "--sequence-parallel", "--context", "15"],
            "--context must be a multiple of --tp (2), got 15",
        ),
        (["--fp8-all-gather", "--use-fp8"], "--fp8-all-gather needs --fsdp"),
        (["--fp8-all-gather", "--fsdp"], "--fp8-all-gather needs --use-fp8"),
        (
            ["--fp8-all-gather", "--fsdp", "--use-fp8"],
            "--fp8-all-gather needs an --fp8-recipe other than mxfp8",
        ),
        (["--tp", "2", "--transformer-impl", "local"], "must be transformer_engine with --tp"),
        (["--device", "cuda:0"], "--device must be auto, cpu or cuda with 2 ranks, got cuda:0"),
    ],
)
def test_switches_that_do_not_fit(two_ranks, words, message):
    for said in two_ranks.run(_error, words):
        assert message in said


def test_switches_without_ranks():
    for name in ("--sequence-parallel", "--fsdp", "--fp8-all-gather"):
        assert f"{name} needs torchrun" in _error(0, [name])
    assert "--tp must divide the number of ranks (1), got 2" in _error(0, ["--tp", "2"])


def test_runs_that_cannot_be_resumed(two_ranks, tmp_path):
    words = ["--out", tmp_path, "--checkpoint", tmp_path / "a"]
    two_ranks.run(_run, ["--device", "cpu", *words])
    for said in two_ranks.run(_error, [*words, "--resume", "--seed", "2"]):
        assert "seed must be 1 as in the saved run, got 2" in said
    assert "was saved under torchrun" in _error(0, [*words, "--resume"])
    one = ["--out", tmp_path, "--checkpoint", tmp_path / "b"]
    _run(0, ["--device", "cpu", *one])
    for said in two_ranks.run(_error, [*one, "--resume"]):
        assert "was saved by one process" in said


def _with_own_folder(rank, words, folder):
    return _error(rank, [*words, "--checkpoint", folder / str(rank), "--resume"])


def test_a_folder_that_one_rank_sees(two_ranks, tmp_path):
    words = ["--out", tmp_path]
    two_ranks.run(_run, ["--device", "cpu", *words, "--checkpoint", tmp_path / "1"])
    for said in two_ranks.run(_with_own_folder, words, tmp_path):
        assert "must be in a folder that all 2 ranks see, 1 of them do" in said


def test_under_torchrun(alone, tmp_path):
    """The command of the documentation, from starting processes to the files."""
    words = ["--device", "cpu", "--tp", "2", "--sequence-parallel", "--fsdp", "--out", tmp_path]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    done = captured(
        [*command, "2", str(EXAMPLE / "train.py"), *TINY, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.count("figures:") == 1
    assert "2 ranks: 1 x data, 2 x tensor parallel, sequence parallel, FSDP" in done.stdout
    assert "sample: none" in done.stdout
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    close([result], alone("--fp8-recipe", "delayed")["fp32"], **FP32)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["tp", "sp", "ddp", "fsdp"])
def test_on_gpus(two_gpus, tmp_path, name):
    """bf16, and FP8 in it: sums of two halves are rounded in another place."""
    words = ["--fp8-recipe", "delayed", "--checkpoint", tmp_path / "kept"]
    one = _run(0, ["--device", "cuda", "--fp8-recipe", "delayed", "--out", tmp_path])
    words = ["--device", "cuda", *words, *LAYOUTS[name][1], "--out", tmp_path]
    results = two_gpus.run(_run, words)
    for precision in ("bf16", "delayed"):
        close([r[precision] for r in results], one[precision], rtol=1e-2, atol=0)
