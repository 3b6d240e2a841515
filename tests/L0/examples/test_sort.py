"""examples/sort: data, model and program."""

import argparse

import pytest
import torch
from example_loader import load

sort = load("sort")
SIZES = {"length": 5, "digits": 6, "layers": 2, "dim": 32, "heads": 2, "batch": 16}
FEW = ["--device", "cpu", "--steps", "3"]
for name, value in SIZES.items():
    FEW += [f"--{name}", str(value)]


def task(**changes):
    return sort.Sort(argparse.Namespace(**{"device": "cpu", "ln_mlp": False, **SIZES, **changes}))


@pytest.mark.parametrize("count", [2, 5, 6])
def test_batches_and_held_out_sequences_are_disjoint(count):
    data = task(digits=count)
    assert sort.is_held_out(data.held_out).all()
    generator = torch.Generator().manual_seed(1)
    batch = torch.cat([data.batch(generator)[0] for _ in range(20)])
    assert not sort.is_held_out(batch).any()
    assert (batch.min(), batch.max()) == (0, count - 1)


def test_predictions_are_of_the_sorted_half_and_causal():
    data = task()
    model = data.model(te=False).eval()
    digits = torch.tensor([[3, 1, 2, 5, 0]])
    logits, target = data.predicted(model, digits)
    assert logits.shape == (1, 5, 6)
    assert target.tolist() == [[0, 1, 2, 3, 5]]
    fewer = model(torch.cat([digits, target[:, :2]], 1))
    torch.testing.assert_close(logits[:, :3], fewer[:, 4:])


def test_greedy_decoding_agrees_with_the_measure():
    data = task()
    torch.manual_seed(0)
    model = data.model(te=False).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)  # an untrained model, but not an undecided one
    ids = data.held_out[:64]
    for _ in range(5):
        ids = torch.cat([ids, model(ids[:, :9])[:, -1:].argmax(-1)], 1)
    right = (ids[:, 5:] == data.held_out[:64].sort(-1).values).all(-1)
    logits, target = data.predicted(model, data.held_out[:64])
    assert torch.equal((logits.argmax(-1) == target).all(-1), right)


def test_all_kinds_of_model_start_equal():
    outputs = []
    for te, ln_mlp in ((False, False), (True, False), (True, True)):
        torch.manual_seed(3)
        data = task(ln_mlp=ln_mlp)
        outputs.append(data.model(te)(data.held_out[:4]))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


@pytest.mark.cover(0)
@pytest.mark.parametrize("ln_mlp", [True, False])
def test_program(ln_mlp, tmp_path):
    switches = ["--ln-mlp"] if ln_mlp else []
    results = sort.main([*FEW, *switches, "--use-te", "--use-fp8", "--out", str(tmp_path)])
    assert [r.fp8_products_per_step for r in results] == [0, 0, *[3 * 4 * 2] * 5]
    baseline, te, *fp8 = results
    assert te.losses == pytest.approx(baseline.losses, rel=1e-4)
    for result in fp8:
        assert result.losses == pytest.approx(baseline.losses, rel=0.05)
        assert result.losses != te.losses


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--ln-mlp"], "--ln-mlp needs --use-te"), (["--heads", "5"], "--dim must be a multiple")],
)
def test_rejects(words, message, capsys):
    with pytest.raises(SystemExit):
        sort.main([*FEW, *words])
    assert message in capsys.readouterr().err
