"""Fixtures of the module tests."""

import pytest

from apex_te.state import registry


@pytest.fixture(autouse=True)
def _fresh_regions():
    """Each test starts as a new process does: no region is pending."""
    registry.pending = 0
    yield
    registry.pending = 0
