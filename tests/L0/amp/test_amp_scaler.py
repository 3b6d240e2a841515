"""The loss scaler against the algorithm in plain Python, and amp's state dict."""

import io

import pytest
import torch
from amp_models import make_net, scaler
from checks import needs_cuda

from apex_te import amp
from apex_te.amp import LossScaler


class Reference:
    """apex's algorithm, with a count of overflows in a row before the scale is halved."""

    def __init__(self, window, floor, cap, hysteresis):
        self.window, self.floor, self.cap, self.hysteresis = window, floor, cap, hysteresis
        self.scale, self.unskipped, self.left, self.skipped = 2.0**16, 0, hysteresis, 0

    def update(self, overflow):
        if overflow:
            self.left -= 1
            self.unskipped = 0
            self.skipped += 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, self.floor)
            return
        self.left = self.hysteresis
        self.unskipped += 1
        if self.unskipped == self.window:
            self.scale = min(self.scale * 2, self.cap)
            self.unskipped = 0


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize(("floor", "cap"), [(2.0**14, 2.0**18), (2.0**-24, 2.0**24)])
def test_follows_the_algorithm(device, hysteresis, floor, cap):
    ours = LossScaler(
        scale_window=3, min_loss_scale=floor, max_loss_scale=cap, hysteresis=hysteresis
    )
    ours.scale(torch.ones((), device=device))
    reference = Reference(3, floor, cap, hysteresis)
    pattern = torch.rand(120, generator=torch.Generator().manual_seed(hysteresis))
    flags = [*(pattern < 0.3).tolist(), *[True] * 40, *[False] * 60, *(pattern < 0.6).tolist()]
    seen = set()
    for flag in flags:
        ours.update(torch.tensor([2.0 * flag], device=device))
        reference.update(flag)
        assert ours.loss_scale() == reference.scale
        seen.add(reference.scale)
    assert ours.state_dict() == {
        "loss_scale": reference.scale,
        "unskipped": reference.unskipped,
        "hysteresis": max(reference.left, -40) if reference.left > 0 else reference.left,
        "skipped": reference.skipped,
    }
    assert min(seen) == max(floor, min(seen))
    assert (2.0**14 in seen) or hysteresis > 2
    if floor == 2.0**14:
        assert {floor, cap} <= seen


def test_defaults_and_limits():
    fresh = LossScaler()
    assert fresh.state_dict() == {
        "loss_scale": 65536.0, "unskipped": 0, "hysteresis": 1, "skipped": 0
    }  # fmt: skip
    for _ in range(1999):
        fresh.update(torch.zeros(()))
    assert fresh.loss_scale() == 2.0**16
    fresh.update(torch.zeros(()))
    assert fresh.loss_scale() == 2.0**17
    for _ in range(60):
        fresh.update(torch.ones(()))
    assert fresh.loss_scale() == 2.0**-24
    assert LossScaler(max_loss_scale=2.0**10).loss_scale() == 2.0**10
    assert LossScaler(min_loss_scale=2.0**20).loss_scale() == 2.0**20
    fixed = LossScaler(128.0)
    fixed.update(torch.ones(()))
    assert fixed.loss_scale() == 128.0
    assert fixed.scale(torch.tensor(2.0, dtype=torch.float16)).item() == 256.0
    assert fixed.scale(torch.tensor(2.0, dtype=torch.float16)).dtype is torch.float32


def test_a_held_flag_counts_at_the_next_update():
    ours = LossScaler()
    ours.hold(torch.ones(()))
    ours.hold(torch.zeros(()))
    assert ours.loss_scale() == 2.0**16
    ours.update(torch.zeros(()))
    assert (ours.loss_scale(), ours.skipped()) == (2.0**15, 1)
    ours.update(torch.zeros(()))
    assert (ours.loss_scale(), ours.skipped()) == (2.0**15, 1)


def test_state_dict_round_trip():
    amp.initialize(make_net(), opt_level="O1", num_losses=2, verbosity=0, hysteresis=3)
    for flag in (0.0, 1.0, 1.0):
        scaler(1).update(torch.tensor(flag))
    saved = io.BytesIO()
    torch.save(amp.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    assert state["loss_scaler1"] == {
        "loss_scale": 65536.0, "unskipped": 0, "hysteresis": 1, "skipped": 2
    }  # fmt: skip
    amp.initialize(make_net(), opt_level="O1", num_losses=2, verbosity=0, hysteresis=3)
    address = scaler(1)._scale.data_ptr()
    amp.load_state_dict(state)
    assert amp.state_dict() == state
    assert scaler(1)._scale.data_ptr() == address
    scaler(1).update(torch.tensor(1.0))
    assert scaler(1).loss_scale() == 2.0**15


def test_loading_tolerates_another_count_and_apex_state(capsys):
    amp.initialize(make_net(), opt_level="O1", num_losses=2, verbosity=0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 7}})
    assert "state_dict has 1 loss scalers, num_losses is 2; the first 1 are" in (
        capsys.readouterr().out
    )
    assert scaler(0).state_dict() == {
        "loss_scale": 4.0, "unskipped": 7, "hysteresis": 1, "skipped": 0
    }  # fmt: skip
    assert scaler(1).loss_scale() == 2.0**16
    amp.load_state_dict({f"loss_scaler{i}": amp.state_dict()["loss_scaler0"] for i in range(3)})
    assert "has 3 loss scalers, num_losses is 2; the first 2 are" in capsys.readouterr().out
    amp.load_state_dict(amp.state_dict())
    assert not capsys.readouterr().out


def test_rejects():
    with pytest.raises(RuntimeError, match="initialize must be called before"):
        amp.state_dict()
    amp.initialize(make_net(), opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match="unexpected keys optimizer"):
        amp.load_state_dict({**amp.state_dict(), "optimizer": {}})
    good = amp.state_dict()["loss_scaler0"]
    with pytest.raises(RuntimeError, match="must have loss_scale and unskipped"):
        amp.load_state_dict({"loss_scaler0": {"scale": 1.0}})
    with pytest.raises(ValueError, match="loss_scale must be above 0 and finite, got 0"):
        amp.load_state_dict({"loss_scaler0": {**good, "loss_scale": 0.0}})
    for arguments, error, message in (
        ({"loss_scale": "static"}, ValueError, "must be \"dynamic\" or above 0, got 'static'"),
        ({"loss_scale": 0.0}, ValueError, 'loss_scale must be "dynamic" or above 0, got 0.0'),
        ({"scale_window": 0}, ValueError, "scale_window must be at least 1, got 0"),
        ({"scale_window": 2.0}, TypeError, "scale_window must be an int, got float"),
        ({"hysteresis": 0}, ValueError, "hysteresis must be at least 1, got 0"),
        ({"min_loss_scale": 0.0}, ValueError, "min_loss_scale must be above 0 and at most"),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, ValueError, "at most max_loss_scale 4.0"),
    ):
        with pytest.raises(error) as raised:
            LossScaler(**arguments)
        assert message in str(raised.value)


@needs_cuda
@pytest.mark.cuda
def test_updates_without_waiting_and_in_a_graph():
    ours, other = LossScaler(scale_window=2), LossScaler(scale_window=2)
    flag = torch.zeros((), device="cuda")
    loss = torch.ones((), device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        ours.scale(loss)
        ours.update(flag)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    other.scale(loss)
    other.update(flag)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled = ours.scale(loss)
        ours.update(flag)
    for value in (0, 0, 1, 0, 0, 0, 1, 1):
        flag.fill_(float(value))
        expected = other.scale(loss)
        other.update(flag)
        graph.replay()
        assert scaled.item() == expected.item()
    assert ours.state_dict() == other.state_dict()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"unskipped": "many"}, TypeError, "LossScaler: unskipped must be a number, got str"),
        ({"skipped": True}, TypeError, "LossScaler: skipped must be a number, got bool"),
        ({"unskipped": -1}, ValueError, "LossScaler: unskipped must be a count, got -1"),
        ({"hysteresis": float("nan")}, ValueError, "LossScaler: hysteresis must be a count"),
        ({"loss_scale": 1e39}, ValueError, "loss_scale must be above 0 and finite, got 1e"),
        ({"loss_scale": None}, TypeError, "loss_scale must be a number, got NoneType"),
        ({"more": 1}, RuntimeError, "must have loss_scale and unskipped"),
    ],
)
def test_a_refused_state_changes_no_scaler(wrong, error, message):
    """Nor those before the one that is wrong."""
    amp.initialize(make_net(), opt_level="O1", num_losses=2, verbosity=0)
    before = amp.state_dict()
    state = {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 7}}
    state["loss_scaler1"] = {"loss_scale": 8.0, "unskipped": 1, **wrong}
    with pytest.raises(error, match=message):
        amp.load_state_dict(state)
    assert amp.state_dict() == before
    with pytest.raises(TypeError, match="state_dict must be a dict, got int"):
        amp.load_state_dict({"loss_scaler0": state["loss_scaler0"], "loss_scaler1": 3})
    assert amp.state_dict() == before
