"""Fixtures with ranks that run Megatron-Core; skips the test module that imports this without it."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest
import torch
from pins import ROOT, pin

pytest.importorskip("megatron.core")

sys.path.insert(0, str(ROOT / "tests" / "L1" / "distributed"))

import megatron.core
import megatron_gpt as mg
from ranks import Ranks

if megatron.core.__version__ != pin("megatron-core"):
    pytest.skip(f"needs Megatron-Core {pin('megatron-core')}", allow_module_level=True)


def close(found):
    """Ends the processes of sets of ranks, and those that Megatron has started there."""
    for ranks in found.values():
        with contextlib.suppress(OSError):  # of ranks that were killed
            ranks.run(mg.rank_ends_writers)
        ranks.close()


@pytest.fixture(scope="module")
def sets():
    """Sets of ranks by size, which see no GPU."""
    found: dict[int, Ranks] = {}
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for size in (1, 2):
        found[size] = Ranks(size)
    if before is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = before
    yield found
    close(found)


@pytest.fixture
def one(sets):
    return sets[1]


@pytest.fixture
def two(sets):
    return sets[2]


@pytest.fixture(scope="module")
def gpu_sets():
    """Sets of ranks with a GPU each, by size."""
    found = {size: Ranks(size, "nccl") for size in (1, 2) if torch.cuda.device_count() >= size}
    yield found
    close(found)


def gpus(gpu_sets, size):
    if size not in gpu_sets:
        pytest.skip(f"needs {size} GPUs, got {torch.cuda.device_count()}")
    return gpu_sets[size]
