"""CudaRNGStatesTracker: sequences of their own that leave the default one alone."""

import pytest
import torch

from apex_te.distributed import CudaRNGStatesTracker


@pytest.fixture
def draw(device):
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("the tracker follows the GPU's generator where there is one")
    return lambda: torch.rand(4, device=device)


def test_fork_has_its_own_sequence(draw):
    tracker = CudaRNGStatesTracker()
    torch.manual_seed(7)
    expected = draw()
    torch.manual_seed(3)
    plain = [draw(), draw()]
    torch.manual_seed(3)
    tracker.add("model-parallel-rng", 7)
    first = draw()
    with tracker.fork():
        assert torch.equal(draw(), expected)
        second = draw()
    assert torch.equal(first, plain[0])
    assert torch.equal(draw(), plain[1])
    with tracker.fork("model-parallel-rng"):
        third = draw()
    assert not torch.equal(second, third)
    torch.manual_seed(7)
    assert torch.equal(torch.stack([draw(), draw(), draw()])[1:], torch.stack([second, third]))


def test_states_can_be_saved_and_put_back(draw):
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    states = tracker.get_states()
    assert sorted(states) == ["a", "b"]
    with tracker.fork("a"):
        expected = draw()
    other = CudaRNGStatesTracker()
    other.set_states(states)
    with other.fork("a"):
        assert torch.equal(draw(), expected)
    with other.fork("b"):
        assert not torch.equal(draw(), expected)
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.add("a", 1)


def test_an_error_inside_restores_the_default_sequence(draw):
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    torch.manual_seed(3)
    expected = draw()
    torch.manual_seed(3)

    def fail():
        with tracker.fork("a"):
            draw()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.equal(draw(), expected)


def test_rejects():
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="name must be new, got 'a'"):
        tracker.add("a", 2)
    with pytest.raises(ValueError, match="seed must be new, got 1"):
        tracker.add("b", 1)
    with (
        pytest.raises(ValueError, match=r"name must be one of \['a'\], got 'c'"),
        tracker.fork("c"),
    ):
        pass
    with pytest.raises(TypeError, match="states must be a dict of names and tensors, got list"):
        tracker.set_states([])
