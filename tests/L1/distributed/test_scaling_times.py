"""benchmarks/scaling_model.py: times by hand, and tables that come from a results file alone."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import scaling_collectives as paper
import scaling_model as times

TOKENS = {"tokens": 4096, "batch": 2}


def measured(latency=20.0, gb_per_s=300.0, ms=20.0):
    """Rows of a results file of a machine on which every collective takes the same line."""
    rows = [{"alone": name, "ms": ms, **TOKENS} for name in ("bf16", "delayed")]
    for op in times.OPS:
        for ranks in (2, 4):
            for size in (1 << 16, 1 << 22, 1 << 28):
                group = paper.Group(ranks, ranks)
                sent = paper.Collective("", "", op, size, group).sent
                us = latency + sent / gb_per_s / 1e3
                rows.append({"collective": op, "ranks": ranks, "bytes": size, "us": us})
    return rows


def test_lines_are_found_again():
    for link in times.Machine(measured()).links.values():
        assert link == pytest.approx((20.0, 300.0))


def _collective(op, size, ranks, per_node, beside=None):
    return paper.Collective("", "", op, size, paper.Group(ranks, per_node), beside)


def test_time_of_a_collective():
    machine = times.Machine(measured())
    ms = machine.milliseconds
    assert ms(_collective("all_gather", 10**9, 1, 1)) == 0.0
    assert ms(_collective("all_gather", 8 * 10**8, 8, 8)) == pytest.approx(0.02 + 700 / 300)
    assert ms(_collective("all_reduce", 8 * 10**8, 8, 8)) == pytest.approx(0.02 + 1400 / 300)
    # Between nodes: an adapter for each of two ranks in a node, 3 steps of a ring, 4 of trees.
    found = ms(_collective("reduce_scatter", 8 * 10**8, 8, 2))
    assert found == pytest.approx(0.02 + 3 * 0.005 + 700 / 100)
    found = ms(_collective("all_reduce", 8 * 10**8, 8, 2))
    assert found == pytest.approx(0.02 + 4 * 0.005 + 1400 / 100)
    # Six of eight parts leave the node through the rank's own adapter.
    found = ms(_collective("all_to_all", 8 * 10**8, 8, 2))
    assert found == pytest.approx(0.02 + 3 * 0.005 + 600 / 50)


def test_what_is_exposed():
    """Collectives beside the same computation share its time; those beside none are waited for."""
    machine = times.Machine(measured(latency=0.0))
    one = _collective("all_gather", 6 * 10**8, 2, 2, "wgrad")  # 1 ms
    assert machine.milliseconds(one) == pytest.approx(1.0)
    assert machine.exposed([one], {"wgrad": 0.75}) == pytest.approx((0.25, 0.75))
    assert machine.exposed([one, one], {"wgrad": 0.75}) == pytest.approx((1.25, 0.75))
    assert machine.exposed([one], {"wgrad": 2.0}) == pytest.approx((0.0, 1.0))
    first = one._replace(beside=None)
    assert machine.exposed([first, one], {"wgrad": 2.0}) == pytest.approx((1.0, 1.0))


def test_what_hidden_communication_costs():
    """Found in measured steps: here they wait for the prediction and a tenth of what it hides."""
    rows = measured()
    plain = times.Machine(rows)
    assert plain.slowdown == 0.0
    for split in ("tp", "fsdp"):
        row = {"split": split, "ranks": 2, "stack": "bf16", "layers": 4, **TOKENS}
        _, beyond, hidden = plain._parts(*times.measured_case(row), False)
        assert hidden > 0.1
        rows.append({**row, "ms": 9.0, "exposed ms": 0.0, "waited ms": beyond + 0.1 * hidden})
    machine = times.Machine(rows)
    assert machine.slowdown == pytest.approx(0.1)
    for row in rows[-2:]:
        assert times.predicted(machine, row) == pytest.approx(row["waited ms"])


def test_computation_is_that_of_the_measured_layer():
    machine = times.Machine(measured(ms=20.0))
    model = replace(times.MODELS["Llama-3-8B"], sequence=4096, batch=2)
    alone = machine.compute(model, paper.Layout(1), paper.Recipe())
    assert alone["forward"] + alone["backward"] == pytest.approx(20.0)
    split = machine.compute(model, paper.Layout(4, 4), paper.Recipe())
    assert split["wgrad fc1"] == pytest.approx(alone["wgrad fc1"] / 4)
    flops = model.flops()
    assert flops["fc1"] == 2 * 8192 * 4096 * 2 * 14336
    # Halves of scores are masked: 2 products of 4096 x 4096 x 128 for each head and sequence.
    assert flops["attention"] == 2 * 2 * (2 * 4096 * 4096 * 128 * 32) / 2


def test_tables(tmp_path, monkeypatch, capsys):
    """They are made of a results file, and of nothing else."""
    results, page = tmp_path / "scaling.json", tmp_path / "scaling.md"
    with pytest.raises(FileNotFoundError, match=r"bench_scaling\.py"):
        times.Machine.measured(results)
    row = {"split": "tp", "ranks": 2, "stack": "delayed", "layers": 1, **TOKENS}
    rows = [*measured(), {**row, "ms": 8.0, "exposed ms": 0.5, "waited ms": 0.6}]
    results.write_text(json.dumps({"rows": rows}))
    machine = times.Machine.measured(results)
    table = times.table(machine).splitlines()
    assert len(table) == 2 + 2 * 5 * len(times.PLANS)
    assert all(line.count("|") == table[0].count("|") for line in table)
    assert f"| {times.predicted(machine, row):.2f} |" in times.check(machine)
    page.write_text(f"before\n{times.MARKS[0]}\nold\n{times.MARKS[1]}\nafter\n")
    monkeypatch.setattr(times, "PAGE", page)
    monkeypatch.setattr(times.Machine, "measured", lambda: machine)
    monkeypatch.setattr(sys, "argv", ["scaling_model.py", "--table"])
    times.main()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert table[-1] in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 6, "tp": 4}, r"tp \* shard must divide ranks=6, got 4"),
        ({"ranks": 8, "ep": 2}, r"ep must divide tp \* shard=1, got 2"),
        (
            {"ranks": 8, "tp": 2, "shard": 4, "ep": 8, "sequence_parallel": False},
            "sequence_parallel must be True with ep and tp",
        ),
    ],
)
def test_layouts_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        paper.Layout(**options)
