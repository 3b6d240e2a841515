"""Whole runs of examples/pretrain: recipes, kills, ranks, compiled blocks; on a GPU graphs, too."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from programs import captured

pytest.importorskip("tokenizers")
topics = pytest.importorskip("pydoc_data.topics").topics

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "pretrain"
STEPS = 8
RECIPES = ("bf16", "delayed", "tensorwise", "blockwise", "mxfp8", "hif8")
TINY = [
    *("--model", "tiny", "--context", "64", "--vocabulary", "512", "--batch", "4"),
    *("--steps", str(STEPS), "--eval-tokens", "1024", "--sample", "4", "--no-tensorboard"),
]
FP32 = {"rtol": 1e-5, "atol": 1e-5}
FP8 = {"rtol": 1e-3, "atol": 0}  # a sum in another order may round a value to another FP8 number


def program(name, *words, ranks=1):
    """Runs a program of the example and returns its output."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = captured(
        [*command, str(EXAMPLE / name), *map(str, words)],
        timeout=600,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    return done.stdout


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Tokens of Python's manual, in pieces of 2,000 characters.

    This project's own texts would change the losses with every edit of a page.
    """
    text = "".join(topics.values())
    texts = tmp_path_factory.mktemp("texts")
    for begin in range(0, len(text), 2000):
        (texts / f"{begin}.txt").write_text(text[begin : begin + 2000])
    options = ["--data", texts, "--vocabulary", "512"]
    cache = tmp_path_factory.mktemp("tokens")
    return program("prepare.py", *options, "--token-cache", cache).splitlines()[-1]


@pytest.fixture
def run(tokens, tmp_path):
    """Runs train.py; returns its events, and of steps the losses and norms."""

    def start(*words, out="run", device="cpu", ranks=1):
        words = [*TINY, "--tokens", tokens, "--device", device, *words, "--out", tmp_path / out]
        program("train.py", *words, ranks=ranks)
        log = (tmp_path / out / "log.jsonl").read_text()
        events = [json.loads(line) for line in log.splitlines()]
        steps = [event for event in events if event["kind"] == "step"]
        return events, [(event["step"], event["loss"], event["grad_norm"]) for event in steps]

    return start


def only(events, kind):
    return [event for event in events if event["kind"] == kind]


def learns_and_resumes(run, *words, device="cpu"):
    events, losses = run(*words, device=device)
    assert losses[-1][1] < losses[0][1] - 0.1
    assert only(events, "end")[0]["held_out_loss"] < losses[0][1] - 0.1
    saving = ["--save-every", "2", *words]
    run(*saving, "--stop-at", "5", out="parted", device=device)
    resumed, again = run(*saving, "--resume", out="parted", device=device)
    assert only(resumed, "start")[-1]["after"] == 5
    assert again == losses
    return events, losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_learns_and_resumes(run, recipe):
    events, _ = learns_and_resumes(
        run, "--recipe", recipe, "--health-every", "4", "--microbatch", "2"
    )
    health = only(events, "health")
    assert [event["step"] for event in health] == ([] if recipe == "bf16" else [4, 8])
    for event in health:
        assert event["nonfinite"] == 0
        assert event["saturation"] < 0.05


@pytest.mark.parametrize(
    "words",
    [
        ["--fp8-params", "--recipe", "delayed"],
        ["--fp8-params", "--recipe", "blockwise"],
        ["--packed", "--recipe", "delayed", "--keep-columnwise-weights"],
        ["--save-small", "--recipe", "blockwise", "--recompute", "2"],
        ["--fp8-head", "--recipe", "tensorwise"],
        ["--main-grads", "--microbatch", "2", "--recipe", "delayed"],
        ["--dtype", "bfloat16", "--main-grads", "--microbatch", "2", "--recipe", "tensorwise"],
    ],
    ids=" ".join,
)
def test_each_option_learns_and_resumes(run, words):
    learns_and_resumes(run, *words)


def test_recomputed_blocks_have_the_same_losses(run):
    words = ["--recipe", "delayed", "--microbatch", "2"]
    _, expected = run(*words)
    assert run(*words, "--recompute", "1", out="recomputed")[1] == expected
    assert run(*words, "--recompute", "2", out="half")[1] == expected


def test_recipes_see_the_same_batches(run):
    """The first loss, before any step, differs by rounding alone; so do plain layers'."""
    _, expected = run("--recipe", "bf16")
    for words in (["--recipe", "delayed"], ["--recipe", "blockwise"], ["--layers", "torch"]):
        _, losses = run(*words, out=words[-1])
        assert losses[0][1] == pytest.approx(expected[0][1], rel=1e-3)
        assert losses[-1][1] == pytest.approx(expected[-1][1], rel=1e-2)


def kills(tokens, tmp_path, *words, steps):
    said = program(
        "kills.py", "--kills", "10", "--folder", tmp_path / "kills", "--", *TINY,
        "--tokens", tokens, "--steps", steps, "--save-every", "4", "--eval-tokens", "0",
        "--sample", "0", *words,
    )  # fmt: skip
    assert "10 of 10 kills" in said
    assert f"{steps} of {steps} steps logged, 0 figures differ" in said


@pytest.mark.parametrize("words", [[], ["--recipe", "delayed", "--microbatch", "2"]], ids=str)
def test_a_run_killed_ten_times_goes_on_to_the_bit(tokens, tmp_path, words):
    kills(tokens, tmp_path, "--device", "cpu", *words, steps=60)


@pytest.mark.parametrize("words", [[], ["--tp", "2"]], ids=["fsdp", "tp"])
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "delayed"])
def test_two_ranks_train_as_one(run, recipe, words):
    """Two ranks lose as one does: to rounding if their scales are equal, else as FP8 rounds.

    Delayed scaling's first scales are each rank's own, and so are those of split weights. A loss of
    more tokens averages over more values that are rounded otherwise.
    """
    options = ["--recipe", recipe, "--batch", "16", "--microbatch", "8"]
    events, expected = run(*options)
    found, losses = run(*options, *words, out="ranks", ranks=2)
    if recipe == "bf16" or (recipe == "tensorwise" and not words):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **FP32)
    else:
        losses, expected = ([loss for _, loss, _ in steps] for steps in (losses, expected))
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **FP8)
    ends = [only(some, "end")[0]["held_out_loss"] for some in (found, events)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
    parameters = [only(some, "start")[0]["parameters"] for some in (found, events)]
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["--microbatch", "1"], 4),
        (["--packed", "--recompute", "1", "--tp", "2"], 4),
        (["--packed", "--recipe", "delayed"], 2),
        (["--recipe", "blockwise", "--tp", "2"], 4),
        (["--experts", "4", "--microbatch", "2"], 2),
        (["--experts", "4", "--packed", "--recipe", "blockwise"], 2),
    ],
    ids=str,
)
def test_ranks_split_sequences(run, words, ranks):
    """Losses, norms and the held-out loss are those of one rank, to rounding; so is the sample."""
    events, expected = run(*words[: words.index("--tp")] if "--tp" in words else words)
    found, losses = run(*words, "--cp", "2", out="ranks", ranks=ranks)
    fp8 = "--recipe" in words
    if fp8:
        losses, expected = ([loss for _, loss, _ in steps] for steps in (losses, expected))
    tolerance = FP8 if fp8 else FP32
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **tolerance)
    ends = [only(some, "end")[0]["held_out_loss"] for some in (found, events)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3 if fp8 else 1e-5)
    texts = [only(some, "sample")[0]["text"] for some in (found, events)]
    assert fp8 or texts[0] == texts[1]


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("words", [[], ["--packed", "--recipe", "delayed"]], ids=str)
def test_gpus_split_sequences(run, words):
    """A part of a sequence rounds otherwise in bf16."""
    _, expected = run(*words, device="cuda")
    _, losses = run(*words, "--cp", "2", out="ranks", device="cuda", ranks=2)
    losses, expected = ([loss for _, loss, _ in steps] for steps in (losses, expected))
    assert losses == pytest.approx(expected, rel=1e-2)


def test_two_ranks_start_weights_in_fp8_as_one(run):
    """Master weights of shards begin with the values that were drawn, not with the FP8 ones."""
    words = ["--recipe", "mxfp8", "--fp8-params", "--microbatch", "2"]
    _, expected = run(*words)
    _, losses = run(*words, out="ranks", ranks=2)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **FP32)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--tp", "2", "--main-grads"],
        ["--fp8-all-gather"],
        ["--recompute", "1"],
        ["--fp8-params"],
    ],
    ids=lambda words: " ".join(words) or "fsdp",
)
def test_two_ranks_resume_to_the_bit(run, words):
    words = ["--recipe", "delayed", *words]
    _, expected = run(*words, ranks=2)
    run(*words, "--save-every", "3", "--stop-at", "4", out="parted", ranks=2)
    assert run(*words, "--save-every", "3", "--resume", out="parted", ranks=2)[1] == expected


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_two_ranks_branch_from_another_run(run, tmp_path, recipe):
    words = ["--recipe", recipe, "--save-every", "4"]
    _, whole = run(*words, ranks=2)
    run(*words, "--stop-at", "4", out="base", ranks=2)
    words = ["--branch-from", tmp_path / "base"]
    for other in ("bf16", "delayed", "blockwise"):
        _, losses = run(*words, "--recipe", other, out=other, ranks=2)
        if other == recipe:
            assert losses == whole[4:]
        else:
            assert losses != whole[4:]
            torch.testing.assert_close(losses[0][1], whole[4][1], rtol=2e-3, atol=0)


def test_recipes_are_compared(tokens, tmp_path):
    words = ["--recipes", "bf16", "delayed", "--seeds", "1", "2", "--out", tmp_path]
    printed = program("compare.py", *words, "--per-device", "2", "--", *TINY, "--tokens", tokens)
    assert [line.split()[0] for line in printed.splitlines()[-2:]] == ["bf16", "delayed"]
    assert printed.count(": ended (") == 4
    assert "FAILED" not in printed
    again = program("compare.py", *words, "--", *TINY, "--tokens", tokens)
    assert again.splitlines()[-3:] == printed.splitlines()[-3:]
    assert "ended" not in again
    whole = (tmp_path / "delayed-2" / "output.txt").read_text()
    assert f"step {STEPS}/{STEPS}: loss" in whole


def test_fsdp_and_tensor_parallelism_together(run):
    _, expected = run("--recipe", "bf16")
    _, losses = run("--recipe", "bf16", "--tp", "2", out="both", ranks=4)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **FP32)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["--recipe", "delayed"], 1),
        (["--layers", "torch"], 1),
        (["--recipe", "delayed", "--cp", "2"], 2),
        (["--packed", "--cp", "2"], 2),
    ],
    ids=["apex_te", "torch", "split", "split and packed"],
)
def test_compiled_blocks_train_alike(run, words, ranks):
    _, expected = run(*words, ranks=ranks)
    _, losses = run(*words, "--compile", out="compiled", ranks=ranks)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **FP8)


def test_layers_of_torchao_learn(run):
    pytest.importorskip("torchao")
    _, losses = run("--layers", "torchao", "--recipe", "tensorwise")
    assert losses[-1][1] < losses[0][1] - 0.1


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_on_a_gpu(run, recipe):
    learns_and_resumes(run, "--recipe", recipe, "--deterministic", device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "blockwise"])
def test_graphs_train_as_eager_blocks(run, recipe):
    words = ["--recipe", recipe, "--deterministic", "--health-every", "0", "--microbatch", "2"]
    _, expected = run(*words, device="cuda")
    assert run(*words, "--graphs", out="graphs", device="cuda")[1] == expected


@pytest.mark.cuda
def test_a_run_on_a_gpu_killed_ten_times_goes_on_to_the_bit(tokens, tmp_path):
    words = ["--device", "cuda", "--deterministic", "--recipe", "delayed"]
    kills(tokens, tmp_path, *words, steps=200)
