"""Makes the modules in the folder above importable by the programs in this one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
