"""examples/grpo: equal log-probabilities of rollout and training, and a reward that rises."""

import pytest
import torch
from example_loader import load

grpo = load("grpo")
SMALL = ["--groups", "2", "--lr", "5e-3"]
FP8 = ["--fp8-recipe", "blockwise"]


@pytest.mark.parametrize(
    ("switches", "steps"),
    [([], 12), (FP8, 3), pytest.param(FP8, 12, marks=pytest.mark.long)],
    ids=["none", "fp8", "fp8 learns"],
)
def test_program(switches, steps, device):
    if switches and device.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("block-scaled GEMMs need sm_90")
    result = grpo.main([*SMALL, "--steps", str(steps), *switches, "--device", device.type])
    assert result["kl"] == 0.0
    # FP8 may round the difference away, and on a GPU few tokens may get the same kernels anyway.
    if device.type == "cpu" and not switches:
        assert result["kl_without"] > 0.0
    rewards = result["rewards"]
    if steps == 12:
        assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1


def test_loss_and_divergence():
    ids = torch.zeros(4, grpo.PROMPT + grpo.NEW, dtype=torch.int64)
    ids[1::2] += 1  # rewards 1 and 0 in each group of two
    log_p = torch.zeros(4, grpo.NEW)
    rollout = grpo.Rollout(ids, log_p)
    assert grpo.loss_of(log_p, rollout, 2).item() == pytest.approx(0.0, abs=1e-6)
    new = log_p.clone()
    new[0], new[1] = 1.0, -1.0  # both beyond the clip: only it counts
    size = 0.5 / (0.5**0.5 + 1e-4)  # of an advantage
    expected = -(1.2 - 0.8 + 1.0 - 1.0) * size / 4
    assert grpo.loss_of(new, rollout, 2).item() == pytest.approx(expected, abs=1e-6)
    assert grpo.divergence(log_p, log_p) == 0.0
    assert grpo.divergence(log_p, log_p + 1e-6) == pytest.approx(5e-13, rel=0.1)
