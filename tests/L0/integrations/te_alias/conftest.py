"""Fixtures of the alias's tests: modules under Transformer Engine's names, no old state."""

import importlib
import sys

import pytest
import torch

from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.integrations.transformer_engine import _device

OWN = "apex_te.integrations.transformer_engine"
MODULES = (
    "", ".common", ".common.recipe", ".pytorch", ".pytorch.module", ".pytorch.module.linear",
    ".pytorch.module.layernorm", ".pytorch.module.rmsnorm", ".pytorch.module.layernorm_linear",
    ".pytorch.module.layernorm_mlp", ".pytorch.module.grouped_linear",
    ".pytorch.module.fp8_padding", ".pytorch.module.fp8_unpadding", ".pytorch.module.base",
)  # fmt: skip


@pytest.fixture
def alias(monkeypatch):
    """Makes ``transformer_engine`` importable, by which pickles name the alias's classes."""
    for name in MODULES:
        module = importlib.import_module(OWN + name)
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)


@pytest.fixture
def own_device():
    """Leaves the default device of alias modules as it is."""


@pytest.fixture(autouse=True)
def _on_the_cpu(request, monkeypatch):
    """Without a device, alias modules are on the CPU, on machines with a GPU, too."""
    if "own_device" not in request.fixturenames:
        monkeypatch.setattr(_device, "current_gpu", lambda: None)


@pytest.fixture(autouse=True)
def _fresh_regions():
    """Each test starts as a new process does: no region is pending."""
    amax_groups.pending = 0
    yield
    amax_groups.pending = 0


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Each test compiles anew: torch refuses a function that many tests of a process compiled."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
