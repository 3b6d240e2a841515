"""amax_scale_update against its reference and against hand arithmetic."""

import pytest
import torch
from checks import in_pairs

from apex_te.ops import amax_scale_update as op
from apex_te.ops.amax_scale_update import amax_scale_update


def state(length, slots, device):
    history = torch.rand(length, slots, device=device) * 10
    return history, torch.rand(slots, device=device), torch.rand(slots, device=device)


@in_pairs(algo=["max", "most_recent"], pow2=[False, True], margin=[0, 2, -16])
def test_matches_reference(device, algo, pow2, margin):
    sizes = [(1, 3), (2, 2), (3, 1), (4, 3), (16, 2), (1024, 3), (1025, 2), (5000, 5), (1, 1)]
    states = [state(length, slots, device) for length, slots in sizes]
    states[3][0][0, 0] = 0
    states[3][0][0, 1] = float("inf")
    states[3][0][0, 2] = float("nan")
    states[4][0][0, 0] = 1e-45
    states[5][0][0, 0] = 1e-38
    fp8_max = [448.0 if i % 2 else 57344.0 for i in range(len(states))]
    expected = [
        op.reference(h.cpu(), s.cpu(), m, margin=margin, algo=algo, pow2=pow2)
        for (h, s, _), m in zip(states, fp8_max, strict=True)
    ]
    kept = [(s.clone(), si.clone()) for _, s, si in states]
    count = torch.zeros(1, dtype=torch.int32, device=device)
    amax_scale_update(
        [h for h, _, _ in states], [s for _, s, _ in states], [si for _, _, si in states], fp8_max,
        margin=margin, algo=algo, pow2=pow2, nonfinite_count=count,
    )  # fmt: skip
    for (h, s, si), (eh, es), (old, old_inv) in zip(states, expected, kept, strict=True):
        assert torch.equal(h.cpu(), eh)
        assert torch.equal(s.cpu(), es)
        updated = s != old
        assert torch.equal(si, torch.where(updated, 1 / s, old_inv))
    assert count.item() == 2


def test_window_by_hand(device):
    """numerics: L = 4, amaxes 8, 4, 3, 2 use 8 each time; the fifth drops the first."""
    history = torch.zeros(4, 1, device=device)
    scale, inverse = torch.ones(1, device=device), torch.ones(1, device=device)
    used = []
    for amax in (8.0, 4.0, 3.0, 2.0, 1.0, 1.0):
        history[0, 0] = amax
        amax_scale_update([history], [scale], [inverse], [448.0])
        used.append(448.0 / scale.item())
    assert used == pytest.approx([8, 8, 8, 8, 4, 3])
    assert history.flatten().tolist() == [0, 2, 1, 1]


def test_overflowing_scale_is_the_largest_float(device):
    history, scale, inverse = state(1, 1, device)
    history.fill_(1e-45)
    amax_scale_update([history], [scale], [inverse], [57344.0])
    assert scale.item() == torch.finfo(torch.float32).max


@pytest.mark.parametrize("count", [1, 8, 9, 64, 65, 1000, 2300])
def test_many_histories(device, count):
    """The sizes up to which a kernel's table holds the histories, and more than a launch holds."""
    states = [state(4, 2, device) for _ in range(count)]
    expected = [torch.full((2,), 448.0, device=device) / h.amax(0) for h, _, _ in states]
    lists = [[s[i] for s in states] for i in range(3)]
    amax_scale_update(*lists, [448.0] * len(states))
    assert all(torch.equal(s, e) for (_, s, _), e in zip(states, expected, strict=True))


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "slots"), [(1, 65), (4, 64), (300, 130), (3, 3069), (2, 4095)])
def test_many_slots(device, length, slots, algo):
    """The bits of one history for each 50 of the slots."""
    whole = state(length, slots, device)
    whole[0][0, ::7] = 0
    whole[0][0, 3::11] = float("inf")
    parts = [[t.clone() for t in tensor.split(50, -1)] for tensor in whole]
    counts = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
    amax_scale_update(*([t] for t in whole), [448.0], algo=algo, nonfinite_count=counts[0])
    amax_scale_update(*parts, [448.0] * len(parts[0]), algo=algo, nonfinite_count=counts[1])
    for tensor, split in zip(whole, parts, strict=True):
        assert torch.equal(tensor, torch.cat(split, -1))
    assert torch.equal(*counts)


def test_empty_list_is_nothing():
    amax_scale_update([], [], [], [])


def test_rejects():
    h, s, si = state(4, 2, "cpu")
    with pytest.raises(ValueError, match="algo must be 'max' or 'most_recent', got 'mean'"):
        amax_scale_update([h], [s], [si], [448.0], algo="mean")
    wide = state(2, 4096, "cpu")
    with pytest.raises(ValueError, match=r"histories\[0\] must be \[1 to 2\^20 - 1, 1 to 4095\]"):
        amax_scale_update(*([t] for t in wide), [448.0])
    with pytest.raises(ValueError, match="margin must be from -64 to 64, got 99"):
        amax_scale_update([h], [s], [si], [448.0], margin=99)
