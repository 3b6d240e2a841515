"""Helpers of the tests with Megatron-Core; importing them without it skips the test module."""

from __future__ import annotations

import contextlib

import pytest
import torch
from pins import pin

pytest.importorskip("megatron.core")

import megatron.core
import megatron_gpt as mg

if megatron.core.__version__ != pin("megatron-core"):
    pytest.skip(f"needs Megatron-Core {pin('megatron-core')}", allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def writers(sets, gpu_sets):
    """Ends the processes that Megatron starts on ranks and would leave behind."""
    yield
    for ranks in (*sets.values(), *gpu_sets.values()):
        with contextlib.suppress(OSError):  # of ranks that were killed
            ranks.run(mg.rank_ends_writers)


def gpus(gpu_sets, size):
    if size not in gpu_sets:
        pytest.skip(f"needs {size} GPUs, got {torch.cuda.device_count()}")
    return gpu_sets[size]
