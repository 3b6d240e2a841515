"""torch.compile on the CPU of the pairs of a module and a recipe that L0 leaves out."""

import pytest
import torch
from test_compile import OTHER_PAIRS, _no_graphs, check_steps  # noqa: F401


@pytest.mark.parametrize(("name", "recipe"), OTHER_PAIRS)
def test_equals_eager(name, recipe):
    check_steps(name, recipe, torch.device("cpu"))
