"""Each C function for CPUs, called through JAX, gives the bits that it gives PyTorch."""

import json
import os
import sys
from pathlib import Path

import pytest
from programs import captured

pytest.importorskip("jax")
from apex_te.op_builder import all_builders

HERE = Path(__file__).resolve().parent
# Tests of what surrounds the ops: they call none, or replace the dispatcher themselves.
OTHERS = (
    "dispatcher", "former", "fuzz", "lifetimes", "long_sums", "memory_limits", "program",
    "refusals", "registration", "tracing",
)  # fmt: skip


def test_every_function_gives_the_same_bits(tmp_path):
    """A sample of the ops' tests; the plugin alone repeats all of them."""
    files = sorted((HERE.parent / "ops").glob("test_*.py"))
    files = [str(path) for path in files if not any(word in path.name for word in OTHERS)]
    environment = {"APEX_TE_REPLAY_CASES": "1", "APEX_TE_REPLAY_CALLS": "3", **os.environ}
    environment["APEX_TE_REPLAY"] = str(tmp_path / "outcome.json")
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    options = ["-q", "-p", "replay", "-p", "no:xdist", "-m", "not cuda"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    captured(command, timeout=900, env=environment, cwd=HERE.parents[2])
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["different"] == []
    assert outcome["errors"] == []
    functions = {
        name
        for builder in all_builders().values()
        for name, spec in builder.functions().items()
        if "cpu" in spec.devices and "->" not in spec.signature
    }
    assert functions - set(outcome["calls"]) == set()
    assert sum(outcome["calls"].values()) > len(functions)
