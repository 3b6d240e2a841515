"""Fixtures of the module tests."""

import pytest
import torch

from apex_te.state import registry


@pytest.fixture(autouse=True)
def _fresh_regions():
    """Each test starts as a new process does: seeded, and with no region pending."""
    torch.manual_seed(0)
    registry.pending = 0
    yield
    registry.pending = 0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device(request.param)
