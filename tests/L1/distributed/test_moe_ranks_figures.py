"""The figures of benchmarks/layers/bench_moe_ranks.py in small sizes: bytes and equal outputs."""

import sys
from pathlib import Path

from on_rank import device_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "layers"))


BYTES = [f"{kind}{of} bytes" for kind in ("dispatch", "combine") for of in ("", "'s gradient")]
IN_FP8 = ("dispatch bytes", "combine's gradient bytes")
COLUMNS = 128  # of a row, with one scale in FP8


def figures(rank):
    import bench_moe_ranks as bench

    assert bench.TINY.hidden == COLUMNS
    return bench.measured(bench.TINY, device_of(rank))


def test_figures(each_two):
    element = 4 if each_two.backend == "gloo" else 2
    ranks = each_two.run(figures)
    for *rows, without in ranks:
        pairs = [(wire, chunks) for wire in ("bf16", "blockwise") for chunks in (1, 2, 4)]
        assert [(row["wire"], row["chunks"]) for row in rows] == pairs
        assert without["wire"] == "no exchange"
        for row in rows:
            assert row["equal bits"]
            assert row["ms"] > 0
            for name in BYTES:
                sent = rows[0][name] // element
                if row["wire"] == "blockwise" and name in IN_FP8:
                    assert row[name] == sent // COLUMNS * (COLUMNS + 4)
                else:
                    assert row[name] == sent * element
    # What one rank sends, the other sends back.
    for found, other in zip(ranks, reversed(ranks), strict=True):
        sent, back = found[0]["dispatch bytes"], [other[0][name] for name in BYTES[1:3]]
        assert sent == found[0]["combine's gradient bytes"] > 0
        assert back == [sent, sent]
