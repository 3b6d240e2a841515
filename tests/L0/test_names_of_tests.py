"""Modules of tests have different names, so that one pytest command can take several folders."""

import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# pytest loads each conftest.py by its path; the others are scripts that nothing imports.
NOT_IMPORTED = {"conftest.py", "run.py"}


def test_each_module_has_a_name_of_its_own():
    found = defaultdict(list)
    for path in TESTS.rglob("*.py"):
        if path.name not in NOT_IMPORTED:
            found[path.name].append(str(path.relative_to(TESTS)))
    assert len(found) > 100
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


def test_no_module_imports_a_conftest():
    """``import conftest`` would give one of several files, depending on the folders collected."""
    for path in TESTS.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) conftest\b", path.read_text(), re.M), path
