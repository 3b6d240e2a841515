"""The figures of benchmarks/layers/bench_checkpoint.py in small sizes: bytes, gradients, stacks."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "layers"))
import bench_checkpoint as bench

STACKS = {
    "weights": ["bf16", "FP8"],
    "LoRA": ["apex_te bf16", "decoded", "torch bf16", "FP8", "FP8, fused"],
    "full": ["bf16", "bf16 weights, FP8 products", "FP8"],
    "hand-over": ["held in FP8", "cast from bf16"],
    "log-probs": ["torch", "linear_log_probs", "linear_log_probs, FP8"],
}


def test_figures(tmp_path, monkeypatch):
    saved = {}
    monkeypatch.setattr(bench.harness, "report", lambda name, rows, **told: saved.update(rows=rows))
    monkeypatch.setattr(sys, "argv", ["bench_checkpoint.py", "--tiny"])
    bench.main()
    rows = saved["rows"]
    found = {f: [row["stack"] for row in rows if row["figure"] == f] for f in STACKS}
    assert found == STACKS
    of = {(row["figure"], row["stack"]): row for row in rows}
    scales = 4 / bench.BLOCK**2
    assert of["weights", "FP8"]["of bf16"] == pytest.approx((1 + scales) / 4)  # of fp32 here
    assert all(row["ms"] > 0 for row in rows if row["figure"] != "weights")
    for figure in ("LoRA", "log-probs"):
        for stack in STACKS[figure]:
            bound = 0.1 if "FP8" in stack or stack == "decoded" else 1e-5
            assert of[figure, stack]["gradients differ by"] < bound, stack
    # FP8 products in forward, and exact ones of the decoded weights in backward.
    differs = [of["LoRA", stack]["gradients differ by"] for stack in STACKS["LoRA"]]
    assert 0.01 < differs[1] < differs[3]
    sizes, shape = bench.TINY, bench.TINY.shape
    groups = shape.hidden // shape.heads * shape.groups
    elements = 2 * shape.hidden * (shape.hidden + groups) + 3 * shape.hidden * shape.ffn
    others = 4 * (2 * sizes.words + 2 * sizes.layers + 1) * shape.hidden  # fp32
    for stack in STACKS["hand-over"]:
        given = of["hand-over", stack]["GiB"] * 2**30
        assert given == pytest.approx(sizes.layers * elements * (1 + scales) + others)
