"""Mistakes in the command line of examples/pretrain end in one line that says what to change."""

import sys
from typing import NamedTuple

import pytest
from example_loader import parts

pretrain = parts("pretrain", "train", "user_error")
user_error = pretrain.user_error
OPTIONS = (
    "--model", "tiny", "--steps", "2", "--vocabulary", "300", "--context", "64", "--batch", "4",
    "--eval-tokens", "0", "--sample", "0", "--device", "cpu", "--no-tensorboard",
)  # fmt: skip


class Mistake(NamedTuple):
    """Words of a command line, words of its error, and if it needs tokens to get that far."""

    options: tuple
    words: tuple
    tokens: bool = False


MISTAKES = {
    "data that is not there": Mistake(("--data", "nowhere"), ("--data", "exist", "nowhere")),
    "data without text": Mistake(("--data", "empty"), ("--data must hold text", "empty")),
    "tokens that are not there": Mistake(
        ("--tokens", "nowhere"), ("nowhere", "a folder that prepare.py has written")
    ),
    "small vocabulary": Mistake(
        ("--data", "texts", "--vocabulary", "100"), ("--vocabulary", "at least 257", "100")
    ),
    "token cache that is a file": Mistake(
        ("--data", "texts", "--token-cache", "texts/0.py"), ("--token-cache", "be written", "0.py")
    ),
    "unknown model": Mistake(("--model", "125m"), ("--model", "'125m'", "124m")),
    "tokens as text": Mistake(
        ("--max-tokens", "many"), ("--max-tokens", "'many'", "invalid count value")
    ),
    "ranks without torchrun": Mistake(
        ("--tp", "2"), ("--tp", "(1), got 2", "torchrun --nproc_per_node 2")
    ),
    "split sequences without torchrun": Mistake(
        ("--cp", "2"), ("--tp x --cp", "(1), got 2", "torchrun --nproc_per_node 2")
    ),
    "context that cannot be split": Mistake(("--cp", "3"), ("--context", "multiple of", "6, got")),
    "split sequences of plain layers": Mistake(
        ("--cp", "2", "--layers", "torch"), ("--cp of at least 2 needs --layers apex_te",)
    ),
    "batch that does not divide": Mistake(
        ("--microbatch", "3"), ("--microbatch must divide the 4", "got 3")
    ),
    "more of the experts than there are": Mistake(
        ("--experts", "4", "--top-k", "5"), ("--top-k must be at most the 4", "got 5")
    ),
    "experts of nothing": Mistake(("--top-k", "2"), ("--top-k needs --experts", "got 2")),
    "experts of plain layers": Mistake(
        ("--experts", "4", "--layers", "torch"), ("--experts needs --layers apex_te", "torch")
    ),
    "experts held in FP8": Mistake(
        ("--experts", "4", "--fp8-params", "--recipe", "delayed"), ("--experts excludes --tp",)
    ),
    "unknown device": Mistake(("--device", "gpu"), ("--device must be auto, cpu or cuda", "gpu")),
    "too long context": Mistake(
        ("--context", "100000000"), ("context + 1", "smaller --context or more --data"), True
    ),
    "output that is a file": Mistake(
        ("--out", "texts/0.py"), ("--out", "be written", "0.py"), True
    ),
    "branch from a folder without checkpoints": Mistake(
        ("--branch-from", "empty"), ("--branch-from", "with checkpoints", "empty"), True
    ),
    "wandb that is not installed": Mistake(
        ("--wandb", "project"), ("--wandb needs wandb", "pip install wandb"), True
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with texts, a folder without, and a wandb that cannot be imported."""
    made = tmp_path_factory.mktemp("pretrain")
    for name in ("texts", "empty", "modules"):
        (made / name).mkdir()
    for i in range(40):
        (made / "texts" / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    (made / "modules" / "wandb.py").write_text("raise ImportError('not here')\n")
    return made


@pytest.fixture
def run(folder, monkeypatch, capfd):
    """Runs train.py with options in that folder; returns status, output and errors."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)

    def call(*options):
        status = 0
        try:
            user_error.run(lambda: pretrain.train.main([*OPTIONS, *options]))
        except SystemExit as end:
            status = end.code
        return status, *capfd.readouterr()

    return call


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_ends_in_one_line_that_says_what_to_change(run, name):
    pytest.importorskip("tokenizers")
    options, words, needs_tokens = MISTAKES[name]
    status, _, errors = run(*(("--data", "texts") if needs_tokens else ()), *options)
    assert status == 2, errors
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert ": error: " in last
    assert all(word in last for word in words), last


def test_resume_from_an_empty_folder_says_where_it_begins(run):
    pytest.importorskip("tokenizers")
    status, out, errors = run("--data", "texts", "--resume", "--out", "empty-run", "--context", "8")
    assert status == 0, errors
    assert "--resume: empty-run has no checkpoint yet, so training begins at step 0" in out


def test_library_that_is_not_installed_is_named_with_the_line_for_pip():
    with pytest.raises(user_error.UserError, match=r"plot\.py needs no_lib: pip install no_lib"):
        user_error.needs("no_lib.part", "plot.py")


def test_error_of_the_program_keeps_its_traceback():
    def fails():
        raise ValueError("own text")

    with pytest.raises(ValueError, match=r"^own text$"):
        user_error.run(fails)
