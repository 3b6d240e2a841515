"""Tests with released frameworks, unmodified, which find apex_te by the name transformer_engine.

``make frameworks`` installs the frameworks and runs these tests; a test is skipped without its
framework.
"""

import os

# Before a framework is imported: some look for Transformer Engine only then.
os.environ["APEX_TE_TRANSFORMER_ENGINE"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")

import pytest
import torch

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
