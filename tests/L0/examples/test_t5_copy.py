"""examples/t5_copy: data, model and program."""

import argparse

import pytest
import torch
from example_loader import load

t5_copy = load("t5_copy")
SIZES = {"length": 6, "tokens": 8, "layers": 1, "dim": 32, "heads": 2, "batch": 8}
FEW = ["--device", "cpu", "--steps", "3"]
for name, value in SIZES.items():
    FEW += [f"--{name}", str(value)]


def task():
    return t5_copy.Copy(argparse.Namespace(device="cpu", **SIZES))


def test_sequences_end_and_are_padded():
    source, target = task().draw(200, torch.Generator().manual_seed(0))
    lengths = (source != t5_copy.PAD).sum(-1)
    assert (lengths.min(), lengths.max()) == (3, 6)
    assert torch.equal((target != t5_copy.PAD).sum(-1), lengths + 1)
    assert (target.gather(1, lengths[:, None]) == t5_copy.END).all()
    copied = target[:, :-1].where(target[:, :-1] != t5_copy.END, t5_copy.PAD)
    assert torch.equal(copied, source)
    assert source.max() == t5_copy.SPECIAL + 8 - 1


def models():
    data = task()
    made = []
    for te in (False, True):
        torch.manual_seed(5)
        made.append(data.model(te))
    return data, *made


def test_both_kinds_of_model_start_equal():
    data, plain, te = models()
    batch = data.batch(torch.Generator().manual_seed(0))
    real = batch[1] != t5_copy.PAD
    expected, actual = data.logits(plain, batch)[real], data.logits(te, batch)[real]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for model in (plain, te):
        data.loss(model, batch).backward()
    for name in ("tokens.weight", "positions.weight", "norm.bias", "head.weight"):
        expected, actual = plain.get_parameter(name).grad, te.get_parameter(name).grad
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("te", [False, True])
def test_padding_is_hidden_and_the_decoder_is_causal(te):
    data, *made = models()
    model = made[te].eval()
    source, target = data.batch(torch.Generator().manual_seed(0))
    row = (source != t5_copy.PAD).sum(-1).argmin()
    source, target = source[row : row + 1], target[row : row + 1]
    length = int((source != t5_copy.PAD).sum())
    whole = model(source, target)
    shorter = model(source[:, :length], target[:, : length + 1])
    torch.testing.assert_close(whole[:, : length + 1], shorter, rtol=1e-4, atol=1e-5)
    other = target.clone()
    other[:, 2:] = 3
    changed = model(source, other)
    torch.testing.assert_close(changed[:, :2], whole[:, :2])
    assert not torch.allclose(changed[:, 2], whole[:, 2])


def test_program(tmp_path):
    results = t5_copy.main([*FEW, "--use-te", "--use-fp8", "--out", str(tmp_path)])
    # Encoder: qkv, proj, fc1, fc2; decoder: also query, key_value and proj of cross attention.
    assert [r.fp8_products_per_step for r in results] == [0, 0, *[3 * (4 + 7)] * 5]
    baseline, te, *fp8 = results
    assert te.losses == pytest.approx(baseline.losses, rel=1e-3)
    for result in fp8:
        assert result.losses == pytest.approx(baseline.losses, rel=0.05)
        assert result.losses != te.losses


def test_rejects(capsys):
    with pytest.raises(SystemExit):
        t5_copy.main([*FEW, "--heads", "3"])
    assert "--dim must be a multiple of --heads (3), got 32" in capsys.readouterr().err
