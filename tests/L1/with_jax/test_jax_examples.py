"""The programs of examples/jax: they run, learn, and their data is as said."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from programs import captured

pytest.importorskip("jax")
pytest.importorskip("flax.linen")
pytest.importorskip("optax")

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples" / "jax"


def run(name, *words):
    """Runs an example in a process of its own; returns what it prints."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = captured(
        [sys.executable, str(EXAMPLES / name), *words], env={**os.environ, "PYTHONPATH": path}
    )
    return done.stdout


@pytest.fixture
def encoder(monkeypatch):
    """The program examples/jax/encoder.py as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("encoder", "training"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import encoder

    return encoder


def test_quickstart_learns():
    lines = run("quickstart.py").splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert losses[-1] < 0.2 * losses[0]


def test_switch_learns_alike_without_and_with_fp8():
    words = ("--width", "32", "--layers", "1", "--length", "16", "--steps", "20")
    lines = run("switch.py", "--recipe", "tensorwise", *words).splitlines()
    losses = [[float(word) for word in re.findall(r"\d+\.\d{4}", line)] for line in lines]
    assert [line.split(":")[0] for line in lines] == ["float32", "tensorwise"]
    assert all(last < 0.8 * first for first, last in losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)


@pytest.mark.parametrize("words", [(), ("--use-fp8",), ("--use-fp8", "--fp8-recipe", "tensorwise")])
def test_mnist_learns(tmp_path, words):
    pytest.importorskip("sklearn")
    out = tmp_path / "figures" / "mnist.json"
    printed = run("mnist.py", *words, "--max-steps", "30", "--lr", "0.02", "--out", str(out))
    figures = json.loads(out.read_text())
    assert figures["steps"] == len(figures["losses"]) == 30
    assert figures["run"] == (f"fp8 {words[2] if words[2:] else 'delayed'}" if words else "float32")
    assert figures["accuracy"] > 0.3  # of 10 classes
    assert figures["run"] in printed


@pytest.mark.parametrize("words", [(), ("--use-fp8", "--fp8-recipe", "blockwise")])
def test_encoder_runs(tmp_path, words):
    out = tmp_path / "encoder.json"
    sizes = ("--hidden", "32", "--sentences", "512", "--held-out", "256", "--epochs", "2")
    run("encoder.py", *words, *sizes, "--out", str(out))
    losses = json.loads(out.read_text())["losses"]
    assert len(losses) == 16
    assert np.isfinite(losses).all()
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


def test_sentences_are_right_or_wrong_in_one_number(encoder):
    random = np.random.default_rng(0)
    kind_of, number_of = {}, {}
    for kind, table in encoder.VOCABULARY.items():
        for number, words in enumerate(table):
            for word in words:
                kind_of[word] = kind
                number_of[word] = number if len(table) == 2 else None

    def faults(words):
        """Words whose number is not that of the article before, or of the subject."""
        found, subject, article = 0, None, None
        for word in words:
            kind, number = kind_of[word], number_of[word]
            if kind == "article":
                article = number
                subject = number if subject is None else subject
            elif kind in ("noun", "verb"):
                found += number != (article if kind == "noun" else subject)
        return found

    for _ in range(200):
        right = encoder.sentence(random, True)
        assert len(right) <= encoder.LONGEST
        assert faults(right) == 0
        assert faults(encoder.sentence(random, False)) == 1


def test_sentences_held_out_are_not_trained_with(encoder):
    training, held_out = encoder.load(512, 256, 20, 3)
    tokens, mask = held_out.inputs
    assert tokens.shape == (256, 20)
    assert mask.shape == (256, 1, 20, 20)
    assert mask.dtype == np.uint8
    seen = {row.tobytes() for row in training.inputs[0]}
    assert not any(row.tobytes() in seen for row in tokens)
    assert 0.4 < held_out.labels.mean() < 0.6
    length = int((tokens[0] != encoder.PADDING).sum())
    assert not mask[0, 0, :length, :length].any()
    assert mask[0, 0, length:].all()
    assert mask[0, 0, :, length:].all()


def test_bad_arguments_are_refused():
    for words in (["--epochs", "0"], ["--fp8-recipe", "other"], ["--length", "4"]):
        with pytest.raises(AssertionError, match="usage: encoder"):
            run("encoder.py", *words)
