"""pytest enters every test file of the repository, whatever its folder is called."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/L0", "tests/L1")
# Records the files that pytest would import, and imports none of them.
COLLECT = """
import sys, pytest
class Recorder:
    found = set()
    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path):
        if (yield):
            self.found.add(str(file_path))
        return []
pytest.main(["--collect-only", "--noconftest", *sys.argv[1:]], plugins=[Recorder()])
print("entered", *sorted(Recorder.found), sep="\\n")
"""


def files_that_exist(root):
    """The test files that git knows or would add; without git those of the file system."""
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        names = done.stdout.splitlines()
    else:
        names = [
            str(p.relative_to(root)) for folder in FOLDERS for p in root.glob(f"{folder}/**/*")
        ]
    found = {root / name for name in names if re.fullmatch(r"test_.*\.py", Path(name).name)}
    return {path for path in found if path.exists()}


def files_that_pytest_enters(root):
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-c", COLLECT, *FOLDERS]
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True)
    before, marker, found = done.stdout.partition("\nentered\n")
    assert marker, before + done.stderr
    return set(map(Path, found.splitlines()))


def test_every_test_file_is_entered():
    existing = files_that_exist(CHECKOUT)
    assert len(existing) > 250
    assert not existing - files_that_pytest_enters(CHECKOUT)


def test_no_conftest_hides_files():
    """The comparison above loads no conftest.py, which would import torch."""
    hiding = re.compile(r"collect_ignore|pytest_(ignore_collect|collect_(file|directory))")
    assert not [
        p for p in (CHECKOUT / "tests").rglob("conftest.py") if hiding.search(p.read_text())
    ]


def test_folder_that_pytest_skips_is_noticed(tmp_path):
    """A folder ``build`` is one: pytest's default ``norecursedirs`` names it."""
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    for name in ("L0/builders/test_a.py", "L0/build/test_b.py", "L1/dist/deep/test_c.py"):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True)
        path.write_text("raise AssertionError('imported')\n")
    left_out = files_that_exist(tmp_path) - files_that_pytest_enters(tmp_path)
    assert sorted(path.name for path in left_out) == ["test_b.py", "test_c.py"]
