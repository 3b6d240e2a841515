"""Fixtures of the module tests."""

import sys

import pytest

from apex_te.fp8.delayed.ranks import amax_groups


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Each test compiles anew: torch refuses a function that many tests of a process compiled."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(autouse=True)
def _fresh_regions():
    """Each test starts as a new process does: no region is pending."""
    amax_groups.pending = 0
    yield
    amax_groups.pending = 0
