"""The files of a release: those in a folder that is named, else made once for all tests.

    make dist WHEELS="pure cpu" && APEX_TE_TEST_DIST=dist pytest tests/L1/releases

Making them compiles every op for the CPU, which takes minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    """A folder with an sdist, a pure wheel and one with CPU libraries."""
    if named := os.environ.get("APEX_TE_TEST_DIST"):
        return Path(named).resolve()
    out = tmp_path_factory.mktemp("dist")
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    subprocess.run(
        [sys.executable, "scripts/dist.py", "--out", str(out), "pure", "cpu"],
        cwd=CHECKOUT,
        env={**os.environ, "APEX_BUILD_PYTHONS": own},
        check=True,
        timeout=3600,
    )
    return out
