"""Modules, experts, einsum, vmap and optimizers on a GPU, each case in a process of its own."""

import os
import sys
from pathlib import Path

import pytest
from checks import needs_cuda
from programs import captured

pytest.importorskip("flax.nnx")
pytest.importorskip("optax")
from on_a_gpu import CASES

HERE = Path(__file__).resolve().parent


@needs_cuda
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case):
    path = os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    captured(
        [sys.executable, str(HERE / "on_a_gpu.py"), case],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cuda,cpu"},
    )
