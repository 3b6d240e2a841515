"""Which cases of a parametrized test run without ``--long``."""

import re
import shutil
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from covering import covering

TESTS = Path(__file__).resolve().parents[1]
FILE = """
import pytest

@pytest.mark.cover(2)
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(2))
@pytest.mark.parametrize("device", ["cpu", "other"])
def test_product(a, b, c, device): pass

@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1), (1, 0)])
def test_rows(a, b): pass

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(2))
@pytest.mark.parametrize("c", range(2))
def test_without_a_mark(a, b, c): pass

@pytest.mark.parametrize("a", [0, pytest.param(1, marks=pytest.mark.long)])
def test_single(a): pass
"""


@pytest.mark.cover(2)
@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(5,), (4, 3, 2), (7, 2, 2, 4, 3)])
def test_every_combination_occurs(sizes, strength):
    cases = list(product(*map(range, sizes)))
    chosen = [cases[i] for i in covering(cases, strength)]
    for columns in combinations(range(len(sizes)), min(strength, len(sizes))):
        wanted = {tuple(case[i] for i in columns) for case in cases}
        assert {tuple(case[i] for i in columns) for case in chosen} == wanted
    if len(sizes) == 5 and strength == 2:
        assert len(chosen) <= 32  # of 336; 28 are needed


def test_strength_0_keeps_the_first_case():
    assert covering([(0, 0), (0, 1)], 0) == {0}


def test_of_equally_new_cases_the_one_with_new_pairs_is_taken():
    cases = list(product(range(6), range(3), range(2)))
    chosen = [cases[i] for i in sorted(covering(cases, 1))]
    assert chosen == [(0, 0, 0), (1, 1, 1), (2, 2, 0), (3, 0, 1), (4, 1, 0), (5, 2, 1)]


def test_cases_that_lack_combinations_are_covered():
    assert covering([(0, 0), (0, 1), (1, 1)], 2) == {0, 1, 2}


def test_what_runs(tmp_path):
    for name in ("conftest.py", "covering.py"):
        shutil.copy(TESTS / name, tmp_path)
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    (tmp_path / "test_some.py").write_text(FILE)
    runs = [["test_some.py"], ["test_some.py", "--long"], ["test_some.py::test_single"]]
    program = f"import pytest\nfor each in {runs}: pytest.main(['-q', '-p', 'no:xdist', *each])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    counts = [int(count) for count in re.findall(r"(\d+) passed", done.stdout)]
    assert counts == [24 + 3 + 3 + 1, 48 + 3 + 12 + 2, 2], done.stdout + done.stderr
