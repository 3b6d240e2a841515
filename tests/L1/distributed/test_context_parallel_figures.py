"""The figures of benchmarks/layers/bench_context_parallel.py in small sizes."""

import sys
from pathlib import Path

from on_rank import device_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "layers"))


def figures(rank):
    import bench_context_parallel as bench

    return bench.measured(bench.TINY, device_of(rank))


def test_figures(each_two):
    for rows in each_two.run(figures):
        cases = [(row["window"], row["method"]) for row in rows if row["method"][:2] != "te"]
        assert cases == [(w, method) for w in (0, 7) for method in ("all_gather", "a2a")]
        for row in rows:
            assert row["ms"] > 0
            assert row["over share"] == row["ms"] / row["share ms"]
            assert row["largest difference"] < (1e-6 if each_two.backend == "gloo" else 0.1)
            assert row["path"].startswith(row["method"]) or row["method"][:2] == "te"
