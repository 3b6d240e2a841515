"""The fixtures and helpers of the builder tests in L0."""

import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[2] / "L0" / "builders"
sys.path.insert(0, str(_FOLDER))
_spec = importlib.util.spec_from_file_location("build_fixtures", _FOLDER / "conftest.py")
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
cache_dir, forget, root = _fixtures.cache_dir, _fixtures.forget, _fixtures.root
