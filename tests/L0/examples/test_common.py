"""Parts that the examples share: switches, the runs they ask for, the table."""

import argparse
import json

import pytest
import torch
from example_loader import common as load_common

from apex_te.autocast import get_fp8_recipe, is_fp8_enabled
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, Format, MXFP8Scaling

common = load_common()


def parse(*words):
    parser = common.add_arguments(argparse.ArgumentParser(), steps=30, lr=1e-3, name="x")
    return common.parse(parser, ["--device", "cpu", *words])


def labels(*words):
    return [run.label for run in parse(*words).runs]


def test_runs():
    assert labels() == ["fp32"]
    assert labels("--use-te") == ["fp32", "fp32, apex_te"]
    every = ["delayed", "tensorwise", "blockwise", "mxfp8", "tensorwise hif8"]
    assert labels("--use-fp8") == ["fp32", *every]
    assert labels("--use-te", "--use-fp8") == ["fp32", "fp32, apex_te", *every]
    assert labels("--use-fp8", "--fp8-recipe", "mxfp8") == ["fp32", "mxfp8"]
    assert labels("--fp8-format", "e4m3") == ["fp32", "delayed e4m3"]
    assert labels("--device", "cuda:1") == ["bf16"]
    args = parse("--use-fp8")
    assert [run.te for run in args.runs] == [False] + [True] * 5
    assert [run.recipe for run in args.runs] == [
        None,
        DelayedScaling(amax_history_len=16),
        CurrentScaling(),
        BlockScaling(),
        MXFP8Scaling(),
        CurrentScaling(fp8_format=Format.HIF8),
    ]
    assert (args.steps, args.eval_every, str(args.out)) == (30, 3, "build/x")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--eval-every", "-1"], "--eval-every must be positive, got -1"),
        (["--transformer-impl", "local", "--use-te"], "with --use-te, got local"),
        (["--transformer-impl", "local", "--use-fp8"], "with --use-fp8, got local"),
        (["--transformer-impl", "local", "--fp8-format", "e4m3"], "with --fp8-format e4m3"),
        (["--fp8-format", "hif8"], "--fp8-recipe must be tensorwise with --fp8-format hif8"),
    ],
)
def test_switches_that_do_not_fit(words, message, capsys):
    with pytest.raises(SystemExit):
        parse(*words)
    assert message in capsys.readouterr().err


def test_precision():
    fp32, fp8 = parse("--fp8-recipe", "mxfp8").runs
    with common.precision(fp32, "cpu"):
        assert not is_fp8_enabled()
        assert not torch.is_autocast_enabled("cpu")
    with common.precision(fp8, "cpu"):
        assert is_fp8_enabled()
        assert get_fp8_recipe() == MXFP8Scaling()
        assert not torch.is_autocast_enabled("cpu")


def test_learning_rate():
    rates = [common.learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_table_and_files(tmp_path):
    results = [
        common.Result("fp32", 0.5, [4.0] * 19 + [2.0], [(10, 0.25), (20, 0.5)], 1.0),
        common.Result("delayed", 0.75, [1.0] * 20, [(20, 0.75)], 2.0, 12.0),
    ]
    lines = common.table(results, "share").splitlines()
    assert lines[0].split()[:2] == ["loss", "share"]
    assert lines[2].split() == ["fp32", "3.0000", "0.5000", "0", "1.0"]
    assert lines[3].split() == ["delayed", "1.0000", "0.7500", "12", "2.0"]
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert common.picture(results, "share", tmp_path / "loss.png").stat().st_size > 1000


class Line:
    """Fits a straight line: enough to see what the loop does."""

    measure = "fit"

    def __init__(self):
        self.modes = []

    def model(self, te):
        return torch.nn.Linear(1, 1)

    def batch(self, generator):
        x = torch.rand(8, 1, generator=generator)
        return x, 2 * x + 1

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def evaluate(self, model):
        self.modes.append((model.training, torch.is_grad_enabled()))
        return -(model.weight - 2).abs().item()


def test_training_repeats_and_improves(tmp_path):
    task = Line()
    args = parse("--use-te", "--lr", "0.5", "--out", str(tmp_path / "out"))
    first, second = common.compare(task, args)
    assert first.losses == second.losses  # the same start and batches
    assert len(first.losses) == 30
    assert first.losses[-1] < 0.2 * first.losses[0]
    assert [step for step, _ in first.measures] == list(range(3, 31, 3))
    assert set(task.modes) == {(False, False)}
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [r["label"] for r in written["results"]] == ["fp32", "fp32, apex_te"]
    assert written["settings"]["lr"] == 0.5
    other = common.train(args.runs[0], task, parse("--seed", "2", "--lr", "0.5"))
    assert other.losses != first.losses
