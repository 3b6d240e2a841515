"""``benchmarks/memory_table.py`` counts what is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import apex_te

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import memory_table

# Bytes of an element: parameter, master weight, moments, gradient.
EXPECTED = {
    "fp32": (4, 0, 8, 4),
    "bf16, fp32 master weight": (2, 4, 8, 2),
    "bf16, remainders, 8-bit moments": (2, 2, 2, 2),
    "FP8, fp32 master weight": (1, 4, 8, 2),
    "FP8, fp16 master weight, 8-bit moments": (1, 2, 2, 2),
    "FP8, frozen": (1, 0, 0, 0),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_bytes_of_parameters(name: str) -> None:
    (choice,) = (choice for choice in memory_table.CHOICES if choice.name == name)
    row = memory_table.parameter_row(choice, 64, "cpu")
    found = [row[part] for part in ("parameter", "master", "moments", "gradient")]
    scales = 3 * 4 / 64**2  # at most one fp32 for the parameter and for each moment
    assert found == pytest.approx(EXPECTED[name], abs=scales)
    assert row["sum"] == sum(found)


def test_bytes_of_activations() -> None:
    def layer() -> torch.nn.Module:
        return apex_te.Linear(64, 96, bias=False, params_dtype=torch.bfloat16)

    rows = memory_table.activation_rows(64, (8, 32), "cpu", layer)
    found = {(row["recipe"], row["activations"]): row for row in rows}
    for name, size in (("bf16", 2), ("delayed", 1), ("tensorwise", 1), ("blockwise", 1)):
        scales = 0.1  # and their scales
        assert found[name, "saved"]["device bytes"] == pytest.approx(size, abs=scales)
        assert found[name, "saved"]["host bytes"] == 0
        assert found[name, "small"] == {**found[name, "saved"], "activations": "small"}
        assert found[name, "recomputed"]["device bytes"] == 2
        assert found[name, "offloaded"]["device bytes"] == 0
        assert found[name, "offloaded"]["host bytes"] == pytest.approx(size, abs=scales)
