"""Makes the files of tests/L0/module importable, whose functions the tests here call."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "L0" / "module"))
