"""A region ends where its own block does: suspended generators, other threads, shared objects."""

import contextlib
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from apex_te.autocast import fp8_autocast, get_fp8_recipe, is_fp8_enabled, local
from apex_te.fp8.model_init import fp8_model_init, settings
from apex_te.recipe import CurrentScaling, DelayedScaling

A, B = DelayedScaling(amax_history_len=3), CurrentScaling(pow2=True)
each_kind = pytest.mark.parametrize(
    ("enter", "recipe"),
    [
        (fp8_autocast, lambda: get_fp8_recipe() if is_fp8_enabled() else None),
        (fp8_model_init, lambda: None if settings() is None else settings().recipe),
    ],
    ids=["fp8_autocast", "fp8_model_init"],
)


@pytest.fixture(autouse=True)
def _outside(enter, recipe):
    assert recipe() is None
    yield
    assert recipe() is None
    assert local.region is None


def suspended(region):
    with region:
        yield
        yield


@pytest.fixture
def worker():
    """Runs functions in one other thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(10)


@each_kind
def test_blocks_are_left_in_another_order(enter, recipe):
    generator = suspended(enter(True, A))
    next(generator)
    assert recipe() == A  # as long as it is suspended
    with enter(True, B):
        generator.close()
        assert recipe() == B
    assert recipe() is None
    first, second, third = (contextlib.ExitStack() for _ in range(3))
    for stack, region in ((first, A), (second, B), (third, A)):
        stack.enter_context(enter(True, region))
    second.close()
    assert recipe() == A
    third.close()
    assert recipe() == A
    first.close()


@each_kind
@pytest.mark.parametrize("how", ["close", "collect", "finish"])
def test_a_generator_is_left_by_another_thread(enter, recipe, how, worker):
    generator = suspended(enter(True, A))
    worker(next, generator)
    assert worker(recipe) == A
    with enter(True, B):
        assert recipe() == B
        if how == "close":
            generator.close()
        elif how == "finish":
            assert next(generator) is None  # in this thread, whose region is another
            assert list(generator) == []
        del generator
        gc.collect()
        assert recipe() == B
        assert worker(recipe) is None


@each_kind
def test_it_leaves_below_what_the_other_thread_has_entered(enter, recipe, worker):
    generator, stack = suspended(enter(True, A)), contextlib.ExitStack()
    worker(next, generator)
    worker(stack.enter_context, enter(True, B))
    generator.close()
    assert worker(recipe) == B
    worker(stack.close)
    assert worker(recipe) is None


@each_kind
def test_a_thread_that_is_gone(enter, recipe):
    generator = suspended(enter(True, A))
    thread = threading.Thread(target=next, args=(generator,))
    thread.start()
    thread.join()
    assert recipe() is None
    with enter(True, B):
        generator.close()
        assert recipe() == B


@each_kind
def test_one_object_nested_and_shared_by_threads(enter, recipe):
    region = enter(True, A)
    with region:
        with region, enter(False):
            assert recipe() is None
            with region:
                assert recipe() == A
        assert recipe() == A
    barrier = threading.Barrier(4)

    def run(count):
        for _ in range(200):
            with region:
                if recipe() != A:
                    return False
                with enter(True, B), region:
                    pass
                if recipe() != A:
                    return False
            if recipe() is not None:
                return False
        barrier.wait(10)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))
    region.__exit__(None, None, None)  # of nothing entered


@each_kind
def test_an_exit_leaves_the_block_of_others_alone(enter, recipe):
    with enter(True, A):
        enter(True, B).__exit__(None, None, None)
        assert recipe() == A
