"""examples/digits: data, model and program."""

import json

import pytest
import torch
from example_loader import load

pytest.importorskip("sklearn", reason="scikit-learn is not installed")
digits = load("digits")
FEW = ["--device", "cpu", "--steps", "4", "--batch", "16", "--width", "32"]


def test_data():
    images, labels = digits.load()
    assert images.shape == (1797, 64)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert labels.bincount().numel() == 10


def test_program(tmp_path, capsys):
    results = digits.main([*FEW, "--use-te", "--use-fp8", "--out", str(tmp_path)])
    assert [r.fp8_products_per_step for r in results] == [0, 0, 8, 8, 8, 8, 8]
    baseline, te, *fp8 = results
    assert te.losses == pytest.approx(baseline.losses, rel=1e-4)
    for result in fp8:
        assert result.losses == pytest.approx(baseline.losses, rel=0.1)
        assert result.losses != baseline.losses
    assert "held-out accuracy" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "results.json").read_text())["results"]) == 7


def test_it_learns(tmp_path):
    (result,) = digits.main(
        ["--device", "cpu", "--steps", "80", "--width", "64", "--out", str(tmp_path)]
    )
    assert result.measure > 0.9


def test_held_out_images_are_not_trained_on():
    import argparse

    task = digits.Digits(argparse.Namespace(device="cpu", batch=4, width=8))
    assert len(task.images) + len(task.held_out[0]) == 1797
    everything = torch.cat([task.images, task.held_out[0]])
    assert torch.equal(everything.sum(0).round(), digits.load()[0].sum(0).round())
