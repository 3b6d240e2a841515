"""Tests with released frameworks, unmodified, which find apex_te by the name transformer_engine.

``make frameworks`` installs the frameworks and runs these tests; a test is skipped without its
framework.
"""

import os
import sys

# Before a framework is imported: some look for Transformer Engine only then.
os.environ["APEX_TE_TRANSFORMER_ENGINE"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")

import pytest
import torch
from pins import ROOT

sys.path.insert(0, str(ROOT / "tests" / "L1" / "distributed"))

from ranks import Ranks

from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.integrations import transformer_engine

transformer_engine.install()


@pytest.fixture(autouse=True)
def _fresh():
    """Each test starts as a new process does: no region is pending, no framework is set up."""
    before = dict(os.environ)
    amax_groups.pending = 0
    torch.manual_seed(1234)
    yield
    amax_groups.pending = 0
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


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
    for ranks in found.values():
        ranks.close()


@pytest.fixture
def one(sets):
    return sets[1]


@pytest.fixture
def two(sets):
    return sets[2]


@pytest.fixture(scope="module")
def four():
    """4 ranks without GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def gpu_sets():
    """Sets of ranks with a GPU each, by size."""
    found = {size: Ranks(size, "nccl") for size in (1, 2) if torch.cuda.device_count() >= size}
    yield found
    for ranks in found.values():
        ranks.close()
