"""A short piece of `make sanitize`: every bound function takes or refuses whatever comes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fuzz import calls, record, run

ROOT = Path(__file__).resolve().parents[3]


def fuzz(*options):
    command = [sys.executable, str(ROOT / "tests" / "fuzz" / "run.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def record_calls(test, path, **settings):
    """Writes the calls of a test file to ``path``; what a failed test called counts, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "fuzz.record", "-m", "not cuda", test]
    folders = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    given = {**os.environ, "PYTHONPATH": folders, "APEX_TE_FUZZ_CALLS": str(path)}
    done = subprocess.run(
        command, env={**given, **settings}, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    output = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode in (0, 1, 2), output
    assert path.exists(), output
    assert path.read_text(), output
    if done.returncode:
        print(f"{test}: pytest ended with {done.returncode}, its calls are used:\n{output}")


def test_wild_calls_raise_errors_of_ours():
    done = fuzz("--calls", "600", "--seed", "11")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["calls"] == 600


@pytest.mark.long
def test_changed_calls_of_an_op(tmp_path):
    """Calls that pass, written down by the recorder, then changed: some pass, none breaks."""
    path = tmp_path / "calls.jsonl"
    tests = ROOT / "tests" / "L0" / "ops" / "test_byte_transpose.py"
    record_calls(f"{tests}::test_equals_reference", path)
    others = ",".join(set(run.functions()) - {"byte_transpose"})
    done = fuzz("--calls", "400", "--recorded", str(path), "--except", others)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["functions"] == 1
    assert 20 < facts["succeeded"] < 400


TESTS = """
import pytest
import torch

from apex_te.compatibility import byte_transpose as direct
from apex_te.ops.byte_transpose import byte_transpose


def test_passes():
    byte_transpose(torch.zeros(3, 4, dtype=torch.uint8))


def test_fails():
    x = torch.zeros(5, 6, dtype=torch.uint8)
    direct.byte_transpose(x, torch.empty(6, 5, dtype=torch.uint8))
    assert False


def test_meta_tensors_are_refused_as_without_the_recorder():
    x = torch.zeros(5, 6, dtype=torch.uint8, device="meta")
    with pytest.raises(TypeError, match="byte_transpose: fp8_data"):
        direct.byte_transpose(x, x)
"""


def shapes_in(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        arguments["fp8_data"]["shape"] for _, name, arguments in lines if name == "byte_transpose"
    ]


@pytest.mark.long
def test_the_recorder_sees_every_way_to_call_and_failed_tests(tmp_path, capsys):
    test, path = tmp_path / "test_some.py", tmp_path / "calls.jsonl"
    test.write_text(TESTS)
    record_calls(test, path)
    assert shapes_in(path) == [[3, 4], [5, 6]]
    said = capsys.readouterr().out
    assert "pytest ended with 1" in said
    assert "1 failed, 2 passed" in said


@pytest.mark.long
def test_the_recorder_ends_in_time_after_a_fair_choice(tmp_path):
    test, path = tmp_path / "test_some.py", tmp_path / "calls.jsonl"
    test.write_text(
        "import pytest\n"
        "import torch\n"
        "from apex_te.ops.byte_transpose import byte_transpose\n"
        "@pytest.mark.parametrize('rows', range(1, 21))\n"
        "def test_rows(rows):\n"
        "    byte_transpose(torch.zeros(rows, 4, dtype=torch.uint8))\n"
    )
    record_calls(test, path, APEX_TE_FUZZ_SECONDS="0")
    (shape,) = shapes_in(path)
    assert shape != [1, 4]


def test_large_calls_make_up_for_few_small_ones(tmp_path, monkeypatch):
    path = tmp_path / "calls.jsonl"
    monkeypatch.setenv("APEX_TE_FUZZ_CALLS", str(path))
    few = {("op", "few"): ["1", "2"], ("op", "few", "large"): [str(i) for i in range(20)]}
    many = {("op", "many"): ["0"] * 30, ("op", "many", "large"): ["1"] * 9}
    monkeypatch.setattr(record, "_kept", {**few, **many, ("op", "none", "large"): ["3"]})
    record.pytest_sessionfinish(None)
    names = [json.loads(line)[1] for line in path.read_text().splitlines()]
    assert {name: names.count(name) for name in names} == {"few": record.FEW, "many": 30, "none": 1}


def test_every_cpu_function_is_called():
    known = run.functions()
    assert len(known) >= 60
    assert {"cast_transpose", "multi_tensor_adam", "moe_permute_map"} <= set(known)


def test_a_call_is_the_same_every_time():
    known = run.functions()
    x = torch.arange(12, dtype=torch.int32).view(3, 4).t()
    recorded = {name: [{key: calls.describe(x) for key, _ in known[name][1]}] for name in known}
    for number in range(50):
        first, second = (run.choose(number, 3, known, recorded)[:2] for _ in range(2))
        assert first == second


@pytest.mark.parametrize("offset", [0, 3])
def test_a_described_tensor_is_made_again(offset):
    storage = torch.arange(40, dtype=torch.int64)
    x = torch.as_strided(storage, (3, 4), (8, 2), offset)
    made = calls.make(calls.describe(x), torch.Generator().manual_seed(1), {})
    assert torch.equal(made, x)
    assert made.stride() == x.stride()
    assert made.untyped_storage().nbytes() == 8 * (offset + 2 * 8 + 3 * 2 + 1)
    odd = calls.make(
        {**calls.describe(x), "misaligned": True}, torch.Generator().manual_seed(1), {}
    )
    assert odd.data_ptr() % 8


def test_an_error_that_is_not_ours_is_a_problem():
    assert run.problem_of(ValueError("scale: x must be 1, got 2"), "scale") == ""
    assert run.problem_of(ValueError("scale: x must be 1, got 2"), "scale_bwd") == ""
    assert "no error of ours" in run.problem_of(KeyError("x"), "scale")
    assert "does not begin" in run.problem_of(TypeError("scaled: x"), "scale")


def test_the_recorder_keeps_a_fair_and_fixed_choice(monkeypatch):
    kept = []
    for _ in range(2):
        monkeypatch.setattr(record, "_kept", {})
        monkeypatch.setattr(record, "_seen", {})
        for i in range(1000):
            record.keep(("op", "f"), str(i))
        kept.append(record._kept["op", "f"])
    assert kept[0] == kept[1]
    assert len(kept[0]) == record.MOST
    assert max(map(int, kept[0])) > 500
