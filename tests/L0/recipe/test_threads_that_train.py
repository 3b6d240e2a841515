"""Training in threads: at once by recipes without state, one after the other by delayed scaling."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checks import assert_same_bits
from schemes import SCHEMES, STATELESS

from apex_te import LayerNormMLP, flush_fp8_state, fp8_autocast
from apex_te.fp8.delayed import update
from apex_te.fp8.delayed.ranks import amax_groups

DELAYED = SCHEMES["delayed"]
said = "two threads train with delayed scaling at once"


class Training:
    """A model and its steps."""

    def __init__(self, width, recipe):
        torch.manual_seed(width)
        self.model, self.recipe = LayerNormMLP(width, 2 * width), recipe
        self.batches = torch.randn(4, 16, width)
        self.results = []

    def step(self, i, inside=lambda: None):
        with fp8_autocast(True, self.recipe):
            loss = (self.model(self.batches[i]) - 1).square().mean()
            inside()
        loss.backward()
        with torch.no_grad():
            for p in self.model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        self.results.append(loss.detach())

    def run(self):
        for i in range(len(self.batches)):
            self.step(i)
        return self.results + [p.detach() for p in self.model.parameters()]


@pytest.fixture(autouse=True)
def _no_pending_regions():
    flush_fp8_state()
    amax_groups.pending = 0
    update._warn_of_threads.cache_clear()


@pytest.mark.parametrize("name", STATELESS)
def test_two_models_at_once(name):
    """Each has the bits of training alone."""
    expected = [Training(width, SCHEMES[name]).run() for width in (32, 64)]
    models = [Training(width, SCHEMES[name]) for width in (32, 64)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(Training.run, models))
    assert_same_bits(found[0], expected[0])
    assert_same_bits(found[1], expected[1])


def test_delayed_scaling_in_two_threads_at_once_warns():
    """Once in a process; an evaluation in another thread does not."""
    one, other = Training(32, DELAYED), Training(64, DELAYED)
    one.step(0)
    entered, done = threading.Event(), threading.Event()

    def wait():
        entered.set()
        done.wait(60)

    thread = threading.Thread(target=one.step, args=(1, wait))
    thread.start()
    entered.wait(60)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.no_grad(), fp8_autocast(True, DELAYED):
                other.model(other.batches[0])
        with pytest.warns(UserWarning, match=said):
            other.step(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.step(1)
    finally:
        done.set()
        thread.join()


def test_delayed_scaling_with_a_thread_for_each_step():
    """It has the bits of training in one thread, and no warning."""
    expected = Training(32, DELAYED).run()
    flush_fp8_state()
    training = Training(32, DELAYED)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", said)
        for i in range(4):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(training.step, i).result()
    assert_same_bits(training.results, expected[:4])
    assert_same_bits([p.detach() for p in training.model.parameters()], expected[4:])
